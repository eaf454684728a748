"""The ParallelSpec head: k trainable mask tokens draft k + 1 tokens in one pass.

As in an EAGLE head, slot t holds token t + 1 at RoPE position t and predicts token t + 2, the first
of a draft. Its *group* is the slot and k masks: mask i (from 1) is at position t + i, sees the real
slots of its text up to t and masks 1 to i of that group, and predicts token t + 2 + i. Real
slots never see masks, so drafting and training have the same contexts.

There are two kinds of head. One reads the target's features and is otherwise an EAGLE head; a mask
has no feature, so one learned vector takes its place (the paper leaves that open). The other reads
tokens alone and is a plain Llama with both norms; it replaces Medusa's heads. The embedding and the
LM head are the target's, frozen. Xiao et al. 2024, "ParallelSpec: Parallel Drafter
for Efficient Speculative Decoding", sections 4.1 and 4.3.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.core.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleHead
from specjax.models.heads.layered import (
    LayeredConfig,
    LayeredHead,
    Stream,
    layers_like,
    through_layers,
)
from specjax.models.heads.training_attention import training_attention
from specjax.models.layers import DecoderLayer, Embedding, Linear, RMSNorm, Rotation
from specjax.models.target import QueryRows, Target


@dataclass(frozen=True)
class ParallelConfig(LayeredConfig):
    """The shape of a head.

    Raises:
        SpecjaxError: if there are no masks or no layers, or a bias for `fc` but no `fc`.
    """

    num_masks: int = 4
    reads_features: bool = True
    fc_bias: bool = False

    def __post_init__(self):
        if self.num_masks < 1:
            raise SpecjaxError(f"num_masks {self.num_masks} must be at least 1; the paper uses 4")
        if self.layers.num_hidden_layers < 1:
            raise SpecjaxError("a ParallelSpec head needs at least 1 layer; the paper uses 1")
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
        """Returns the shape of a head with layers of the target's sizes, without a window.

        The paper has one layer. The masks are the same at every slot, so in the first layer they
        attend by position, and only from the second layer on by content.
        """
        return cls(layers_like(target, num_layers), num_masks, reads_features, fc_bias)

    @property
    def taps(self) -> tuple[int, ...]:
        return (-1,) if self.reads_features else ()

    @property
    def num_depths(self) -> int:
        """The number of tokens that one pass drafts: one for the real slot, one per mask."""
        return self.num_masks + 1


class ParallelHead(LayeredHead):
    """A head of either kind; its output goes to `target.logits`. See the module.

    Drafting uses `run`, a pass with a cache. Training uses `step`, a pass over whole texts for one
    depth of all groups.
    """

    config: ParallelConfig

    def setup(self):
        self.add_draft_tokens()
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
        """Returns the input of the first layer; F is 0 if the head reads no features."""
        if not self.config.reads_features:
            return embedded
        return self.fc(jnp.concatenate([embedded, features.astype(embedded.dtype)], axis=-1))

    def finished(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Turns the output of the last layer into the input of the LM head."""
        return x if self.config.reads_features else self.norm(x)

    def __call__(
        self,
        rows: QueryRows,
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """See `run`; `embedded` and `features` are ignored at masks."""
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

    def one_step(
        self,
        embedded: Float[Array, "B T D"],
        features: Float[Array, "B T F"],
        streams: tuple[Stream, ...],
        rotation: Rotation,
        is_far: Bool[Array, "B T T"],
    ) -> tuple[Float[Array, "B T D"], Stream]:
        """Runs one depth of the groups of all slots; see `step`.

        Without streams the rows are the real slots, with i streams the i-th masks, for which
        `embedded` and `features` are ignored. Its T rows see T real slots and i masks, so all
        depths cost k + 1 times causal attention.
        """
        if streams:  # the masks of one depth differ only by position
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
        """Returns the input of the first layer at mask `number`, counted from 1."""
        embedded = self.mask_embeddings()[None, None, number - 1].astype(dtype)
        features = jnp.zeros((1, 1, 0))
        if self.config.reads_features:
            features = self.mask_hidden[None, None]
        return self.joined(embedded, features)

    @nn.nowrap
    def teacher_forced(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        tokens: Int[Array, "1 T"],
        features: Float[Array, "1 T D"],
    ) -> Iterator[tuple[Any, Callable[[Any], Array]]]:
        """Yields, per depth, the LM head's inputs along a text and a function from them to logits.

        See `MedusaHeads.teacher_forced`.
        """
        positions = jnp.arange(tokens.shape[1])[None]
        segments = jnp.zeros_like(tokens)
        embedded = target.embed(target_params, jnp.roll(tokens, -1, axis=1))
        read = features if self.config.reads_features else features[..., :0]
        streams: tuple[Stream, ...] = ()
        for _ in range(self.config.num_depths):
            output, own = self.step(params, embedded, read, streams, positions, segments)
            streams = (*streams, own)
            yield output, partial(target.logits, target_params)


def from_eagle(
    head: EagleHead, params: Mapping[str, Any], num_masks: int, key: Key[Array, ""]
) -> tuple[ParallelHead, dict[str, Any]]:
    """Returns a head that predicts the first token like this EAGLE head; its masks are untrained.

    The masks' embeddings are small and random, as in a new head, so that a mask starts as little
    more than what its attention gathers from the text. The embedding of a real token would come
    with a continuation to unlearn.

    Raises:
        SpecjaxError: if `num_masks` is less than 1.
    """
    own = ParallelHead(ParallelConfig(head.config.layers, num_masks, True, head.config.fc_bias))
    dtype = params["fc"]["weight"].dtype
    return own, own.initialise(key, dtype) | dict(params)
