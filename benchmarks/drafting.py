"""Measures what drafting by PLD+ costs beside the target: python -m benchmarks.drafting

Two questions about PLD+ with K=70. How long do search and bookkeeping take against a plain step of
the target? And how long does a whole round take when nothing, 5 or all 70 tokens are drafted?
Weights and text are random, so nothing drafted is accepted, and the text hardly grows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.harness import default_size, device, in_turn, main, option, random_target, table
from specjax import Drafter, Engine, Params, Target, from_ids
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context, Outcome, Proposal, copied_chain
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import LoopState
from specjax.decoding.tree import Verification
from specjax.loading.targets import LoadedTarget
from specjax.models.target import ModelOutput

NUM_TOKENS = 70
DRAFTED = (0, 5, NUM_TOKENS)
MORE_ROUNDS = 100  # of drafting alone, which takes little


@dataclass(frozen=True)
class DraftingOptions:
    """The options of this benchmark."""

    size: str = option("160m, 7b or tiny; by default 160m on CPU and 7b elsewhere", "")
    context: int = option("tokens of the text", 2048)
    rounds: int = option("rounds per timed run", 8)
    runs: int = option("timed runs of each, in turn", 7)


@dataclass(frozen=True)
class Always(PromptLookupPlus):
    """PLD+ (h) that searches as usual, and then claims that it found `count` tokens."""

    count: int = 0

    def propose(self, target: Target, params, state, context: Context, draw: Draw):
        (tree, _), state = super().propose(target, params, state, context, draw)
        steps = jnp.arange(tree.num_nodes)[None, :]
        return Proposal(replace(tree, valid=steps <= self.count)), state


def round_runs(target: LoadedTarget, options: DraftingOptions) -> dict[str, Callable[[], Any]]:
    """Returns rounds of plain decoding, and of PLD+ by the number of drafted tokens."""
    layer = PromptLookupPlus.layer_for(target.config)
    drafters: dict[str, Drafter] = {"plain step": Autoregressive()}
    for count in DRAFTED:
        name = f"round of pld-plus, {count} drafted"
        drafters[name] = Always(NUM_TOKENS, layer=layer, count=count)
    runs = {}
    for name, drafter in drafters.items():
        engine, state = _started(target, drafter, options)
        runs[name] = partial(_rounds, Params(target.params), state, engine, options.rounds)
    return runs


def drafting_runs(target: LoadedTarget, options: DraftingOptions) -> dict[str, Callable[[], Any]]:
    """Returns search and bookkeeping alone, with all tokens accepted."""
    config = target.config
    drafters = {
        "pld-plus": PromptLookupPlus(NUM_TOKENS, layer=PromptLookupPlus.layer_for(config)),
        "pld-plus-attention": PromptLookupPlusAttention(
            NUM_TOKENS, heads=PromptLookupPlusAttention.heads_for(config)
        ),
    }
    runs = {}
    for name, drafter in drafters.items():
        engine, state = _started(target, drafter, options)
        outcome = _outcome(engine, state)
        num_rounds = MORE_ROUNDS * options.rounds
        runs[f"drafting alone, {name}"] = partial(_drafts, state, outcome, engine, num_rounds)
    return runs


def _started(
    target: LoadedTarget, drafter: Drafter, options: DraftingOptions
) -> tuple[Engine, LoopState]:
    """Prefills a random text of few different tokens, so that candidates are many."""
    text = np.random.default_rng(0).integers(0, 50, options.context).tolist()
    engine = Engine(target.model, drafter, max_new_tokens=4 * options.rounds)
    return engine, engine.prefill(Params(target.params), from_ids([text]), jax.random.key(0))


@partial(jax.jit, static_argnames=("engine", "num_rounds"))
def _rounds(params: Params, state: LoopState, engine: Engine, num_rounds: int) -> LoopState:
    return lax.fori_loop(0, num_rounds, lambda _, state: engine.round(params, state), state)


@partial(jax.jit, static_argnames=("engine", "num_rounds"))
def _drafts(state: LoopState, outcome: Outcome, engine: Engine, num_rounds: int):
    draw = Draw(state.sequence_keys, state.length, Sampling())
    context, no_params = Context(state.tokens, state.length), Params(None)
    drafter, target = engine.drafter, engine.target

    def body(_, carry):
        drafter_state, drafted = carry
        proposal, drafter_state = drafter.propose(target, no_params, drafter_state, context, draw)
        drafter_state = drafter.update(target, no_params, drafter_state, outcome)
        return drafter_state, drafted + jnp.sum(proposal.tree.tokens)  # keeps the draft alive

    return lax.fori_loop(0, num_rounds, body, (state.drafter, jnp.zeros((), jnp.int32)))


def _outcome(engine: Engine, state: LoopState) -> Outcome:
    """Makes a round that accepted all tokens, and what the target revealed in it."""
    context, drafter = Context(state.tokens, state.length), engine.drafter
    rows, heads = drafter.num_nodes, len(drafter.taps.attention_heads)
    layers, width = len(drafter.taps.hidden_layers), engine.target.config.hidden_size
    hidden = jnp.ones((1, rows, layers, width), state.cache.keys[0].dtype)
    attention = jnp.ones((1, heads, 1, state.cache.num_slots))
    return Outcome(
        tree=copied_chain(context, state.length - rows, jnp.ones(1, bool), drafter.max_depth),
        output=ModelOutput(None, hidden, attention if heads else None),
        verification=Verification(
            path=jnp.arange(rows, dtype=jnp.int32)[None, :],
            num_accepted=jnp.full(1, drafter.max_depth, jnp.int32),
            bonus=jnp.zeros(1, jnp.int32),
        ),
        context=context,
        root_slot=state.length - rows,
    )


def run(options: DraftingOptions) -> None:
    """Measures and prints the table."""
    size = options.size or default_size()
    if min(options.rounds, options.runs) < 1 or options.context < 2 * NUM_TOKENS + 2:
        raise SpecjaxError(
            f"rounds and runs must be at least 1, and context at least {2 * NUM_TOKENS + 2}"
        )
    target = random_target(size, 2 * options.context)
    seconds = {}
    for runs, rounds in (
        (round_runs(target, options), options.rounds),
        (drafting_runs(target, options), MORE_ROUNDS * options.rounds),
    ):
        timed = in_turn(runs, options.runs)
        seconds |= {name: median(times) / rounds for name, times in timed.items()}
    step = seconds["plain step"]
    rows = [(name, f"{1e3 * each:.3f}", f"{each / step:.3f}") for name, each in seconds.items()]
    print(table((f"{size}, {options.context} tokens", "ms", "x plain step"), rows))
    print(f"medians of {options.runs} runs of {options.rounds} rounds in turn, on {device()}")


if __name__ == "__main__":
    main(run, DraftingOptions, __doc__)
