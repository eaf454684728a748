"""Our methods as contestants of a measurement."""

from collections.abc import Sequence
from typing import Any

from specjax.bench.measure import PLAIN, Contestant, Request
from specjax.bench.options import (
    BenchOptions,
    methods_in,
    names_in,
    sampling_of,
    settings_in,
    sources_in,
)
from specjax.bench.results import Stage
from specjax.core.companions import companion
from specjax.loading.drafters import load_drafter
from specjax.loading.hub import POCKET
from specjax.loading.methods import METHODS
from specjax.loading.parts import load_draft
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import Runner


def make_contestants(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request], stage: Stage
) -> list[Contestant]:
    """Makes plain decoding, the other methods in the order they are named, then peers.

    Raises:
        SpecjaxError: for an unknown method, or one that this target cannot have.
    """
    sampling = sampling_of(options, stage.temperature)
    prompts = [request.ids for request in requests]
    named = methods_in(options.methods, target.model, target.name == POCKET)
    sources, given = sources_in(options.drafter, named), settings_in(options.set, named)
    made: list[Contestant] = []
    known: dict[Any, Any] = {}  # variants that read the same head share one copy
    for name in dict.fromkeys([PLAIN, *named, *sources, *given]):
        method = named.get(name, name)
        drafter, params = load_drafter(method, target, sources.get(name), **given.get(name, {}))
        if head := METHODS[method].head:
            source = sources.get(name, METHODS[method].part)
            params = known.setdefault((head.kind, source), params)
        settings = prompts, options.max_new_tokens, sampling, options.seed
        made.append(Runner.for_prompts(name, target, drafter, params, *settings))
    if names_in(options.peers) and stage.temperature == 0:
        has_draft = target.name == POCKET or "draft-model" in sources
        draft = load_draft(target, sources.get("draft-model")) if has_draft else None
        longest = max(map(len, prompts))
        peers = companion("peers")
        work = peers.Work(target, draft, longest, options.max_new_tokens)
        made += peers.peers(names_in(options.peers), work, stage.num_rows)
    return made
