"""Tiny random targets, prompts, and drafters that know the truth, spoil it, or lie."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from specjax.decoding import Context, Drafter, Draw, Params, Probe, Proposal
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.tree import DraftTree, chain, sorted_choices
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.target import Taps, Target, causal_rows
from specjax.models.transformer import Transformer

BATCH = 3


def slow_except(cases: Iterable, *quick: Any) -> list:
    """Marks all cases slow but the quick ones; a tuple is the arguments of one case."""
    slow = pytest.mark.slow
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)  # noqa: E731
    return [c if c in quick else pytest.param(*as_tuple(c), marks=slow) for c in cases]


@cache
def target(vocab_size: int = 40, layers: int = 2, seed: int = 0, scale: float = 8.0):
    """A random model, its weights large enough for its context to matter, and those weights."""
    config = TransformerConfig(vocab_size, 32, 48, layers, 4, 2, 8, max_position_embeddings=512)
    model = Transformer(config)
    params = model.initialise(jax.random.key(seed))
    larger = lambda leaf: jnp.asarray(np.asarray(leaf) * scale)  # noqa: E731 - compiles nothing
    return model, jax.tree.map(lambda leaf: larger(leaf) if leaf.ndim == 2 else leaf, params)


@partial(jax.jit, static_argnums=(2, 3))
def plain_pass(params, tokens, model: Target, taps: Taps = Taps()):
    """Returns the target's output and cache after one pass over whole texts `[B, S]`."""
    rows = causal_rows(tokens, jnp.zeros(len(tokens), jnp.int32))
    return model.run(params, rows, KVCache.create(model.config, *tokens.shape), taps)


@cache
def prompt(batch: int = BATCH, vocab_size: int = 40) -> Prompt:
    """One prompt, or a ragged batch whose first row is the same prompt."""
    numbers = np.random.default_rng(5)
    lengths = [17, 30, 5, 23][:batch]
    return from_ids([numbers.integers(0, vocab_size, n).tolist() for n in lengths], bucket=32)


PASSES: list[np.ndarray] = []  # the tokens of each pass of a `Watched` target, when it ran


class Watched(Transformer):
    """Records the tokens of every pass when it runs, not when it is compiled."""

    @nn.nowrap
    def run(self, params, rows, cache, *taps):
        jax.debug.callback(lambda tokens: PASSES.append(np.asarray(tokens)), rows.tokens)
        return super().run(params, rows, cache, *taps)


def pass_widths() -> list[int]:
    """Returns the tokens per sequence of all recorded passes."""
    jax.effects_barrier()
    return [tokens.shape[1] for tokens in PASSES]


FULL = ()  # passes of the whole tree alone: a narrow one would be compiled, and never run


class Trusting(Drafter):
    """Accepts any params."""

    def check(self, target, params):
        pass


@dataclass(frozen=True)
class Oracle(Trusting):
    """Knows what the target will say (`params.drafter [B, S]`, whole texts) and may spoil it.

    Of every `wrong_every` drafted positions of the text one is wrong: 1 never agrees, 0 always.
    """

    max_depth: int = 4
    wrong_every: int = 0
    vary_length: bool = False  # drafts 0..max_depth tokens, by position

    @property
    def num_nodes(self) -> int:
        return self.max_depth + 1

    @property
    def pass_widths(self) -> tuple[int, ...] | None:
        return None if self.vary_length else FULL

    def propose(self, target, params: Params, state, context: Context, draw: Draw):
        at = context.length[:, None] + jnp.arange(self.max_depth)[None, :]
        drafted = jnp.take_along_axis(params.drafter, at, axis=1, mode="clip")
        if self.wrong_every:
            drafted = jnp.where(at % self.wrong_every == 0, (drafted + 1) % 40, drafted)
        count = jnp.full_like(context.length, self.max_depth)
        if self.vary_length:
            count = context.length % (self.max_depth + 1)
        return Proposal(chain(context.root, drafted, count)), state


def from_choices(root, candidates, choices: tuple[tuple[int, ...], ...]) -> DraftTree:
    """A static tree whose node of rank r at depth d has token `candidates[:, d - 1, r]`."""
    ordered, parents = sorted_choices(choices)
    depth = np.array([0] + [len(choice) for choice in ordered])
    rank = np.array([choice[-1] for choice in ordered])
    shape = (root.shape[0], len(depth))
    drafted = candidates[:, depth[1:] - 1, rank]
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], drafted], axis=1),
        parents=jnp.broadcast_to(parents, shape),
        depth=jnp.broadcast_to(depth, shape),
        valid=jnp.ones(shape, bool),
    )


@dataclass(frozen=True)
class OracleTree(Trusting):
    """A branching tree in which the truth has another rank at every position of the text.

    It also carries probe rows, which must change nothing.
    """

    choices: tuple[tuple[int, ...], ...] = (
        *((0,), (1,), (2,), (0, 0), (0, 2), (1, 0), (1, 1), (2, 1), (2, 2)),
        *((1, 1, 0), (2, 1, 0), (2, 1, 2), (2, 1, 2, 0), (2, 1, 2, 1)),
    )
    max_depth = 4
    num_probes = 3
    pass_widths = FULL

    @property
    def num_nodes(self) -> int:
        return len(self.choices) + 1

    def propose(self, target, params: Params, state, context: Context, draw: Draw):
        at = context.length[:, None] + jnp.arange(self.max_depth)[None, :]
        truth = jnp.take_along_axis(params.drafter, at, axis=1, mode="clip")
        shifts = (jnp.arange(3)[None, None, :] - (at % 4)[..., None]) % 40
        tree = from_choices(context.root, (truth[..., None] + shifts) % 40, self.choices)
        rows = jnp.broadcast_to(jnp.arange(3), (context.root.shape[0], 3))
        visible = jnp.broadcast_to(jnp.tril(jnp.ones((3, 3), bool)), (*rows.shape, 3))
        return Proposal(tree, Probe(rows + 7, rows + 1, rows * 2, visible)), state


def bigram(vocab_size: int, seed: int = 3):
    """A random table of log-probabilities of the next token."""
    logits = jax.random.normal(jax.random.key(seed), (vocab_size, vocab_size)) * 1.5
    return jax.nn.log_softmax(logits, axis=-1)


@dataclass(frozen=True)
class DrawnChain(Trusting):
    """Draws from the bigram table in `params.drafter`, which is its proposal."""

    max_depth: int = 2
    lie: str = ""  # "" | "greedy": drafts argmax, claims the table | "peek": drops unlikely draws

    pass_widths = FULL

    @property
    def num_nodes(self) -> int:
        return self.max_depth + 1

    def propose(self, target, params: Params, state, context: Context, draw: Draw):
        token, tokens, tables = context.root, [], []
        count, goes_on = jnp.zeros_like(context.length), jnp.ones_like(context.length, bool)
        for step in range(self.max_depth):
            log_probs = draw.filtered(params.drafter[token])
            scores = draw.perturbed(params.drafter[token][:, None], context.length[:, None] + step)
            token = jnp.argmax(log_probs if self.lie == "greedy" else scores[:, 0], axis=-1)
            tokens.append(token)
            tables.append(jnp.exp(log_probs))
            if self.lie == "peek":
                own = jnp.take_along_axis(tables[-1], token[:, None], axis=1)[:, 0]
                goes_on = goes_on & (own > 0.25)
            count = count + goes_on
        draft_probs = jnp.stack([*tables, jnp.zeros_like(tables[0])], 1)
        return Proposal(chain(context.root, jnp.stack(tokens, 1), count, draft_probs)), state


@dataclass(frozen=True)
class DrawnTree(Trusting):
    """Two siblings below the root and two below each, drawn without replacement."""

    max_depth = 2
    num_nodes = 7
    pass_widths = FULL

    def propose(self, target, params: Params, state, context: Context, draw: Draw):
        def two(token, position):
            table = params.drafter[token]
            scores = draw.perturbed(table[:, None], position[:, None])[:, 0]
            return jax.lax.top_k(scores, 2)[1].astype(jnp.int32), jnp.exp(draw.filtered(table))

        first, root_q = two(context.root, context.length)
        # Positions below two siblings differ, so that their draws do.
        left, left_q = two(first[:, 0], context.length + 1)
        right, right_q = two(first[:, 1], context.length + 1001)
        drafted = jnp.concatenate([first, left, right], 1)
        rows = jnp.ones_like(context.root)[:, None]
        tree = replace(
            chain(context.root, drafted, 6 * rows[:, 0]),
            parents=jnp.array([-1, 0, 0, 1, 1, 2, 2])[None, :] * rows,
            depth=jnp.array([0, 1, 1, 2, 2, 2, 2])[None, :] * rows,
            draft_probs=jnp.stack([root_q, left_q, right_q, *[jnp.zeros_like(root_q)] * 4], axis=1),
            is_chain=False,
        )
        return Proposal(tree), state
