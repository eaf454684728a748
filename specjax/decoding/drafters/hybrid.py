"""Hybrid: two methods draft one tree, such as PLD+, which copies, and HASS, which predicts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError, check_at_least
from specjax.core.pytree import pytree
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start, State
from specjax.decoding.drafters._trees import best_of_pool
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.tree import DraftTree, root_only
from specjax.decoding.verify import follow
from specjax.decoding.widths import if_in_place
from specjax.models.target import ModelOutput, Taps, Target

PARTS = ("copy", "head")
# Of first and of later tokens: once the first copied token is right, those after it mostly are.
# Fitted, as is `KEPT`, to the copies of PLD+ in answers of SmolLM2 to Spec-Bench.
PRIOR_RIGHT, PRIOR_WRONG = np.array([[[1.0, 3.0]]]), np.array([[[2.0, 1.0]]])
KEPT = 0.8  # weight of earlier drafts in the counts, at each new one


@pytree
class HybridState:
    """The states of both parts, and how well their recent drafts matched the text."""

    parts: tuple[State, ...]
    drafted: tuple[DraftTree, ...]  # in this round, before they were merged
    # Of each part: drafted tokens that were right, and that were wrong behind right ones; first
    # tokens of drafts apart from later ones.
    right: Float[Array, "B 2 2"]
    wrong: Float[Array, "B 2 2"]
    is_finished: Bool[Array, " B"]


@dataclass(frozen=True)
class Hybrid(Drafter):
    """Merges the trees of two drafters under one budget of nodes; each grows with its success.

    All nodes of both trees are candidates, those that both have only once, and the likeliest
    `num_tokens - 1` are verified. A node of an EAGLE-2 tree is as likely as its head says. A node
    of a tree without scores, such as a copied chain, is as likely as its drafter was right of late:
    the rate of right first tokens, times that of later ones for each further token of its path. So
    a chain is short while copies fail, and takes most of the budget while they are right.

    A head is not asked where its time is better spent on the next round: where the tokens that it
    is expected to add, should the first copied one be wrong, are fewer than `head_cost` times those
    of a round with the copy alone. That saves its passes if it is so for all rows of a batch. Other
    drafters in its place, which have no cheaper `skip`, are always asked.

    `params.drafter` is `{"copy": params, "head": params}`. Under `rejection` above temperature 0
    both parts choose their tokens, and each counts as drawn with certainty.
    """

    copy: str | Drafter = "pld-plus"
    """The method that copies: any but plain, lookahead and auto."""
    head: str | Drafter = "hass"
    """The method that predicts, which reads --drafter: likewise any."""
    num_tokens: int = 60
    """Nodes that are verified, root included; at least 2."""
    head_cost: float = 0.2
    """The time of the head's draft, in passes of the target; 0: it is always asked."""
    copy_source: str = ""
    """Folder or hub id that the copying method reads, if it reads any; by default pocket's own."""

    def __post_init__(self):
        check_at_least("num_tokens", self.num_tokens, 2, "it counts the root")
        check_at_least("head_cost", self.head_cost, 0, "it is a time")

    @property
    def parts(self) -> tuple[Drafter, Drafter]:
        """Both drafters."""
        if isinstance(self.copy, str) or isinstance(self.head, str):
            raise SpecjaxError("a hybrid needs two drafters, not names; use specjax.load_drafter")
        return self.copy, self.head

    @property
    def num_nodes(self) -> int:
        return min(self.num_tokens, sum(part.num_nodes - 1 for part in self.parts) + 1)

    @property
    def max_depth(self) -> int:
        return min(max(part.max_depth for part in self.parts), self.num_nodes - 1)

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
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
            raise SpecjaxError(f"Hybrid needs the params of both its parts, by name: {PARTS}")
        for name, part in zip(PARTS, self.parts, strict=True):
            if part.num_probes or part.num_nodes < 2:
                raise SpecjaxError(
                    f"{type(part).__name__} cannot be the {name} of a hybrid: it drafts nothing or "
                    "has probe rows; choose another"
                )
            part.check(target, params[name])

    def init(self, start: Start) -> HybridState:
        def start_part(part: Drafter, params: Params) -> State:
            prefill = self._seen_by(part, start.prefill)
            # A round may take a path of the other part.
            max_depth = max(start.max_depth, part.max_depth + 1)
            return part.init(start._replace(params=params, prefill=prefill, max_depth=max_depth))

        def nothing(part: Drafter) -> DraftTree:
            nodes = jnp.zeros((len(start.prompt.length), part.num_nodes), jnp.int32)
            return DraftTree(nodes, nodes, nodes, nodes > 0)

        none = jnp.zeros((len(start.prompt.length), 2, 2))
        return HybridState(
            parts=tuple(map(start_part, self.parts, _params(start.params))),
            drafted=tuple(map(nothing, self.parts)),
            right=none,
            wrong=none,
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
            return rates[:, part, :1] + (tree.depth - 1) * rates[:, part, 1:]

        def ask(context: Context, carry: tuple[Any, State]) -> tuple[DraftTree, State]:
            (tree, _), kept = head.propose(target, for_head, carry[1], context, draw)
            return tree, kept

        def skip(context: Context, kept: State) -> State:
            return head.skip(target, for_head, kept, context, draw)

        (copied, _), kept_copy = copy.propose(target, for_copy, state.parts[0], context, draw)
        is_wanted = self._is_head_wanted(state, _depth(copied))
        shape, _ = jax.eval_shape(ask, context, (None, state.parts[1]))
        nothing = root_only(shape, context.root)
        is_asked = jnp.any(is_wanted & ~state.is_finished)
        tree, kept_head = if_in_place(is_asked, ask, context, (nothing, state.parts[1]))
        kept_head = if_in_place(~is_asked, skip, context, kept_head)
        # So what a row is given does not depend on the others.
        tree = replace(tree, valid=jnp.where(is_wanted[:, None], tree.valid, nothing.valid))
        merged = merge_trees(
            copied, tree, scores(0, copied), scores(1, tree), self.num_nodes, self.max_depth
        )
        bare = (
            DraftTree(each.tokens, each.parents, each.depth, each.valid) for each in (copied, tree)
        )
        return Proposal(merged), replace(state, parts=(kept_copy, kept_head), drafted=tuple(bare))

    def update(
        self, target: Target, params: Params, state: HybridState, outcome: Outcome
    ) -> HybridState:
        def learn(part: Drafter, own: Params, kept: State) -> State:
            seen = replace(outcome, output=self._seen_by(part, outcome.output))
            return part.update(target, own, kept, seen)

        agreed = jnp.stack([num_agreed(tree, outcome) for tree in state.drafted], axis=1)
        deepest = jnp.stack([_depth(tree) for tree in state.drafted], axis=1)
        is_wrong = agreed < jnp.minimum(deepest, outcome.num_committed[:, None])
        kept = jnp.where(deepest > 0, KEPT, 1.0)[..., None]
        right = jnp.stack([agreed > 0, jnp.maximum(agreed - 1, 0)], axis=2)
        wrong = jnp.stack([is_wrong & (agreed == 0), is_wrong & (agreed > 0)], axis=2)
        return HybridState(
            parts=tuple(map(learn, self.parts, _params(params), state.parts)),
            drafted=state.drafted,
            right=kept * state.right + right,
            wrong=kept * state.wrong + wrong,
            is_finished=outcome.num_committed == 0,
        )

    def _is_head_wanted(self, state: HybridState, depth: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Whether the head's draft is worth its time, beside a copy of this depth."""
        first, later = jnp.moveaxis(jnp.exp(log_rates(state))[:, 0], -1, 0)
        copied = first * (1 - later**depth) / (1 - later)  # tokens expected
        num_right, num_drafts = jnp.sum(state.right[:, 1], 1), state.right + state.wrong
        predicted = (1 + num_right) / (1 + num_drafts[:, 1, 0])  # one token before it is known
        if type(self.parts[1]).skip is Drafter.skip:  # nothing would be saved
            return depth >= 0
        return (depth == 0) | ((1 - first) * predicted > self.head_cost * (1 + copied))

    def _seen_by(self, part: Drafter, output: ModelOutput) -> ModelOutput:
        """Returns what a part taps of the output."""
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


def log_rates(state: HybridState) -> Float[Array, "B 2 2"]:
    """Returns how likely a drafted token is right, of each part, first tokens and later ones."""
    right, wrong = state.right + PRIOR_RIGHT, state.wrong + PRIOR_WRONG
    return jnp.log(right / (right + wrong))


def num_agreed(tree: DraftTree, outcome: Outcome) -> Int[Array, " B"]:
    """Returns how many tokens of the longest path were committed, whether verified or not."""
    context = outcome.context
    after = outcome.root_slot[:, None] + tree.depth + 1
    said = jnp.take_along_axis(context.tokens, after, axis=1, mode="clip")
    wanted = jnp.where(after < context.length[:, None], said, -1)
    return follow(tree, wanted, tree.num_nodes - 1).num_accepted


def merge_trees(
    first: DraftTree,
    second: DraftTree,
    first_scores: Float[Array, "B N"],
    second_scores: Float[Array, "B M"],
    num_nodes: int,
    max_depth: int,
) -> DraftTree:
    """Returns the tree of the best nodes of two trees below the same root.

    A node that both have gets the better score. Scores fall from parents to children.
    """
    twins = same_nodes(first, second, max_depth)
    has_twin, twin = jnp.any(twins, axis=1), jnp.argmax(twins, axis=1)
    count, others = first.num_nodes, jnp.arange(second.num_nodes)[None, :]
    place = jnp.where(has_twin, twin, count - 1 + others)  # in the pool, counted from 1
    parents = jnp.take_along_axis(place, jnp.maximum(second.parents, 0), axis=1)
    of_twin = jnp.max(jnp.where(twins, second_scores[:, None, :], -jnp.inf), axis=2)
    first_scores = jnp.where(first.valid, jnp.maximum(first_scores, of_twin), -jnp.inf)
    second_scores = jnp.where(second.valid & ~has_twin, second_scores, -jnp.inf)
    pool = lambda *values: jnp.concatenate([each[:, 1:] for each in values], axis=1)  # noqa: E731
    return best_of_pool(
        first.tokens[:, 0],
        pool(first.tokens, second.tokens),
        pool(first_scores, second_scores),
        pool(first.parents, parents) - 1,
        pool(first.depth, second.depth),
        num_nodes,
        is_chain=False,
    )


def same_nodes(first: DraftTree, second: DraftTree, max_depth: int) -> Bool[Array, "B N M"]:
    """Returns whether the paths to node i and node j have the same tokens, at entry [b, i, j].

    Each pass doubles the distance looked back, as in `ancestors`.
    """
    same = (
        (first.tokens[:, :, None] == second.tokens[:, None, :])
        & (first.depth[:, :, None] == second.depth[:, None, :])
        & (first.valid[:, :, None] & second.valid[:, None, :])
    )
    above = [jnp.maximum(tree.parents, 0) for tree in (first, second)]
    for _ in range(max(1, max_depth).bit_length()):
        same = same & jax.vmap(lambda seen, i, j: seen[i][:, j])(same, *above)
        above = [jnp.take_along_axis(jump, jump, axis=1) for jump in above]
    return same
