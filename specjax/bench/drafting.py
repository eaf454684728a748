"""What drafting costs beside the target: `python -m specjax.bench.drafting`.

Two questions about PLD+ with K=70 in a text of 2048 tokens. How long do search and bookkeeping take
against a plain step of the target? And how long does a whole round take when nothing, 5 or all 70
tokens are drafted? Weights and text are random, so nothing drafted is accepted, and every round
stays as long as the text.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

from specjax.bench.shapes import default_size, random_target
from specjax.core.errors import SpecjaxError, exit_code
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.decoding.generate import start_loop
from specjax.decoding.prompt import from_ids
from specjax.decoding.round import one_round
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.decoding.tree import Verification
from specjax.models.config import TransformerConfig
from specjax.models.target import ModelOutput
from specjax.models.transformer import Transformer

NUM_TOKENS = 70
DRAFTED = (0, 5, NUM_TOKENS)


@dataclass(frozen=True)
class Options:
    """What does drafting by PLD+ cost?"""

    size: str = ""
    """160m, 7b or tiny; by default 160m on CPU and 7b elsewhere."""
    context: int = 2048
    """Tokens of the text."""
    rounds: int = 8
    """Rounds per timed run."""
    runs: int = 7
    """Timed runs of each, in turn."""


@dataclass(frozen=True)
class Always(PromptLookupPlus):
    """PLD+ (h) that searches as ever, and then says that it found `count` tokens."""

    count: int = 0

    def propose(self, params, state, context: Context, draw: Draw):
        (tree, _), state = super().propose(params, state, context, draw)
        steps = jnp.arange(tree.num_nodes)[None, :]
        return Proposal(replace(tree, valid=steps <= self.count)), state


def measure_rounds(target: Transformer, params: Any, options: Options) -> dict[str, float]:
    """Seconds per round of plain decoding, and of PLD+ by the number of drafted tokens."""
    layer = PromptLookupPlus.layer_for(target.config)
    drafters: dict[str, Drafter] = {"plain": Autoregressive()}
    for count in DRAFTED:
        drafters[f"{count} drafted"] = Always(NUM_TOKENS, layer=layer, count=count)
    runs = {
        name: partial(_rounds, Params(params), _state(target, params, drafter, options))
        for name, drafter in drafters.items()
    }
    settings = {
        name: {"target": target, "drafter": drafter, "num_rounds": options.rounds}
        for name, drafter in drafters.items()
    }
    timed = {name: partial(run, **settings[name]) for name, run in runs.items()}
    return _in_turn(timed, options)


def measure_drafting(target: Transformer, params: Any, options: Options) -> dict[str, float]:
    """Seconds per round of search and bookkeeping alone, with all tokens accepted."""
    layer = PromptLookupPlus.layer_for(target.config)
    heads = PromptLookupPlusAttention.heads_for(target.config)
    drafters = {
        "pld-plus": PromptLookupPlus(NUM_TOKENS, layer=layer),
        "pld-plus-attention": PromptLookupPlusAttention(NUM_TOKENS, heads=heads),
    }
    timed = {}
    for name, drafter in drafters.items():
        state = _state(target, params, drafter, options)
        outcome = _outcome(target.config, drafter, state)
        timed[name] = partial(
            _drafts, state, outcome, drafter=drafter, num_rounds=100 * options.rounds
        )
    return {name: seconds / 100 for name, seconds in _in_turn(timed, options).items()}


def _in_turn(runs: Mapping[str, Callable[[], Any]], options: Options) -> dict[str, float]:
    """The median over the runs of the seconds per round of each; compiling does not count."""
    for run in runs.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.runs):
        for name, run in runs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append((time.perf_counter() - started) / options.rounds)
    return {name: median(times) for name, times in seconds.items()}


def _state(target: Transformer, params: Any, drafter: Drafter, options: Options) -> LoopState:
    """The loop after prefill of a random text from few tokens, so that candidates are many."""
    text = np.random.default_rng(0).integers(0, 50, options.context).tolist()
    # Donated buffers are not wanted here, so room for new tokens stays free.
    return start_loop(
        Params(params),
        from_ids([text]),
        jax.random.key(0),
        target=target,
        drafter=drafter,
        max_new_tokens=4 * options.rounds,
    )


@partial(jax.jit, static_argnames=("target", "drafter", "num_rounds"))
def _rounds(params: Params, state: LoopState, *, target, drafter, num_rounds: int) -> LoopState:
    def body(_, state):
        return one_round(params, state, target, drafter, Sampling(), 4 * num_rounds, ())

    return lax.fori_loop(0, num_rounds, body, state)


@partial(jax.jit, static_argnames=("drafter", "num_rounds"))
def _drafts(state: LoopState, outcome: Outcome, *, drafter: Drafter, num_rounds: int):
    draw = Draw(state.row_keys, state.length, Sampling())
    context = Context(state.tokens, state.length)

    def body(_, carry):
        drafter_state, drafted = carry
        proposal, drafter_state = drafter.propose(Params(None), drafter_state, context, draw)
        drafter_state = drafter.update(Params(None), drafter_state, outcome)
        return drafter_state, drafted + jnp.sum(proposal.tree.tokens)  # so that it must be made

    return lax.fori_loop(0, num_rounds, body, (state.drafter, jnp.zeros((), jnp.int32)))


def _outcome(config: TransformerConfig, drafter: Drafter, state: LoopState) -> Outcome:
    """A round that accepted all tokens, and what the target revealed in it."""
    context = Context(state.tokens, state.length)
    rows, heads = drafter.num_nodes, len(drafter.taps.attention_heads)
    dtype = state.cache.keys[0].dtype
    hidden = jnp.ones((1, rows, len(drafter.taps.hidden_layers), config.hidden_size), dtype)
    attention = jnp.ones((1, heads, 1, state.cache.num_slots))
    return Outcome(
        tree=context.copied(state.length - rows, jnp.ones(1, bool), drafter.max_depth),
        output=ModelOutput(None, hidden, attention if heads else None),
        verification=Verification(
            path=jnp.arange(rows, dtype=jnp.int32)[None, :],
            num_accepted=jnp.full(1, drafter.max_depth, jnp.int32),
            bonus=jnp.zeros(1, jnp.int32),
        ),
        context=context,
        root_slot=state.length - rows,
    )


def _run(options: Options) -> None:
    size = options.size or default_size()
    if min(options.rounds, options.runs) < 1 or options.context < 2 * NUM_TOKENS + 2:
        raise SpecjaxError(
            f"rounds and runs must be at least 1, and context at least {2 * NUM_TOKENS + 2}"
        )
    target, params, dtype = random_target(size, 2 * options.context)
    rounds = measure_rounds(target, params, options)
    drafting = measure_drafting(target, params, options)
    table = Table(f"{size}, {dtype}, {options.context} tokens", "ms", "x plain step", box=None)
    for name, seconds in rounds.items():
        row = "plain step" if name == "plain" else f"round of pld-plus, {name}"
        table.add_row(row, f"{1e3 * seconds:.3f}", f"{seconds / rounds['plain']:.3f}")
    for name, seconds in drafting.items():
        row = f"drafting alone, {name}"
        table.add_row(row, f"{1e3 * seconds:.3f}", f"{seconds / rounds['plain']:.3f}")
    Console(soft_wrap=True, markup=False, highlight=False).print(table)
    device = jax.devices()[0].device_kind
    print(f"medians of {options.runs} runs of {options.rounds} rounds in turn, on {device}")
    for other in {"160m", "7b"} - {size}:
        print(f"not measured on this machine: {other} (--size {other})")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
