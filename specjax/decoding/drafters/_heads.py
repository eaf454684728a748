"""The base of drafters whose head keeps a KV cache, and its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start
from specjax.decoding.sampling import Draw
from specjax.models.cache import KVCache, resized
from specjax.models.heads import HeadWeights
from specjax.models.heads.layered import DRAFT_ROWS, DRAFT_TOKENS, LayeredHead
from specjax.models.prefill import PREFILL_CHUNK, whole_chunks
from specjax.models.quantize import Weight
from specjax.models.shapes import shape_mismatches
from specjax.models.target import QueryRows, Taps, Target, causal_rows


@pytree
class HeadState:
    """The state of a head. P = max_depth of a round + 1, H the width of a feature."""

    cache: KVCache  # of the head: slots made of the target's own features only
    pending: Float[Array, "B P H"]  # the target's features that the head has not read yet
    num_pending: Int[Array, " B"]
    lm_head: Weight | None = None  # rows of the target's LM head for a draft vocabulary, if any


@dataclass(frozen=True)
class HeadDrafter(Drafter):
    """Feeds a head with the target's features; subclasses draft with it.

    Slot t of the head takes the target's feature of token t and the embedding of token t + 1. With
    the root at position r, the features up to r - 1 are known. `propose` first feeds those that the
    last round added, one to P in the same pass, and drafts from the last output of that pass (where
    an EAGLE head predicts the feature of the root). Slots of drafted tokens are dropped after the
    round. Embedding and LM head are the target's; with a draft vocabulary only its rows of the LM
    head are read.

    `params.drafter` holds the weights of `head`.
    """

    head: LayeredHead

    pass_widths = ()  # a draft always fills the tree

    @property
    def taps(self) -> Taps:
        return Taps(hidden_layers=self.head.config.taps, logits=False)

    @property
    def num_fed(self) -> int:
        """Drafted nodes and masks per round that go through the head's layers."""
        return 0

    def bind(self, target: Target, params: Params) -> HeadWeights:
        """Returns what the head computes with."""
        return HeadWeights(params.drafter, target, params.target)

    def restrict(self, draw: Draw, params: Params) -> Draw:
        """Restricts the draws to the tokens that the head may draft."""
        draft_vocab = params.drafter.get(DRAFT_TOKENS)
        if draft_vocab is None:
            return draw
        return draw.restricted_to(draft_vocab, self.head.config.vocab_size)

    def init(self, start: Start) -> HeadState:
        prompt, weights = start.prompt, self.bind(start.target, start.params)
        batch, width = len(prompt.length), whole_chunks(prompt.tokens.shape[1])
        if self.taps.hidden_layers:
            assert start.prefill.hidden is not None
            features = side_by_side(start.prefill.hidden)
        else:
            features = jnp.zeros((batch, width, 0))
        leaves = jax.tree.leaves(weights.params)
        dtype = next(leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
        slots = start.num_slots + self.num_fed
        cache = KVCache.create(self.head.config.layers, batch, slots, dtype, prompt.length)
        next_tokens = resized(prompt.tokens[:, 1:], width, axis=1)
        length = prompt.length - 2  # one feature stays pending, so that no round is special
        last = jnp.take_along_axis(features, length[:, None, None], axis=1)
        return HeadState(
            cache=self._prefilled(weights, next_tokens, features, length, cache),
            pending=jnp.pad(last, ((0, 0), (0, start.max_depth), (0, 0))),
            num_pending=jnp.ones_like(length),
            lm_head=self.head.lm_head_rows(weights),
        )

    def skip(
        self, target: Target, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> HeadState:
        return self.catch_up(self.bind(target, params), state, context)[1]

    def draft_depth_by_depth(
        self,
        make_tree: Callable[..., Any],
        target: Target,
        params: Params,
        state: HeadState,
        context: Context,
        draw: Draw,
    ) -> tuple[Proposal, HeadState]:
        """Drafts with a pass of the head over the nodes of each depth that have children.

        A node reads what the head returned at its parent, and sees its ancestors. `make_tree` is
        `level_tree` or `beam_tree`, without the arguments from the context on.
        """
        weights, draw = self.bind(target, params), self.restrict(draw, params)
        feature, state = self.catch_up(weights, state, context)

        def feed(nodes, parents: Int[Array, "B F"], tokens: Int[Array, "B F"], depth: int):
            features, visible, cache = nodes
            above, seen = (
                jnp.take_along_axis(values, parents[..., None], axis=1)
                for values in (features, visible)
            )
            batch, count = tokens.shape
            itself = jnp.broadcast_to(jnp.eye(count, dtype=bool), (batch, count, count))
            visible = jnp.concatenate([seen, itself], axis=2)
            slot = context.length - 2 + depth  # a token's position, less one
            rows = QueryRows(tokens, jnp.broadcast_to(slot[:, None], tokens.shape), visible)
            features, cache = self.head.run(weights, rows, above, cache)
            return features, visible, cache

        logits_below = lambda nodes, _: self.head.logits(weights, nodes[0], state.lm_head)  # noqa: E731
        root = feature, jnp.zeros((len(context.length), 1, 0), bool), state.cache
        tree, (_, _, cache) = make_tree(context, draw, root, logits_below, feed)
        return Proposal(tree), replace(state, cache=cache)

    def update(
        self, target: Target, params: Params, state: HeadState, outcome: Outcome
    ) -> HeadState:
        pending = state.pending
        if self.taps.hidden_layers:
            assert outcome.output.hidden is not None
            pending = outcome.along_path(side_by_side(outcome.output.hidden))
        return replace(state, pending=pending, num_pending=outcome.num_committed)

    def catch_up(
        self, weights: HeadWeights, state: HeadState, context: Context, num_masks: int = 0
    ) -> tuple[Float[Array, "B M H"], HeadState]:
        """Feeds the pending features; returns the head's output at the last of them.

        It also returns the features predicted at the masks of that pass; M is `num_masks` + 1. Mask
        i, from 0, is the token `vocab_size + i` at i + 1 slots after the last pending one; it sees
        that one, all it sees, and the masks before it.

        A sequence that is done has none pending, and its draft is ignored.
        """
        cache, count, pending = state.cache, state.num_pending, state.pending
        width = pending.shape[1]
        at = cache.length[:, None] + 1 + jnp.arange(width)[None, :]
        tokens = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
        rows, last = causal_rows(tokens, cache.length, jnp.max(count)), jnp.maximum(count - 1, 0)
        if num_masks:
            rows = with_masks(rows, last, num_masks, self.head.config.vocab_size)
            pending = jnp.pad(pending, ((0, 0), (0, num_masks), (0, 0)))
        features, cache = self.head.run(weights, rows, pending, cache)
        masks = jnp.broadcast_to(width + jnp.arange(num_masks), (len(last), num_masks))
        outputs = jnp.concatenate([last[:, None], masks], axis=1)
        predicted = jnp.take_along_axis(features, outputs[:, :, None], axis=1)
        return predicted, replace(
            state, cache=cache.advance(count), num_pending=jnp.zeros_like(count)
        )

    def _prefilled(
        self,
        weights: HeadWeights,
        tokens: Int[Array, "B W"],
        features: Float[Array, "B W H"],
        length: Int[Array, " B"],
        cache: KVCache,
    ) -> KVCache:
        """Fills the first `length` slots of an empty cache in chunks; W is whole chunks.

        `tokens[b, t]` follows the token whose feature is `features[b, t]`.
        """
        chunk = min(PREFILL_CHUNK, tokens.shape[1])

        def write_chunk(index, cache):
            part, part_features = (
                lax.dynamic_slice_in_dim(values, index * chunk, chunk, axis=1)
                for values in (tokens, features)
            )
            rows = causal_rows(part, cache.length, jnp.max(length) - index * chunk)
            _, cache = self.head.run(weights, rows, part_features, cache)
            return cache.advance(jnp.full_like(cache.length, chunk))

        num_chunks = (jnp.max(length) + chunk - 1) // chunk
        return replace(lax.fori_loop(0, num_chunks, write_chunk, cache), length=length)


def side_by_side(hidden: Float[Array, "B Q T D"]) -> Float[Array, "B Q F"]:
    """Concatenates the hidden states of all tapped layers to one feature per token."""
    return hidden.reshape(*hidden.shape[:2], -1)


def check_head(head: Any, target: Target, params: Any, max_children: int = 1) -> None:
    """Checks that a head fits the target and the tree, and that `params` are its weights."""
    for name in ("hidden_size", "vocab_size"):
        expected, actual = getattr(head.config, name), getattr(target.config, name)
        if expected != actual:
            raise SpecjaxError(
                f"the head was made for a target of {name} {expected}, this one has {actual}; use "
                "a head that was trained for this target"
            )
    mismatch = "there are none"
    if isinstance(params, Mapping):
        own = {name: leaf for name, leaf in params.items() if name != DRAFT_ROWS}
        mismatch = shape_mismatches(own, head)
    if mismatch:
        raise SpecjaxError(
            f"the params are not the weights of this head ({mismatch}); pass those that were "
            "loaded with it"
        )
    if max_children > head.config.num_drafted:
        raise SpecjaxError(
            f"the tree gives one node {max_children} children, but the head drafts only "
            f"{head.config.num_drafted} tokens; use a smaller tree (top_k, choices), or a "
            "head that drafts more"
        )


def with_masks(
    rows: QueryRows, last: Int[Array, " B"], num_masks: int, vocab_size: int
) -> QueryRows:
    """Adds masks after token `last` of a pass; see `HeadDrafter.catch_up`."""
    batch, width = rows.tokens.shape
    tokens = jnp.broadcast_to(vocab_size + jnp.arange(num_masks), (batch, num_masks))
    start = jnp.take_along_axis(rows.positions, last[:, None], axis=1)[:, 0] + 1
    masks = causal_rows(tokens, start)
    is_real = jnp.arange(width)[None, :] <= last[:, None]
    by_text = jnp.pad(rows.visible, ((0, 0), (0, 0), (0, num_masks)))
    text_seen = jnp.broadcast_to(is_real[:, None, :], (batch, num_masks, width))
    by_masks = jnp.concatenate([text_seen, masks.visible], axis=2)
    return QueryRows(
        tokens=jnp.concatenate([rows.tokens, masks.tokens], axis=1),
        positions=jnp.concatenate([rows.positions, masks.positions], axis=1),
        visible=jnp.concatenate([by_text, by_masks], axis=1),
    )
