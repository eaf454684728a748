"""What the rounds of a method draft and commit, what they cost, and what a shorter draft would do.

Round after round is recorded inside one program, as decoding runs it: started one by one, the
rounds of a small target would mostly wait for the host.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from specjax.bench.contestants import OwnMethod
from specjax.decoding.drafter import Params
from specjax.decoding.generate import STATIC
from specjax.decoding.round import one_round
from specjax.decoding.state import LoopState

PLAIN_ROUNDS = 32  # before each text, so that machine and method are judged in the same moment


class Round(NamedTuple):
    """What one round did."""

    drafted: int
    committed: int  # the bonus included


Rounds = tuple[Round, ...]  # of one text, in order


@dataclass(frozen=True)
class Observed:
    """A method on some texts; entry n of `costs` is what text n took, in plain rounds."""

    texts: tuple[Rounds, ...]
    costs: tuple[float, ...]

    def __add__(self, other: "Observed") -> "Observed":
        return Observed(self.texts + other.texts, self.costs + other.costs)

    @property
    def rounds(self) -> list[Round]:
        """Those of all texts."""
        return [each for text in self.texts for each in text]


def observe(own: OwnMethod, plain: OwnMethod, prompts: Sequence[Sequence[int]]) -> Observed:
    """Lets a method continue all prompts, a stretch of plain decoding before each.

    What compiling takes does not count.
    """
    texts, costs = [], []
    for contestant in (plain, own):
        _record(contestant, prompts[0], 1)
    for ids in prompts:
        rounds, seconds = _record(plain, ids, PLAIN_ROUNDS)
        plain_round = seconds / len(rounds)
        rounds, seconds = _record(own, ids, own.max_new_tokens)
        texts.append(rounds)
        costs.append(seconds / plain_round)
    return Observed(tuple(texts), tuple(costs))


def _record(own: OwnMethod, ids: Sequence[int], max_rounds: int) -> tuple[Rounds, float]:
    """The first rounds of a text, and their seconds without the prefill."""
    state = own.start(own.prepare([ids]))
    started = time.perf_counter()
    log, state = jax.block_until_ready(
        _recorded(
            own.params,
            state,
            max_rounds,
            target=own.target.model,
            drafter=own.drafter,
            sampling=own.sampling,
            max_new_tokens=own.max_new_tokens,
            eos=own.target.eos,
        )
    )
    seconds = time.perf_counter() - started
    found = np.asarray(log)[: int(state.stats.rounds[0])].tolist()
    return tuple(Round(*each) for each in found), seconds


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def _recorded(
    params: Params,
    state: LoopState,
    max_rounds: Int[Array, ""],
    *,
    max_new_tokens: int,
    **settings: Any,
) -> tuple[Int[Array, "M 2"], LoopState]:
    def goes_on(carry):
        _, state = carry
        return ~jnp.all(state.is_done) & (state.stats.rounds[0] < max_rounds)

    def one_more(carry):
        log, state = carry
        after = one_round(params, state, max_new_tokens=max_new_tokens, **settings)
        drafted = after.stats.drafted - state.stats.drafted
        row = jnp.stack([drafted, after.length - state.length], axis=1)
        return lax.dynamic_update_slice(log, row, (state.stats.rounds[0], 0)), after

    log = jnp.zeros((max_new_tokens, 2), jnp.int32)
    return lax.while_loop(goes_on, one_more, (log, state))


def cut(texts: Sequence[Rounds], longest: int, length: int) -> list[Round]:
    """The rounds of a chain of up to `longest` tokens, had it been cut at `length`.

    A drafter is taken to err at the same places of the text wherever a draft begins: so it is when
    it copies. Then a stretch up to the next error, be it the work of one round or of several that
    were accepted whole, is written in rounds of `length + 1` tokens and a rest.
    """
    found = []
    for text in texts:
        for drafted, committed in _stretches(text, longest):
            for start in range(0, committed, length + 1):
                here = min(committed - start, length + 1)
                found.append(Round(min(drafted, length), here))
    return found


def _stretches(text: Rounds, longest: int) -> Iterator[Round]:
    """Rounds that were accepted whole, joined with the drafts that went on from there."""
    drafted = committed = 0
    goes_on = False
    for each in text:
        if committed and not (goes_on and each.drafted):
            yield Round(drafted, committed)
            drafted = committed = 0
        drafted, committed = max(drafted, each.drafted), committed + each.committed
        goes_on = each.drafted == longest and each.committed == longest + 1
    if committed:
        yield Round(drafted, committed)
