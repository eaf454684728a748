"""Builds the engine and the params that decode with a loaded target and a loaded drafter."""

from dataclasses import replace
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.decoding.automaton import Automaton, Grammar
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget


def make_engine(
    target: LoadedTarget,
    drafter: tuple[Drafter, Any],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    automaton: Automaton | None = None,
    ignore_eos: bool = False,
) -> tuple[Engine, Params]:
    """Returns an engine and its params; requests are not checked yet, and nothing is compiled.

    The drafter comes with its params, as from `specjax.load_drafter`. The automaton is that of the
    grammar that every text follows, from `specjax.load_grammar`.

    Raises:
        SpecjaxError: for a grammar together with `ignore_eos`.
    """
    processors: tuple[Any, ...] = ()
    if automaton is not None:
        if ignore_eos:
            raise SpecjaxError(
                "a grammar ends its text with EOS; leave out ignore_eos (--ignore-eos)"
            )
        processors = (*[None] * len(sampling.processors), automaton)
        sampling = replace(sampling, processors=(*sampling.processors, Grammar()))
    eos = () if ignore_eos else target.eos
    engine = Engine(target.model, drafter[0], sampling, max_new_tokens, eos)
    return engine, Params(target.params, drafter[1], processors)
