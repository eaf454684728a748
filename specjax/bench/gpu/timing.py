"""Programs of one setting, compiled side by side and timed in turn; what fails is told, not fatal.

A setting is a target, its prompts and how many tokens to add. Compiling for a GPU takes longer than
measuring, so several programs are compiled at once; nothing is timed meanwhile.
"""

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench.gpu.methods import Base
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.generate import finish_loop, start_loop
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import check_request
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation

OUT_OF_MEMORY = "out of memory"
Result = TypeVar("Result")


class Failure(Exception):
    """What stands in place of a result, or is raised where there is no going on without one."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason

    @property
    def told(self) -> dict[str, Any]:
        """What a row says of it."""
        return {"failed": self.reason, "is_memory": self.reason == OUT_OF_MEMORY}


class Setting(NamedTuple):
    """What programs are compiled for, beside the drafter."""

    base: Base
    prompt: Prompt
    new_tokens: int


class Program(NamedTuple):
    """A whole generation in two parts."""

    start: Callable[..., Any]
    finish: Callable[..., Generation]
    seconds: float  # that compiling took


class Run(NamedTuple):
    """A program and what it reads."""

    program: Program
    params: Params
    max_rounds: int


class Timed(NamedTuple):
    """What the runs of a program have shown; they all say the same."""

    seconds: list[float]  # of a round, by run
    generation: Generation

    @property
    def quartiles(self) -> list[float]:
        """First quartile, median and third quartile."""
        return np.percentile(self.seconds, (25, 50, 75)).tolist()


def attempt(work: Callable[[], Result]) -> Result | Failure:
    """What `work` returns, or why it failed; the traceback goes to stderr unless memory ran out."""
    try:
        return work()
    except Failure as error:
        return Failure(error.reason)  # without the frames, which hold arrays
    except Exception as error:  # whatever it is, the other measurements are not to be lost
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            return Failure(OUT_OF_MEMORY)
        traceback.print_exc(file=sys.stderr)
        line = str(error).strip().partition("\n")[0]
        return Failure(f"{type(error).__name__}: {line}")


def needed(result: Result | Failure) -> Result:
    """The result; raises the failure that stands in its place."""
    if isinstance(result, Failure):
        raise result
    return result


def compiled(
    setting: Setting, drafters: Mapping[str, tuple[Drafter, Params]], num_threads: int
) -> dict[str, Program | Failure]:
    """The programs of some drafters. Tracing goes one by one, XLA's work in threads."""
    with ThreadPoolExecutor(num_threads) as pool:
        started = {}
        for name, (drafter, params) in drafters.items():
            began = time.perf_counter()
            lowered = attempt(partial(_lowered, setting, drafter, params))
            started[name] = pool.submit(_finished, lowered, time.perf_counter() - began)
        return {name: each.result() for name, each in started.items()}


def in_turn(
    setting: Setting,
    runs: Mapping[str, Run],
    repeats: int,
    has_time: Callable[[], bool],
) -> dict[str, Timed | Failure]:
    """Runs all once to warm up, then in turn, `repeats` times or as often as there is time.

    There are at least two timed runs of each, unless fewer `repeats` are asked for.
    """
    found: dict[str, Timed | Failure] = {}
    for name, run in runs.items():
        result = attempt(partial(_timed_once, setting, run))
        found[name] = result if isinstance(result, Failure) else Timed([], result[1])
    for repeat in range(repeats):
        if repeat >= 2 and not has_time():
            break
        for name, run in runs.items():
            if isinstance(timed := found[name], Timed):
                result = attempt(partial(_timed_once, setting, run))
                if isinstance(result, Failure):
                    found[name] = result
                else:
                    timed.seconds.append(result[0])
    return found


def _lowered(setting: Setting, drafter: Drafter, params: Params) -> tuple[Any, Any]:
    target, new_tokens = setting.base.model, setting.new_tokens
    check_request(params, setting.prompt, target, drafter, new_tokens)
    settings = {"target": target, "drafter": drafter, "max_new_tokens": new_tokens}
    arguments = (params, setting.prompt, jax.random.key(0))
    start = start_loop.lower(*arguments, **settings)
    state = jax.eval_shape(partial(start_loop, **settings), *arguments)
    limit = jnp.asarray(new_tokens, jnp.int32)
    finish = finish_loop.lower(params, state, limit, sampling=Sampling(), eos=(), **settings)
    return start, finish


def _finished(lowered: tuple[Any, Any] | Failure, seconds: float) -> Program | Failure:
    if isinstance(lowered, Failure):
        return lowered
    began = time.perf_counter()
    parts = attempt(lambda: [each.compile() for each in lowered])
    if isinstance(parts, Failure):
        return parts
    start, finish = parts
    return Program(start, finish, seconds + time.perf_counter() - began)


def _timed_once(setting: Setting, run: Run) -> tuple[float, Generation]:
    """Seconds per round, prefill not counted, and what was generated."""
    state = run.program.start(run.params, setting.prompt, jax.random.key(0))
    limit = jnp.asarray(run.max_rounds, jnp.int32)
    jax.block_until_ready((state, limit))
    began = time.perf_counter()
    _, generation = jax.block_until_ready(run.program.finish(run.params, state, limit))
    seconds = time.perf_counter() - began
    return seconds / int(np.max(np.asarray(generation.stats.rounds))), generation
