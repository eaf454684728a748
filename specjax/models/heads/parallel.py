"""The ParallelSpec head: k trainable mask tokens draft k + 1 tokens in one pass.

Slot t stands, as an EAGLE head's, for token t + 1 at RoPE position t and predicts token t + 2, the
first of a draft. Its *group* is the slot and k masks: mask i (from 1) stands at position t + i,
sees the real slots up to t of its text and masks 1 to i of its own group, and predicts token
t + 2 + i. Real slots never see masks, so drafting and training meet the same contexts. There are
two kinds of head. One reads the target's features and is an EAGLE head otherwise; where a mask
stands no feature is known, and one learned vector takes its place (the paper leaves that open). The
other reads tokens alone and is a plain Llama with both norms: it replaces the heads of Medusa.
Embedding and LM head are the target's, frozen. Xiao et al. 2024, "ParallelSpec: Parallel Drafter
for Efficient Speculative Decoding", sections 4.1 and 4.3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleHead, Stream, through_layers
from specjax.models.heads.training_attention import text_before, training_attention
from specjax.models.layers import DecoderLayer, Embedding, Linear, RMSNorm, Rotation, rotation_of
from specjax.models.target import QueryRows, Target, causal_rows


@dataclass(frozen=True)
class ParallelConfig:
    """The shape of a head. The vocabulary and the hidden size of `layers` are the target's.

    Raises:
        SpecjaxError: for a head without masks, or a bias of `fc` where there is no `fc`.
    """

    layers: TransformerConfig
    num_masks: int = 4
    reads_features: bool = True
    fc_bias: bool = False

    def __post_init__(self):
        if self.num_masks < 1:
            raise SpecjaxError(f"num_masks {self.num_masks} must be at least 1; the paper takes 4")
        if self.layers.num_hidden_layers < 1:
            raise SpecjaxError("a ParallelSpec head needs at least 1 layer; the paper takes 1")
        if self.fc_bias and not self.reads_features:
            raise SpecjaxError("a head that reads no features has no fc; leave fc_bias out")

    @classmethod
    def for_target(
        cls,
        target: TransformerConfig,
        num_masks: int = 4,
        reads_features: bool = True,
        fc_bias: bool = False,
        num_layers: int = 1,
    ) -> "ParallelConfig":
        """Layers shaped like the target's own, of which the paper has one; they see all the text.

        Masks are the same at every slot, so in the first layer they look at places, and only from
        the second on at what stands there.
        """
        layers = replace(target, num_hidden_layers=num_layers, sliding_window=None)
        return cls(layers, num_masks, reads_features, fc_bias)

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def num_depths(self) -> int:
        """Tokens that one pass drafts: of the real slot and of each mask."""
        return self.num_masks + 1


class ParallelHead(nn.Module):
    """See the module. What it returns feeds `target.logits`, in both kinds.

    `head.run` is a pass with a cache, as drafting needs it; `head.step` goes over whole texts one
    depth of all groups at a time, as training needs it.
    """

    config: ParallelConfig

    def setup(self):
        layers, reads_features = self.config.layers, self.config.reads_features
        self.mask_embeddings = Embedding(replace(layers, vocab_size=self.config.num_masks))
        if reads_features:
            self.mask_hidden = self.param(
                "mask_hidden", nn.initializers.normal(0.02), (layers.hidden_size,)
            )
            self.fc = Linear(layers.hidden_size, self.config.fc_bias)
        else:
            self.norm = RMSNorm(layers.rms_norm_eps)
        self.layers = [
            DecoderLayer(layers, has_input_norm=number > 0 or not reads_features)
            for number in range(layers.num_hidden_layers)
        ]

    def joined(
        self, embedded: Float[Array, "B Q D"], features: Float[Array, "B Q F"]
    ) -> Float[Array, "B Q D"]:
        """What the first layer reads; F is 0 where no features are read."""
        if not self.config.reads_features:
            return embedded
        return self.fc(jnp.concatenate([embedded, features.astype(embedded.dtype)], axis=-1))

    def finished(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """What the LM head reads, of what the last layer says."""
        return x if self.config.reads_features else self.norm(x)

    def __call__(
        self,
        rows: QueryRows,
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """See `run`; what `embedded` and `features` hold at masks does not matter."""
        embedded, features = self._with_masks(rows.tokens, embedded, features)
        x, cache = through_layers(self.layers, self.joined(embedded, features), rows, cache)
        return self.finished(x), cache

    def _with_masks(
        self,
        tokens: Int[Array, "B Q"],
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
    ) -> tuple[Float[Array, "B Q D"], Float[Array, "B Q F"]]:
        is_mask = (tokens >= self.config.vocab_size)[..., None]
        which = jnp.clip(tokens - self.config.vocab_size, 0, self.config.num_masks - 1)
        of_masks = self.mask_embeddings()[which].astype(embedded.dtype)
        if self.config.reads_features:
            unknown = jnp.broadcast_to(self.mask_hidden.astype(features.dtype), features.shape)
            features = jnp.where(is_mask, unknown, features)
        return jnp.where(is_mask, of_masks, embedded), features

    def one_depth(
        self,
        embedded: Float[Array, "B T D"],
        features: Float[Array, "B T F"],
        streams: tuple[Stream, ...],
        rotation: Rotation,
        is_far: Bool[Array, "B T T"],
    ) -> tuple[Float[Array, "B T D"], Stream]:
        """See `step`."""
        if streams:  # the masks of one depth differ by their positions only
            x = self._joined_mask(len(streams), embedded.dtype)
            x = jnp.broadcast_to(x, embedded.shape)
        else:
            x = self.joined(embedded, features)
        own, is_near = [], jnp.ones(x.shape[:2], bool)
        for number, layer in enumerate(self.layers):
            query, key, value = layer.self_attn.query_key_value(layer.normed(x), rotation)
            far, *masks = (*(stream[number] for stream in streams), (key, value))
            mixed = training_attention(query, far, is_far, [(mask, is_near) for mask in masks])
            x = layer.after_attention(x, layer.self_attn.merge(mixed))
            own.append((key, value))
        return self.finished(x), tuple(own)

    def _joined_mask(self, number: int, dtype: DTypeLike) -> Float[Array, "1 1 D"]:
        """What the first layer reads at mask `number`, counted from 1."""
        embedded = self.mask_embeddings()[None, None, number - 1].astype(dtype)
        features = jnp.zeros((1, 1, 0))
        if self.config.reads_features:
            features = self.mask_hidden[None, None]
        return self.joined(embedded, features)

    @nn.nowrap
    def run(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        rows: QueryRows,
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """What the LM head is to read at `rows.tokens`; pure.

        Args:
            params: the head's.
            target: whose embedding is read.
            target_params: the target's.
            rows: tokens with their slots as positions: a token's place in the text, less one. Ids
                from `vocab_size` on are masks, the first, the second and so on.
            features: the target's, of the tokens before; F is 0 if the head reads none. What they
                hold at masks does not matter.
            cache: of the head; the rows are written as scratch, as `Transformer.run` does.
        """
        is_text = rows.tokens < self.config.vocab_size
        embedded = target.embed(target_params, jnp.where(is_text, rows.tokens, 0))
        output, cache = cast(Any, self.apply({"params": params}, rows, embedded, features, cache))
        return output, cache

    @nn.nowrap
    def step(
        self,
        params: Any,
        embedded: Float[Array, "B T D"],
        features: Float[Array, "B T F"],
        streams: tuple[Stream, ...],
        positions: Int[Array, "B T"],
        segments: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Stream]:
        """One depth of the groups of all slots of whole texts; pure.

        Without streams these are the real slots, with i streams the i-th masks: T rows that see T
        real slots and i masks, so that all depths cost k + 1 times causal attention.

        Args:
            params: the head's.
            embedded: of the token behind each slot, from the text.
            features: the target's, of the token before; F is 0 if the head reads none.
            streams: keys and values of the depths before, as returned.
            positions: slots within their texts.
            segments: number of the text that each slot belongs to; slots see their own text only.
        """
        text_length = jnp.full((embedded.shape[0],), embedded.shape[1])
        places = positions + len(streams)
        rotation = rotation_of(places, self.config.layers, text_length)
        variables, far = {"params": params}, text_before(segments)
        output, own = cast(
            Any,
            self.apply(
                variables, embedded, features, streams, rotation, far, method=self.one_depth
            ),
        )
        return output, own

    @nn.nowrap
    def initialise(self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """Random params, without embedding and LM head."""
        config = self.config.layers
        embedded = jnp.zeros((1, 1, config.hidden_size))
        features = embedded if self.config.reads_features else embedded[..., :0]
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
        cache = KVCache.create(config, 1, 1)
        params = jax.jit(self.init)(key, rows, embedded, features, cache)["params"]
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def from_eagle(
    head: EagleHead, params: Mapping[str, Any], num_masks: int, key: Key[Array, ""]
) -> tuple[ParallelHead, dict[str, Any]]:
    """A head that predicts the first token as this EAGLE head does, and knows nothing of masks yet.

    What stands for masks is small and random, as in a new head: a mask then begins as little more
    than what its attention gathers of the text, and as no particular token, whose known
    continuation it would first have to forget. They are all different, though each learns from its
    own depth anyway.

    Raises:
        SpecjaxError: if there are to be no masks.
    """
    own = ParallelHead(ParallelConfig(head.config.layers, num_masks, True, head.config.fc_bias))
    dtype = params["fc"]["weight"].dtype
    return own, own.initialise(key, dtype) | dict(params)
