"""The `Target` protocol, through which drafters and objectives use a model.

`QueryRows` is the input of one forward pass, `Taps` selects the inner values it should return, and
`ModelOutput` is its result.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.quantize import Weight


@pytree
class QueryRows:
    """The input of one pass: Q tokens or nodes for each of B sequences.

    C is the number of scratch slots already in the cache plus these Q; the committed part of the
    cache is always visible.
    """

    tokens: Int[Array, "B Q"]
    positions: Int[Array, "B Q"]  # absolute, for RoPE
    visible: Bool[Array, "B Q C"]
    # The tokens of each sequence that matter, which come first; None: all. The results of others
    # are arbitrary, and their keys and values may be missing: native kernels do not compute them.
    count: Int[Array, ""] | None = None


def causal_rows(
    tokens: Int[Array, "B Q"], start: Int[Array, " B"], count: Int[Array, ""] | None = None
) -> QueryRows:
    """Returns the input for plain text: token q is at `start[b] + q` and sees tokens 0 to q."""
    batch, width = tokens.shape
    below = jnp.tril(jnp.ones((width, width), bool))
    return QueryRows(
        tokens=tokens,
        positions=start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :],
        visible=jnp.broadcast_to(below, (batch, width, width)),
        count=count,
    )


@dataclass(frozen=True)
class Taps:
    """The values that a forward pass should return; the others are not computed or kept.

    Hidden layers are numbered as in `transformers`: 0 is the embedding, l the output of layer l;
    the last (`num_hidden_layers`, or -1) is taken after the final norm. Attention heads are
    `(layer, head)`, both from 0.
    """

    hidden_layers: tuple[int, ...] = ()
    attention_heads: tuple[tuple[int, int], ...] = ()
    logits: bool = True  # False skips the LM head; in a drafter's taps: it needs none

    def check(self, config: TransformerConfig) -> None:
        """Raises SpecjaxError if the model has no such layer or head."""
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        for layer in self.hidden_layers:
            if not -1 <= layer <= layers:
                raise SpecjaxError(
                    f"hidden layer {layer} does not exist: the model has layers 0 to {layers}"
                )
        for layer, head in self.attention_heads:
            if not (0 <= layer < layers and 0 <= head < heads):
                raise SpecjaxError(
                    f"attention head (layer {layer}, head {head}) does not exist: the model has "
                    f"layers 0 to {layers - 1} with heads 0 to {heads - 1}"
                )


@pytree
class ModelOutput:
    """The results of a forward pass over Q tokens. V: vocabulary, S: cache slots."""

    logits: Float[Array, "B Q V"] | None  # float32
    hidden: Float[Array, "B Q T D"] | None = None  # T tapped layers, in order of the taps
    # A tapped heads, float32, sums are 1; R: the Q tokens, or the one that a round keeps.
    attention: Float[Array, "B A R S"] | None = None


@runtime_checkable
class Target(Protocol):
    """A model to draft for. Its methods are pure; `params` are its weights.

    Attributes:
        config: the model's shape and arithmetic.
        mesh: the devices that the params lie on; None: a single one.
        padded_width: tokens per sequence that every verification pass is padded to; 0: no padding.
    """

    config: TransformerConfig
    mesh: Mesh | None
    padded_width: int

    def clone(self, **updates: Any) -> "Target":
        """Returns the same model with some attributes replaced."""
        ...

    def check(self, params: Any) -> None:
        """Raises SpecjaxError if `params` do not fit this model."""
        ...

    def run(
        self, params: Any, rows: QueryRows, cache: KVCache, taps: Taps = Taps()
    ) -> tuple[ModelOutput, KVCache]:
        """Runs one pass; writes its keys and values as scratch behind `cache.length`."""
        ...

    def embed(self, params: Any, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Returns the embeddings of `tokens`, scaled as the first layer reads them."""
        ...

    def logits(
        self, params: Any, hidden: Float[Array, "... D"], lm_head: Weight | None = None
    ) -> Float[Array, "... R"]:
        """Returns the float32 logits of hidden states that have passed the final norm.

        `lm_head` is some rows of the LM head, for the logits of their tokens; by default all.
        """
        ...

    def lm_head(self, params: Any) -> Weight:
        """Returns the weight of the LM head alone: `logits` may do more than multiply by it.

        It has `shape` and `dtype`, and can be indexed by rows, quantised or not.
        """
        ...

    def dtype(self, params: Any) -> DTypeLike:
        """Returns the dtype of the weights, or of their scales: that of matrix products."""
        ...

    def new_cache(
        self,
        params: Any,
        batch: int,
        num_slots: int,
        prompt_length: Int[Array, " B"] | int | None = None,
    ) -> KVCache:
        """Returns an empty cache for `batch` sequences; `prompt_length` defaults to `num_slots`."""
        ...
