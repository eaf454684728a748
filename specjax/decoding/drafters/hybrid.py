"""Hybrid: merges the trees of two methods, such as PLD+, which copies, and HASS, which predicts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.core.settings import setting
from specjax.decoding.drafter import (
    Context,
    Drafter,
    Outcome,
    Params,
    Proposal,
    Start,
    State,
    has_long_match,
)
from specjax.decoding.drafters._trees import best_of_pool
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree, root_only, valid_first
from specjax.decoding.verify import follow
from specjax.decoding.widths import if_in_place
from specjax.models.target import ModelOutput, Taps, Target

PARTS = ("copy", "head")
LIKELY = 0.2  # mean probability of nodes that are worth a wider pass
# Pseudo-counts of first tokens, of those after long matches, and of later tokens. The first and the
# last were fitted, like `KEPT`, to the copies of PLD+ in SmolLM2's answers to Spec-Bench.
PRIOR_RIGHT, PRIOR_WRONG = np.array([[[1.0, 3.0, 3.0]]]), np.array([[[2.0, 1.0, 1.0]]])
KEPT = 0.8  # weight of earlier drafts in the counts, at each new one


@pytree
class HybridState:
    """The states of both parts, and counts of their right and wrong tokens."""

    parts: tuple[State, ...]
    drafted: tuple[DraftTree, ...]  # in this round, before they were merged
    has_long_match: Bool[Array, "B 2"]  # by part: this round's draft is a copy with a long match
    # By part and kind of token, as in `PRIOR_RIGHT`: right ones, and wrong ones after right ones.
    right: Float[Array, "B 2 3"]
    wrong: Float[Array, "B 2 3"]
    is_finished: Bool[Array, " B"]


@dataclass(frozen=True)
class Hybrid(Drafter):
    """Merges the trees of two drafters under one budget of nodes.

    The candidates are the distinct nodes of both trees; the most likely `num_tokens - 1` are
    verified. A node of an EAGLE-2 tree is scored by its head. A node of a tree without scores, such
    as a copied chain, is scored by its drafter's recent acceptance rate: that of first tokens,
    times that of later ones for each further token of its path. First tokens of copies whose source
    follows the same 5 tokens or more have a separate rate. A chain is therefore short while copies
    fail, and takes most of the budget while they succeed or matches are long.

    The head is skipped when its expected gain is below its cost: when the tokens that it would add,
    should the first copied one be wrong, are fewer than `head_cost` times those of a round with the
    copy alone. This saves its passes only if it holds for all sequences of a batch. Drafters
    without a cheaper `skip` always draft.

    `params.drafter` is `{"copy": params, "head": params}`. Under `rejection` above temperature 0
    both parts choose their tokens, and each counts as drawn with certainty.
    """

    copy: str | Drafter = "pld-plus"
    """The method that copies; not plain, lookahead or auto. Without a head, by default pld."""
    head: str | Drafter = "hass"
    """The method that predicts, with --drafter; not plain, lookahead or auto. Without a drafter, by
    default recycling; pocket has a head for hass."""
    num_tokens: int = setting(60, at_least=2)
    """Nodes to verify, root included."""
    max_tokens: int = setting(0, at_least=0)
    """Maximum number of nodes, if those beyond num_tokens have a probability of 0.2 or more on
    average. It must exceed num_tokens to have an effect."""
    head_cost: float = setting(0.2, at_least=0)
    """The time of the head's draft, in passes of the target; 0: the head always drafts."""
    copy_source: str = ""
    """Folder or hub id for the copying method, if it needs one; by default pocket's."""

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        """The two drafters."""
        if isinstance(self.copy, str) or isinstance(self.head, str):
            raise SpecjaxError("a hybrid needs two drafters, not names; use specjax.load_drafter")
        return self.copy, self.head

    @property
    def num_nodes(self) -> int:
        most = max(self.num_tokens, self.max_tokens)
        return min(most, sum(part.num_nodes - 1 for part in self.parts) + 1)

    @property
    def max_depth(self) -> int:
        return min(max(part.max_depth for part in self.parts), self.num_nodes - 1)

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
        if self.max_tokens > self.num_tokens:
            return (self.num_tokens,)
        return None if all(part.pass_widths is None for part in self.parts) else ()

    @property
    def taps(self) -> Taps:
        first, second = (part.taps for part in self.parts)
        return Taps(
            hidden_layers=tuple(dict.fromkeys(first.hidden_layers + second.hidden_layers)),
            attention_heads=tuple(dict.fromkeys(first.attention_heads + second.attention_heads)),
            logits=first.logits or second.logits,
        )

    def check(self, target: Target, params: Any) -> None:
        if not isinstance(params, Mapping) or set(params) != set(PARTS):
            raise SpecjaxError(
                f"Hybrid needs the params of both its parts; pass them by name: {PARTS}"
            )
        for name, part in zip(PARTS, self.parts, strict=True):
            if part.num_probes or part.num_nodes < 2:
                raise SpecjaxError(
                    f"{type(part).__name__} cannot be the {name} of a hybrid: it drafts nothing or "
                    "has a probe; choose another"
                )
            part.check(target, params[name])

    def init(self, start: Start) -> HybridState:
        def start_part(part: Drafter, params: Params) -> State:
            prefill = self._tapped_by(part, start.prefill)
            return part.init(start._replace(params=params, prefill=prefill, is_part=True))

        def empty_tree(part: Drafter) -> DraftTree:
            nodes = jnp.zeros((len(start.prompt.length), part.num_nodes), jnp.int32)
            return DraftTree(nodes, nodes, nodes, nodes > 0)

        zeros = jnp.zeros((len(start.prompt.length), 2, 3))
        return HybridState(
            parts=tuple(map(start_part, self.parts, _params(start.params))),
            drafted=tuple(map(empty_tree, self.parts)),
            has_long_match=zeros[..., 0] > 0,
            right=zeros,
            wrong=zeros,
            is_finished=start.prompt.length < 0,
        )

    def propose(
        self, target: Target, params: Params, state: HybridState, context: Context, draw: Draw
    ) -> tuple[Proposal, HybridState]:
        if draw.sampling.needs_draft_probs:
            draw = replace(draw, sampling=Sampling())
        copy, head = self.parts
        for_copy, for_head = _params(params)
        rates = log_rates(state)

        def scores(part: int, tree: DraftTree) -> Float[Array, "B N"]:
            if tree.scores is not None:
                return tree.scores
            first = jnp.where(_has_long_match(tree, context), rates[:, part, 1], rates[:, part, 0])
            return first[:, None] + (tree.depth - 1) * rates[:, part, 2:]

        def draft(context: Context, carry: tuple[Any, State]) -> tuple[DraftTree, State]:
            (tree, _), head_state = head.propose(target, for_head, carry[1], context, draw)
            return tree, head_state

        def skip(context: Context, head_state: State) -> State:
            return head.skip(target, for_head, head_state, context, draw)

        (copied, _), copy_state = copy.propose(target, for_copy, state.parts[0], context, draw)
        needs_head = self._needs_head(state, _depth(copied), _has_long_match(copied, context))
        shape, _ = jax.eval_shape(draft, context, (None, state.parts[1]))
        empty = root_only(shape, context.root)
        runs_head = jnp.any(needs_head & ~state.is_finished)
        tree, head_state = if_in_place(runs_head, draft, context, (empty, state.parts[1]))
        head_state = if_in_place(~runs_head, skip, context, head_state)
        # A sequence must not depend on the others of its batch.
        tree = replace(tree, valid=jnp.where(needs_head[:, None], tree.valid, empty.valid))
        trees = copied, tree
        node_scores = scores(0, copied), scores(1, tree)
        merged = merge_trees(*trees, *node_scores, self.num_nodes)
        merged = without_unlikely(merged, self.num_tokens)
        bare = (DraftTree(part.tokens, part.parents, part.depth, part.valid) for part in trees)
        return Proposal(merged), replace(
            state,
            parts=(copy_state, head_state),
            drafted=tuple(bare),
            has_long_match=jnp.stack([_has_long_match(part, context) for part in trees], 1),
        )

    def update(
        self, target: Target, params: Params, state: HybridState, outcome: Outcome
    ) -> HybridState:
        def update_part(part: Drafter, params: Params, state: State) -> State:
            tapped = replace(outcome, output=self._tapped_by(part, outcome.output))
            return part.update(target, params, state, tapped)

        agreed = jnp.stack([num_matching(tree, outcome) for tree in state.drafted], axis=1)
        deepest = jnp.stack([_depth(tree) for tree in state.drafted], axis=1)
        is_wrong = agreed < jnp.minimum(deepest, outcome.num_committed[:, None])
        is_long, is_any = state.has_long_match, agreed >= 0
        counts = jnp.stack([~is_long, is_long, is_any], axis=2)
        first, later = agreed > 0, jnp.maximum(agreed - 1, 0)
        right = counts * jnp.stack([first, first, later], axis=2)
        wrong = counts & jnp.stack([is_wrong & ~first] * 2 + [is_wrong & first], axis=2)
        kept = jnp.where(counts & (deepest > 0)[..., None], KEPT, 1.0)
        return HybridState(
            parts=tuple(map(update_part, self.parts, _params(params), state.parts)),
            drafted=state.drafted,
            has_long_match=is_long,
            right=kept * state.right + right,
            wrong=kept * state.wrong + wrong,
            is_finished=outcome.num_committed == 0,
        )

    def _needs_head(
        self, state: HybridState, depth: Int[Array, " B"], is_long: Bool[Array, " B"]
    ) -> Bool[Array, " B"]:
        """Whether the head's expected gain, with a copy of this depth, exceeds its cost."""
        short, long, later = jnp.moveaxis(jnp.exp(log_rates(state))[:, 0], -1, 0)
        first = jnp.where(is_long, long, short)
        copied = first * (1 - later**depth) / (1 - later)  # tokens expected
        num_right = jnp.sum(state.right[:, 1], 1)
        num_drafts = jnp.sum((state.right + state.wrong)[:, 1, :2], 1)
        predicted = (1 + num_right) / (1 + num_drafts)  # with a pseudo-count of one right token
        if type(self.parts[1]).skip is Drafter.skip:  # nothing would be saved
            return depth >= 0
        return (depth == 0) | ((1 - first) * predicted > self.head_cost * (1 + copied))

    def _tapped_by(self, part: Drafter, output: ModelOutput) -> ModelOutput:
        """Returns the output with the taps of one part."""
        layers = [self.taps.hidden_layers.index(layer) for layer in part.taps.hidden_layers]
        heads = [self.taps.attention_heads.index(head) for head in part.taps.attention_heads]
        hidden, attention = output.hidden, output.attention
        return ModelOutput(
            logits=output.logits,
            hidden=hidden[:, :, jnp.array(layers)] if hidden is not None and layers else None,
            attention=attention[:, jnp.array(heads)] if attention is not None and heads else None,
        )


def _params(params: Params) -> list[Params]:
    return [Params(params.target, params.drafter[name]) for name in PARTS]


def _depth(tree: DraftTree) -> Int[Array, " B"]:
    return jnp.max(jnp.where(tree.valid, tree.depth, 0), axis=1)


def _has_long_match(tree: DraftTree, context: Context) -> Bool[Array, " B"]:
    if tree.source is None:
        return context.length < 0
    return has_long_match(tree.source[:, 0], context)


def log_rates(state: HybridState) -> Float[Array, "B 2 3"]:
    """Returns the log-probability that a drafted token is right, by part and kind of token."""
    right, wrong = state.right + PRIOR_RIGHT, state.wrong + PRIOR_WRONG
    return jnp.log(right / (right + wrong))


def num_matching(tree: DraftTree, outcome: Outcome) -> Int[Array, " B"]:
    """Returns the length of the longest path that was committed, verified or not."""
    context = outcome.context
    after = outcome.root_slot[:, None] + tree.depth + 1
    committed = jnp.take_along_axis(context.tokens, after, axis=1, mode="clip")
    target_tokens = jnp.where(after < context.length[:, None], committed, -1)
    return follow(tree, target_tokens, tree.num_nodes - 1).num_accepted


def merge_trees(
    first: DraftTree,
    second: DraftTree,
    first_scores: Float[Array, "B N"],
    second_scores: Float[Array, "B M"],
    num_nodes: int,
) -> DraftTree:
    """Returns the tree of the best nodes of two trees below the same root.

    A shared node gets the better score. Scores fall from parents to children.
    """
    same = same_nodes(first, second)
    is_shared, shared = jnp.any(same, axis=1), jnp.argmax(same, axis=1)
    count, others = first.num_nodes, jnp.arange(second.num_nodes)[None, :]
    place = jnp.where(is_shared, shared, count - 1 + others)  # in the pool, from 1
    parents = jnp.take_along_axis(place, jnp.maximum(second.parents, 0), axis=1)
    shared_scores = jnp.max(jnp.where(same, second_scores[:, None, :], -jnp.inf), axis=2)
    first_scores = jnp.where(first.valid, jnp.maximum(first_scores, shared_scores), -jnp.inf)
    second_scores = jnp.where(second.valid & ~is_shared, second_scores, -jnp.inf)
    pool = lambda *values: jnp.concatenate([nodes[:, 1:] for nodes in values], axis=1)  # noqa: E731
    return best_of_pool(
        first.tokens[:, 0],
        pool(first.tokens, second.tokens),
        pool(first_scores, second_scores),
        pool(first.parents, parents) - 1,
        pool(first.depth, second.depth),
        num_nodes,
        is_chain=False,
    )


def without_unlikely(tree: DraftTree, num_tokens: int) -> DraftTree:
    """Returns a tree whose nodes beyond the best `num_tokens` are valid only if they are likely."""
    if tree.num_nodes <= num_tokens:
        return tree
    assert tree.scores is not None
    scores = jnp.where(tree.valid, tree.scores, -jnp.inf)
    is_beyond = scores < lax.top_k(scores, num_tokens)[0][:, -1:]
    expected = jnp.sum(is_beyond * jnp.exp(scores), axis=1, keepdims=True)
    is_worth_it = expected >= LIKELY * (tree.num_nodes - num_tokens)
    return valid_first(replace(tree, valid=tree.valid & (is_worth_it | ~is_beyond)))


def same_nodes(first: DraftTree, second: DraftTree) -> Bool[Array, "B N M"]:
    """Whether the paths to node i and node j have the same tokens, at entry [b, i, j].

    Each step doubles the distance covered, as in `ancestors`.
    """
    same = (
        (first.tokens[:, :, None] == second.tokens[:, None, :])
        & (first.depth[:, :, None] == second.depth[:, None, :])
        & (first.valid[:, :, None] & second.valid[:, None, :])
    )
    above = [jnp.maximum(tree.parents, 0) for tree in (first, second)]
    longest = min(first.num_nodes, second.num_nodes) - 1  # path that both have
    for _ in range(longest.bit_length()):
        same = same & jax.vmap(lambda seen, i, j: seen[i][:, j])(same, *above)
        above = [jnp.take_along_axis(jump, jump, axis=1) for jump in above]
    return same
