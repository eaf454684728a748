"""The base of heads that have layers over the text, in slots of their cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from specjax.core.pytree import cast_floats
from specjax.models.cache import KVCache
from specjax.models.config import Rope, TransformerConfig, Variant
from specjax.models.heads import HeadWeights
from specjax.models.heads.training_attention import (
    KeysAndValues,
    draft_attention,
    longest_text,
)
from specjax.models.layers import Rotation, rotation_of
from specjax.models.products import lookup
from specjax.models.quantize import Weight, is_stored
from specjax.models.stack import run_layers
from specjax.models.target import QueryRows, causal_rows

# Names of params: the draft vocabulary, and what `with_lm_head_rows` adds.
DRAFT_TOKENS, DRAFT_ROWS = "draft_tokens", "draft_rows.weight"
Stream = tuple[KeysAndValues, ...]  # by layer


@dataclass(frozen=True)
class LayeredConfig:
    """The shape of a head; `layers` has the target's vocabulary and hidden size."""

    layers: TransformerConfig
    draft_vocab_size: int = field(default=0, kw_only=True)  # tokens that it drafts; 0: all

    @classmethod
    def for_target(
        cls,
        target: TransformerConfig,
        *shape: Any,
        num_layers: int = 1,
        draft_vocab_size: int = 0,
        **named: Any,
    ) -> Any:
        """Returns a head with Llama's layers of the target's sizes, given the other fields."""
        drafted = draft_vocab_size if draft_vocab_size < target.vocab_size else 0
        layers = layers_like(target, num_layers)
        return cls(layers, *shape, draft_vocab_size=drafted, **named)

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.layers.vocab_size

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose hidden states are its features, side by side."""
        return (-1,)

    @property
    def num_drafted(self) -> int:
        """The number of tokens that the head chooses from."""
        return self.draft_vocab_size or self.vocab_size


class LayeredHead(nn.Module):
    """A head that reads tokens and features, in slots: slot t holds token t + 1.

    Drafting uses `run`, a pass with a cache; training uses `step`, a pass over whole texts. Both
    apply `joined`, the `layers` and `finished`. With a draft vocabulary, the param `draft_tokens`
    holds the tokens that the head drafts, and the rest of the LM head is not read.
    """

    config: Any
    # Whether the n-th token of a draft is trained n - 1 positions behind its slot.
    moves_positions: ClassVar[bool] = True
    attend_in_training: ClassVar[Any] = staticmethod(draft_attention)

    def add_draft_tokens(self) -> None:
        """Adds the param to a head with a draft vocabulary; for `setup`. No layer reads it."""
        if (count := self.config.draft_vocab_size) and self.is_initializing():
            self.param(DRAFT_TOKENS, lambda key: jnp.arange(count, dtype=jnp.int32))

    def joined(
        self, embedded: Float[Array, "B Q D"], features: Float[Array, "B Q F"]
    ) -> Float[Array, "B Q E"]:
        """Returns the input of the first layer: by default, `fc` joins embedding and feature."""
        return self.fc(jnp.concatenate([embedded, features.astype(embedded.dtype)], axis=-1))

    def finished(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """Turns the output of the last layer into the input of the LM head."""
        return x

    def __call__(
        self,
        rows: QueryRows,
        embedded: Float[Array, "B Q D"],
        features: Float[Array, "B Q F"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        x = self.joined(embedded, features)
        hidden, _, cache = run_layers(self.layers, x, rows, cache)
        return self.finished(hidden[len(self.layers)]), cache

    def training_input(
        self, embedded: Float[Array, "B T D"], features: Float[Array, "B T F"], num_streams: int
    ) -> Float[Array, "B T E"]:
        """Returns the input of the first layer at step `num_streams` + 1."""
        return self.joined(embedded, features)

    def training_step(
        self,
        embedded: Float[Array, "B T D"],
        features: Float[Array, "B T F"],
        streams: tuple[Stream, ...],
        rotation: Rotation,
        segments: Int[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], Stream]:
        """See `step`."""
        x, stream = self.training_input(embedded, features, len(streams)), []
        for number, layer in enumerate(self.layers):
            query, key, value = layer.self_attn.query_key_value(layer.normed(x), rotation)
            all_streams = [*(earlier[number] for earlier in streams), (key, value)]
            mixed = self.attend_in_training(query, all_streams, segments)
            x = layer.after_attention(x, layer.self_attn.merge(mixed))
            stream.append((key, value))
        return self.finished(x), tuple(stream)

    @nn.nowrap
    def run(
        self, weights: HeadWeights, rows: QueryRows, features: Float[Array, "B Q F"], cache: KVCache
    ) -> tuple[Float[Array, "B Q D"], KVCache]:
        """Runs one pass with a cache, as drafting needs it; pure.

        The positions of `rows` are slots, one less than those in the text; ids from `vocab_size` on
        are tokens that only the head has, such as masks. The features are of the tokens before,
        from the target or predicted by the head; F is 0 if the head reads none. Returns the inputs
        of the LM head, and the cache with scratch slots, as `Target.run` writes them.
        """
        is_text = rows.tokens < self.config.vocab_size
        tokens = jnp.where(is_text, rows.tokens, 0)
        embedded = weights.target.embed(weights.target_params, tokens)
        inputs = rows, embedded, features, cache
        return cast(Any, self.apply({"params": weights.params}, *inputs))

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
        """Runs one training step over whole texts, with the context of drafting; pure.

        Step n (from 1) computes the n-th token of a draft at every slot. `attend_in_training`
        defines which slots of its text it attends to; with one step this is causal attention.
        `embedded` are the tokens that the slots read, from the text; the features are the target's
        at step 1, and `streams` what steps 1 to n - 1 returned: the keys and values. Positions are
        slots within their texts, which `segments` number. Returns the inputs of the LM head too.
        """
        text_length = longest_text(positions)
        positions = positions + len(streams) if self.moves_positions else positions
        rotation = rotation_of(positions, self.config.layers, text_length)
        inputs = embedded, features, streams, rotation, segments
        return cast(Any, self.apply({"params": params}, *inputs, method="training_step"))

    @nn.nowrap
    def logits(
        self, weights: HeadWeights, hidden: Float[Array, "... D"], lm_head: Weight | None
    ) -> Float[Array, "... R"]:
        """Returns the float32 logits of the tokens that the head drafts, from the output of `run`.

        `lm_head` comes from `lm_head_rows`.
        """
        return weights.target.logits(weights.target_params, hidden, lm_head)

    @nn.nowrap
    def lm_head_rows(self, weights: HeadWeights) -> Weight | None:
        """Returns the rows of the target's LM head for a draft vocabulary; None without one."""
        if (drafted := weights.params.get(DRAFT_TOKENS)) is None:
            return None
        if (computed := weights.params.get(DRAFT_ROWS)) is not None:
            return computed
        table = weights.target.lm_head(weights.target_params)
        return table[drafted] if is_stored(table) else lookup(table, drafted)

    @nn.nowrap
    def initialise(self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """Returns random params, without embedding and LM head."""
        embedded = jnp.zeros((1, 1, self.config.hidden_size))
        features = jnp.concatenate([embedded] * len(self.config.taps) or [embedded[..., :0]], -1)
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
        cache = KVCache.create(self.config.layers, 1, 1)
        params = jax.jit(self.init)(key, rows, embedded, features, cache)["params"]
        return cast_floats(params, dtype)


def with_lm_head_rows(head: Any, weights: HeadWeights) -> dict[str, Any]:
    """Returns the head's params with what `lm_head_rows` computes, so that requests do not."""
    rows = head.lm_head_rows(weights) if isinstance(head, LayeredHead) else None
    return dict(weights.params) | ({} if rows is None else {DRAFT_ROWS: rows})


def with_draft_tokens(
    head: Any, params: Mapping[str, Any], tokens: Sequence[int] | Int[np.ndarray | Array, " R"]
) -> tuple[Any, dict[str, Any]]:
    """Returns a head that drafts these tokens only, which must differ; an empty list means all."""
    others = {name: leaf for name, leaf in params.items() if name != DRAFT_TOKENS}
    drafted = {DRAFT_TOKENS: jnp.asarray(tokens, jnp.int32)} if len(tokens) else {}
    return type(head)(replace(head.config, draft_vocab_size=len(tokens))), others | drafted


def layers_like(target: TransformerConfig, num_layers: int) -> TransformerConfig:
    """Returns the shape of a Llama's layers of the target's sizes, without a sliding window."""
    layers = replace(target, num_hidden_layers=num_layers, sliding_window=None, layer_types=())
    if target.model_type in ("llama", "mistral") and target.variant == Variant():
        return layers
    rope = target.rope
    if rope.partial_rotary_factor != 1.0:
        rope = Rope(rope_theta=rope.rope_theta)
    plain = {"model_type": "llama", "variant": Variant(), "rope": rope}
    return replace(layers, attention_bias=False, mlp_bias=False, **plain)
