"""Token recycling: drafts what the target found likely after the same tokens before."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.pytree import pytree
from specjax.core.ranking import best_tokens
from specjax.core.settings import setting
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start
from specjax.decoding.drafters._trees import assemble, levels_of
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import Choices, choices_of, sorted_choices
from specjax.models.target import Taps, Target, causal_rows

EMPTY = -1  # marks a successor that is not known


@pytree
class Successors:
    """The K most likely tokens after each token, the most likely first, and their logits."""

    tokens: Int[Array, "*B V K"]
    logits: Float[Array, "*B V K"]


# The nodes of a tree in the order in which they were most often right, as
# `recipes.smollm2.recycling` counts it.
BEST_FIRST = choices_of(
    """
    0 00 1 2 000 01 3 0000 10 4 20 010 001 200 11 5 6 0010 60 100 30 40 02 03 002 110 2000 1100
    04 05 06 050 21 50 00000 00001 0100 011 300 07 040 400 210 070 7 020 12 13 0001 1000 003 004
    030 41 0002 0003 005 012 500 000000 51 00100 060
    """
)
# The share of successors of each rank that were right where their parent was.
RATES = (0.37, 0.085, 0.041, 0.024, 0.018, 0.017, 0.013, 0.01)
SEED_BLOCK = 256  # tokens whose successors are computed at once


@dataclass(frozen=True)
class Recycling(Drafter):
    """Drafts a static tree from a table of each token's last successors; no weights.

    Luo et al. 2024, "Turning Trash into Treasure: Accelerating Inference of Large Language Models
    with Token Recycling". The table holds the `num_successors` most likely tokens after each token,
    taken from the target's logits at the last verified node with that token, accepted or not. The
    child of rank r of a node is successor r of its token.

    Differences from the published code: each sequence has a table, which starts from its prompt
    (`from_prompt`) and, if `seeded`, from the target's successors of each token; nodes without a
    known token are left out; of several nodes with one token in a round, the table keeps the first
    on the accepted path, or else the first; the trees are ours. Above temperature 0, under
    `coupled`, the successors are ranked with the noise that the target will draw with.
    """

    num_tokens: int = setting(64, at_least=2, at_most=64)
    """Nodes to verify, root included."""
    seeded: bool = False
    """Start with the target's successors of each token alone; true or false. They are computed once
    per target, in a pass over its vocabulary, and kept in the cache folder."""
    from_prompt: bool = True
    """Put what follows each token in the prompt before its other successors; true or false."""

    taps = Taps(logits=True)
    num_successors: ClassVar[int] = 8

    @property
    def choices(self) -> Choices:
        """The paths of the tree, as ranks."""
        return BEST_FIRST[: self.num_tokens - 1]

    @property
    def num_nodes(self) -> int:
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        return max(map(len, self.choices))

    def check(self, target: Target, params: Any) -> None:
        if not self.seeded:
            super().check(target, params)
        elif not isinstance(params, Successors) or params.tokens.shape != self._shape(target):
            raise SpecjaxError(
                "a seeded Recycling needs the successors of this target; pass the pair that "
                "specjax.load_drafter returned"
            )

    def init(self, start: Start) -> Successors:
        batch = len(start.prompt.length)
        shape = (batch, *self._shape(start.target))
        table = Successors(jnp.full(shape, EMPTY), jnp.full(shape, -jnp.inf))
        if self.seeded:
            table = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, shape), start.params.drafter)
        return with_prompt(table, start.prompt) if self.from_prompt else table

    def propose(
        self, target: Target, params: Params, state: Successors, context: Context, draw: Draw
    ) -> tuple[Proposal, Successors]:
        tokens, fed = [context.root[:, None]], context.root[:, None]
        for depth, level in enumerate(levels_of(self.choices)):
            below = _ranked(state, fed, context.length + depth, draw)
            tokens.append(below[:, level.parent, level.rank])
            fed = tokens[-1][:, level.fed]
        valid = [of_level != EMPTY for of_level in tokens]
        ordered, _ = sorted_choices(self.choices)
        scores = np.array([0.0, *(sum(np.log(RATES)[list(path)]) for path in ordered)], np.float32)
        return Proposal(assemble(self.choices, tokens, valid, [], scores)), state

    def update(
        self, target: Target, params: Params, state: Successors, outcome: Outcome
    ) -> Successors:
        tree, vocab_size = outcome.tree, state.tokens.shape[1]
        assert outcome.output.logits is not None
        at_nodes = outcome.output.logits[:, : tree.num_nodes]
        logits, tokens = best_tokens(at_nodes, self.num_successors)
        at = jnp.where(is_kept(outcome), tree.tokens, vocab_size)
        return _written(state, at, tokens, logits)

    def _shape(self, target: Target) -> tuple[int, int]:
        return target.config.vocab_size, self.num_successors


def with_prompt(table: Successors, prompt: Prompt) -> Successors:
    """Puts what follows each token in a prompt before its other successors, the latest first.

    It gets the logit of the likeliest so far.
    """
    count = table.tokens.shape[-1]

    def follow(step: Int[Array, ""], table: Successors) -> Successors:
        at, after = prompt.tokens[:, step], prompt.tokens[:, step + 1]
        at = jnp.where(step + 1 < prompt.length, at, table.tokens.shape[1])
        tokens, logits = (
            jax.vmap(lambda rows, at: rows.at[at].get(mode="clip"))(leaf, at)
            for leaf in (table.tokens, table.logits)
        )
        same = tokens == after[:, None]
        rank = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), count - 1)
        moved = jnp.arange(count)[None, :] <= rank[:, None]
        best = jnp.maximum(logits[:, 0], jnp.where(tokens[:, 0] == EMPTY, 0.0, -jnp.inf))
        before = lambda first, row: jnp.concatenate([first[:, None], row[:, :-1]], axis=1)  # noqa: E731
        tokens = jnp.where(moved, before(after, tokens), tokens)
        return _written(table, at, tokens, jnp.where(moved, before(best, logits), logits))

    return jax.lax.fori_loop(0, jnp.max(prompt.length) - 1, follow, table)


def _written(table: Successors, at: Array, tokens: Array, logits: Array) -> Successors:
    """Writes the successors of the tokens `at`; those beyond the vocabulary are dropped."""
    write = jax.vmap(lambda table, at, rows: table.at[at].set(rows, mode="drop"))
    return Successors(write(table.tokens, at, tokens), write(table.logits, at, logits))


def _ranked(
    table: Successors, tokens: Int[Array, "B F"], position: Int[Array, " B"], draw: Draw
) -> Int[Array, "B F K"]:
    """Returns the successors of each token, the likeliest at `position` of the text first."""
    look_up = jax.vmap(lambda entries, at: entries[at])
    at = jnp.maximum(tokens, 0)
    successors = jnp.where(tokens[..., None] == EMPTY, EMPTY, look_up(table.tokens, at))
    if not draw.sampling.noise_is_known:
        return successors
    noise = draw.noise(position[:, None], table.tokens.shape[1])[:, 0]
    noise = look_up(noise, jnp.maximum(successors, 0))
    scores = look_up(table.logits, at) + draw.temperature * noise
    order = jnp.argsort(scores, axis=-1, descending=True)
    return jnp.take_along_axis(successors, order, axis=-1)


@partial(jax.jit, static_argnums=(0, 2))
def successors_of(target: Target, params: Any, count: int) -> Successors:
    """Computes the most likely tokens after each token, which follows BOS if the model has one."""
    config = target.config
    cache = target.new_cache(params, SEED_BLOCK, 2, 2)
    if config.bos_token_id is not None:
        first = jnp.full((SEED_BLOCK, 1), config.bos_token_id, jnp.int32)
        rows = causal_rows(first, cache.length)
        _, cache = target.run(params, rows, cache, Taps(logits=False))
        cache = cache.advance(jnp.ones_like(cache.length))

    def of_block(start: Int[Array, ""]) -> Successors:
        tokens = jnp.minimum(start + jnp.arange(SEED_BLOCK), config.vocab_size - 1)
        output, _ = target.run(params, causal_rows(tokens[:, None], cache.length), cache)
        assert output.logits is not None
        logits, best = best_tokens(output.logits[:, 0], count)
        return Successors(best, logits)

    blocks = jax.lax.map(of_block, jnp.arange(0, config.vocab_size, SEED_BLOCK))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, count)[: config.vocab_size], blocks)


def is_kept(outcome: Outcome) -> Bool[Array, "B N"]:
    """Whether the table keeps a node's successors: of one node per token, preferably accepted."""
    tree, path = outcome.tree, outcome.verification.path
    count, nodes = tree.num_nodes, jnp.arange(tree.num_nodes)[None, :]
    is_step = jnp.arange(path.shape[1])[None, :] <= outcome.verification.num_accepted[:, None]
    on_path = jnp.any((path[..., None] == nodes[:, None]) & is_step[..., None], axis=1)
    order = jnp.where(on_path, nodes, nodes + count)
    order = jnp.where(tree.valid, order, 2 * count)
    is_same = tree.tokens[:, :, None] == tree.tokens[:, None, :]
    first = jnp.min(jnp.where(is_same, order[:, None, :], 2 * count), axis=2)
    return tree.valid & (order == first)
