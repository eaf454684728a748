"""The common part of heads that have layers of their own over the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from specjax.core.pytree import cast_floats
from specjax.models.cache import KVCache, write_slots
from specjax.models.config import Rope, TransformerConfig, Variant
from specjax.models.heads.training_attention import KeysAndValues, text_before
from specjax.models.layers import DecoderLayer, rotation_of
from specjax.models.products import lookup
from specjax.models.quantize import QuantizedWeight, Weight
from specjax.models.target import QueryRows, Target, causal_rows

DRAFT_TOKENS = "draft_tokens"  # the name of a param
Stream = tuple[KeysAndValues, ...]  # by layer


@dataclass(frozen=True)
class LayeredConfig:
    """The shape of a head; `layers` has the target's vocabulary and hidden size."""

    layers: TransformerConfig
    draft_vocab_size: int = field(default=0, kw_only=True)  # tokens that it drafts; 0: all

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

    With a draft vocabulary, the param `draft_tokens` holds the tokens that it drafts, and the rest
    of the LM head is not read: see `with_draft_tokens`.
    """

    config: Any

    def add_draft_tokens(self) -> None:
        """Adds the param to a head with a draft vocabulary; for `setup`. No layer reads it."""
        if (count := self.config.draft_vocab_size) and self.is_initializing():
            self.param(DRAFT_TOKENS, lambda key: jnp.arange(count, dtype=jnp.int32))

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
        """Runs one pass with a cache, as drafting needs it; pure.

        Args:
            params: the head's.
            target: the model whose embedding the head reads.
            target_params: the target's.
            rows: tokens; their positions are slots, one less than the position in the text. Ids
                from `vocab_size` on are the head's own tokens, such as masks.
            features: of the tokens before them, from the target or predicted by the head; F is 0 if
                the head reads none.
            cache: the head's; rows are written as scratch, as by `Target.run`.

        Returns:
            The inputs of the target's LM head, and the cache.
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
        """Runs one step of training over whole texts, which `one_step` defines; pure.

        At step n (from 1) slot t stands for the n-th token of a draft that begins behind it.

        Args:
            params: the head's.
            embedded: embedding of that token, from the text.
            features: the target's at step 1, of the token before; F is 0 if the head reads none.
            streams: the keys and values that steps 1 to n - 1 returned.
            positions: slots within their texts.
            segments: the number of each slot's text; slots see only their own text.
        """
        text_length = jnp.full((embedded.shape[0],), embedded.shape[1])
        rotation = rotation_of(positions + len(streams), self.config.layers, text_length)
        arguments = (embedded, features, streams, rotation, text_before(segments))
        return cast(Any, self.apply({"params": params}, *arguments, method="one_step"))

    @nn.nowrap
    def logits(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        hidden: Float[Array, "... D"],
        lm_head: Weight | None,
    ) -> Float[Array, "... R"]:
        """Returns the float32 logits of the tokens that the head drafts, from what `run` returns.

        `lm_head` is what `lm_head_rows` returned.
        """
        return target.logits(target_params, hidden, lm_head)

    @nn.nowrap
    def lm_head_rows(self, params: Any, target: Target, target_params: Any) -> Weight | None:
        """Returns the rows of the target's LM head for a draft vocabulary; None without one."""
        if (drafted := params.get(DRAFT_TOKENS)) is None:
            return None
        table = target.lm_head(target_params)
        return table[drafted] if isinstance(table, QuantizedWeight) else lookup(table, drafted)

    @nn.nowrap
    def initialise(self, key: Key[Array, ""], dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
        """Returns random params, without embedding and LM head."""
        embedded = jnp.zeros((1, 1, self.config.hidden_size))
        features = jnp.concatenate([embedded] * len(self.config.taps) or [embedded[..., :0]], -1)
        rows = causal_rows(jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32))
        cache = KVCache.create(self.config.layers, 1, 1)
        params = jax.jit(self.init)(key, rows, embedded, features, cache)["params"]
        return cast_floats(params, dtype)


def with_draft_tokens(
    head: Any, params: Mapping[str, Any], tokens: Sequence[int] | Int[np.ndarray | Array, " R"]
) -> tuple[Any, dict[str, Any]]:
    """Returns a head that drafts these tokens only, which must differ; an empty list means all."""
    others = {name: leaf for name, leaf in params.items() if name != DRAFT_TOKENS}
    own = {DRAFT_TOKENS: jnp.asarray(tokens, jnp.int32)} if len(tokens) else {}
    return type(head)(replace(head.config, draft_vocab_size=len(tokens))), others | own


def layers_like(target: TransformerConfig, num_layers: int) -> TransformerConfig:
    """Returns the shape of a Llama's layers of the target's sizes, without a sliding window."""
    own = replace(target, num_hidden_layers=num_layers, sliding_window=None, layer_types=())
    if target.model_type in ("llama", "mistral") and target.variant == Variant():
        return own
    rope = target.rope
    if rope.partial_rotary_factor != 1.0:
        rope = Rope(rope_theta=rope.rope_theta)
    plain = {"model_type": "llama", "variant": Variant(), "rope": rope}
    return replace(own, attention_bias=False, mlp_bias=False, **plain)


def through_layers(
    layers: Sequence[DecoderLayer], x: Float[Array, "B Q D"], rows: QueryRows, cache: KVCache
) -> tuple[Float[Array, "B Q D"], KVCache]:
    """Runs the rows `x` of a head through its layers, writing them to the cache as scratch."""
    start = cache.length + (rows.visible.shape[2] - rows.tokens.shape[1])
    visible, keys, values = cache.visible_slots(rows.visible), [], []
    rotation = rotation_of(rows.positions, layers[0].config, cache.prompt_length)
    for layer, old_keys, old_values in zip(layers, cache.keys, cache.values, strict=True):
        x, _, new_keys, new_values = layer(x, rotation, old_keys, old_values, start, visible)
        keys.append(new_keys)
        values.append(new_values)
    positions = write_slots(cache.positions, rows.positions, start, axis=1)
    return x, replace(cache, keys=tuple(keys), values=tuple(values), positions=positions)
