"""Our methods as contestants of a measurement."""

from collections.abc import Sequence
from typing import Any

from specjax.bench.measure import PLAIN, Contestant, TaskPrompt
from specjax.bench.options import BenchOptions, MethodVariant, names_in, variants_for
from specjax.bench.results import Condition
from specjax.core.companions import companion
from specjax.loading.drafters import load_drafter
from specjax.loading.hub import POCKET
from specjax.loading.methods import METHODS
from specjax.loading.parts import load_draft
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import Runner


def make_contestants(
    target: LoadedTarget,
    options: BenchOptions,
    prompts: Sequence[TaskPrompt],
    condition: Condition,
) -> list[Contestant]:
    """Makes plain decoding, the other methods in the order they are named, then peers."""
    sampling = options.sampling(condition.temperature)
    ids = [prompt.ids for prompt in prompts]
    variants = {PLAIN: MethodVariant(PLAIN)}
    variants |= variants_for(options.methods, options.drafter, options.set, target)
    made: list[Contestant] = []
    heads: dict[Any, Any] = {}  # variants that read the same head share one copy
    for name, (method, source, fixed) in variants.items():
        drafter, params = load_drafter(method, target, source, **fixed)
        if head := METHODS[method].head:
            params = heads.setdefault((head.kind, source or METHODS[method].part), params)
        settings = ids, options.max_new_tokens, sampling, options.seed
        made.append(Runner.for_prompts(name, target, drafter, params, *settings))
    if names_in(options.peers) and condition.temperature == 0:
        source = variants["draft-model"].source if "draft-model" in variants else None
        has_draft = target.name == POCKET or source
        draft = load_draft(target, source) if has_draft else None
        peers = companion("peers")
        work = peers.Work(target, draft, max(map(len, ids)), options.max_new_tokens)
        made += peers.peers(names_in(options.peers), work, condition.batch_size)
    return made
