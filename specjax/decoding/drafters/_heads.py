"""The base of drafters with a head, and the state of a head that follows the committed text."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Start
from specjax.decoding.sampling import Draw
from specjax.models.cache import KVCache
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.prefill import PREFILL_CHUNK, whole_chunks
from specjax.models.quantize import Weight
from specjax.models.shapes import shape_mismatches
from specjax.models.target import ModelOutput, QueryRows, Taps, Target, causal_rows

LAST_HIDDEN = Taps(hidden_layers=(-1,), logits=False)  # the target's features, after the final norm


@pytree
class HeadState:
    """The state of a head. P = max_depth of a round + 1, H the width of a feature."""

    cache: KVCache  # of the head: slots made of the target's own features only
    pending: Float[Array, "B P H"]  # the target's features of the tokens committed last
    num_pending: Int[Array, " B"]  # how many of them; the head has not seen them yet
    # The rows of the target's LM head for a draft vocabulary; None without one.
    lm_head: Weight | None = None


@runtime_checkable
class FeatureHead(Protocol):
    """A head with layers of its own over the text, such as `EagleHead`: see there."""

    @property
    def config(self) -> Any: ...  # with layers, hidden_size and vocab_size

    def run(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        rows: QueryRows,
        features: Float[Array, "B Q H"],
        cache: KVCache,
    ) -> tuple[Float[Array, "B Q D"], KVCache]: ...

    def logits(
        self,
        params: Any,
        target: Target,
        target_params: Any,
        hidden: Float[Array, "B Q D"],
        lm_head: Weight | None,
    ) -> Float[Array, "B Q R"]: ...

    def lm_head_rows(self, params: Any, target: Target, target_params: Any) -> Weight | None: ...


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """Feeds a head with the target's features; how it drafts is left to the methods.

    Slot t of the head takes the target's feature of token t and the embedding of token t + 1. With
    the root at position r, the features up to r - 1 are known. `propose` first feeds those that the
    last round revealed, one to P in the same pass, and drafts from the last row of that pass (where
    an EAGLE head predicts the feature of the root). Slots of drafted tokens are dropped after the
    round. Embedding and LM head are the target's; of the LM head only the rows of the head's draft
    vocabulary are read, if it has one.

    `params.drafter` is the weights of `head`.
    """

    head: FeatureHead

    pass_widths = ()  # a draft always fills the tree

    @property
    def taps(self) -> Taps:
        return Taps(hidden_layers=self.head.config.taps, logits=False)

    @property
    def num_fed(self) -> int:
        """Nodes per round that pass the head's layers, to draft below them."""
        return 0

    def check(self, target: Target, params: Any) -> None:
        check_head(self.head, target, params)

    def init(self, start: Start) -> HeadState:
        target, params, prompt = start.target, start.params, start.prompt
        features = self._features(start.prefill, prompt.tokens)
        batch, width, _ = features.shape
        leaves = jax.tree.leaves(params.drafter)
        dtype = next(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
        slots = start.num_slots + self.num_fed
        cache = KVCache.create(self.head.config.layers, batch, slots, dtype, prompt.length)
        next_tokens = prompt.tokens[:, 1:]
        next_tokens = jnp.pad(next_tokens, ((0, 0), (0, width - next_tokens.shape[1])))
        length = prompt.length - 2  # one feature stays pending, so that no round is special
        cache = prefill_head(self.head, target, params, next_tokens, features, length, cache)
        last = jnp.take_along_axis(features, length[:, None, None], axis=1)
        return HeadState(
            cache=cache,
            pending=jnp.pad(last, ((0, 0), (0, start.max_depth), (0, 0))),
            num_pending=jnp.ones_like(length),
            lm_head=self.head.lm_head_rows(params.drafter, target, params.target),
        )

    def logits(
        self, target: Target, params: Params, state: HeadState, hidden: Float[Array, "B Q D"]
    ) -> Float[Array, "B Q R"]:
        """Returns the logits of the tokens that the head may draft."""
        return self.head.logits(params.drafter, target, params.target, hidden, state.lm_head)

    def among(self, target: Target, params: Params, draw: Draw) -> Draw:
        """Returns the draws among the tokens that the head may draft."""
        drafted = params.drafter.get(DRAFT_TOKENS)
        return draw if drafted is None else draw.among(drafted, target.config.vocab_size)

    def skip(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> HeadState:
        return self.catch_up(target, params, state, context)[1]

    def update(
        self, target: Target, params: Params, state: HeadState, outcome: Outcome
    ) -> HeadState:
        pending = state.pending
        if self.taps.hidden_layers:
            assert outcome.output.hidden is not None
            pending = outcome.along_path(side_by_side(outcome.output.hidden))
        return replace(state, pending=pending, num_pending=outcome.num_committed)

    def catch_up(
        self,
        target: Target,
        params: Params,
        state: HeadState,
        context: Context,
        num_masks: int = 0,
    ) -> tuple[Float[Array, "B M H"], HeadState]:
        """Feeds the pending features; returns the head's output at the last of them.

        With masks, also returns the feature predicted at each of them, from the same pass; M is
        `num_masks` + 1. Mask i, from 0, is the token `vocab_size + i` at i + 1 slots after the last
        pending one; it sees what that one sees, and the masks before it.

        A row that is done has none pending: nothing is committed for it, and its draft is ignored.
        """
        cache, count, pending = state.cache, state.num_pending, state.pending
        width = pending.shape[1]
        at = cache.length[:, None] + 1 + jnp.arange(width)[None, :]
        tokens = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
        rows, last = causal_rows(tokens, cache.length), jnp.maximum(count - 1, 0)
        if num_masks:
            rows = with_masks(rows, last, num_masks, self.head.config.vocab_size)
            pending = jnp.pad(pending, ((0, 0), (0, num_masks), (0, 0)))
        features, cache = self.head.run(params.drafter, target, params.target, rows, pending, cache)
        masks = jnp.broadcast_to(width + jnp.arange(num_masks), (len(last), num_masks))
        wanted = jnp.concatenate([last[:, None], masks], axis=1)
        ahead = jnp.take_along_axis(features, wanted[:, :, None], axis=1)
        return ahead, replace(state, cache=cache.advance(count), num_pending=jnp.zeros_like(count))

    def _features(self, prefill: ModelOutput, tokens: Int[Array, "B P"]) -> Float[Array, "B W H"]:
        """Returns the target's features of the prompt; of width 0 if the head reads none."""
        if self.taps.hidden_layers:
            assert prefill.hidden is not None
            return side_by_side(prefill.hidden)
        batch, length = tokens.shape
        return jnp.zeros((batch, whole_chunks(length), 0))

    def feed(
        self,
        target: Target,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B F"],
        features: Float[Array, "B F H"],
        visible: Bool[Array, "B F C"],
        slot: Int[Array, " B"],
    ) -> tuple[Float[Array, "B F H"], KVCache]:
        """Predicts the features of F nodes of one depth from those of their parents.

        `visible` marks, of the C nodes fed so far, a node's ancestors and itself.
        """
        rows = QueryRows(tokens, jnp.broadcast_to(slot[:, None], tokens.shape), visible)
        return self.head.run(params.drafter, target, params.target, rows, features, cache)


def side_by_side(hidden: Float[Array, "B Q T D"]) -> Float[Array, "B Q F"]:
    """Joins the hidden states of all tapped layers to one feature of each row."""
    return hidden.reshape(*hidden.shape[:2], -1)


def check_head(head: Any, target: Target, params: Any) -> None:
    """Checks that a head was made for the target, and that `params` are its weights.

    Raises:
        SpecjaxError: if not.
    """
    for name in ("hidden_size", "vocab_size"):
        mine, its = getattr(head.config, name), getattr(target.config, name)
        if mine != its:
            raise SpecjaxError(
                f"the head was made for a target of {name} {mine}, this one has {its}; use a "
                "head that was trained for this target"
            )
    wrong = shape_mismatches(params, head) if isinstance(params, Mapping) else "there are none"
    if wrong:
        raise SpecjaxError(
            f"the params are not the weights of this head ({wrong}); pass those that were "
            "loaded with it"
        )


def with_masks(
    rows: QueryRows, last: Int[Array, " B"], num_masks: int, vocab_size: int
) -> QueryRows:
    """Returns the rows of a text and of masks after row `last`; see `HeadDrafter.catch_up`."""
    batch, width = rows.tokens.shape
    steps = jnp.broadcast_to(jnp.arange(num_masks), (batch, num_masks))
    start = jnp.take_along_axis(rows.positions, last[:, None], axis=1)
    is_real = jnp.arange(width)[None, :] <= last[:, None]
    of_text = jnp.pad(rows.visible, ((0, 0), (0, 0), (0, num_masks)))
    of_masks = jnp.concatenate(
        [
            jnp.broadcast_to(is_real[:, None, :], (batch, num_masks, width)),
            jnp.broadcast_to(
                jnp.tril(jnp.ones((num_masks, num_masks), bool)), (batch, num_masks, num_masks)
            ),
        ],
        axis=2,
    )
    return QueryRows(
        tokens=jnp.concatenate([rows.tokens, vocab_size + steps], axis=1),
        positions=jnp.concatenate([rows.positions, start + 1 + steps], axis=1),
        visible=jnp.concatenate([of_text, of_masks], axis=1),
    )


def prefill_head(
    head: FeatureHead,
    target: Target,
    params: Params,
    tokens: Int[Array, "B W"],
    features: Float[Array, "B W H"],
    length: Int[Array, " B"],
    cache: KVCache,
) -> KVCache:
    """Writes the first `length` slots of each text to an empty cache in chunks; W is whole chunks.

    `tokens[b, t]` follows the token whose feature is `features[b, t]`.
    """
    chunk = min(PREFILL_CHUNK, tokens.shape[1])

    def write_chunk(index, cache):
        parts = (
            lax.dynamic_slice_in_dim(values, index * chunk, chunk, axis=1)
            for values in (tokens, features)
        )
        part, part_features = parts
        rows = causal_rows(part, cache.length)
        _, cache = head.run(params.drafter, target, params.target, rows, part_features, cache)
        return cache.advance(jnp.full_like(cache.length, chunk))

    num_chunks = (jnp.max(length) + chunk - 1) // chunk
    cache = lax.fori_loop(0, num_chunks, write_chunk, cache)
    return replace(cache, length=length)
