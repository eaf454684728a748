"""`specjax bench claims`: measures on pocket what the claims speak of, and reports them.

All contestants of a temperature run in turn on the same prompts; above temperature 0 once. The
prompts are pocket's edits, with twice as many pieces of code to be continued freely.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.bench import draft_lengths
from specjax.bench.claims import drafts as names
from specjax.bench.claims.findings import Line, Measured, PerPrompt, find
from specjax.bench.claims.options import ClaimsOptions
from specjax.bench.claims.report import show, write
from specjax.bench.claims.table import CLAIMS, EAGLE2_BLIND, HASS_BLIND
from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import PLAIN, Program, Request, Sample, batches_of, measure, warm_up
from specjax.bench.progress import watched
from specjax.bench.report import complaints
from specjax.bench.requests import check_prompts
from specjax.bench.rounds import Trace, trace
from specjax.bench.summary import Measurement, summarise
from specjax.bench.tasks import COMPLETE, POCKET, Task, read_tasks, token_ids
from specjax.bench.ties import NearTies
from specjax.core.errors import SpecjaxError
from specjax.core.files import writable_folder
from specjax.core.provenance import revision, versions
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlusAttention
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget, load, pocket_folder
from specjax.loading import load_draft, load_drafter
from specjax.methods import METHODS
from specjax.models.config import TransformerConfig
from specjax.models.fingerprint import fingerprint
from specjax.models.heads.length_classifier import load_classifier
from specjax.training.draft_features import read_drafts
from specjax.training.draft_reading import FrozenModel, Text

SAMPLED = 1.0
DRAFT_MODEL = "draft-model"  # its contestants are those of `draft_lengths`
RULES = {  # contestant: its name there
    names.STATIC: "static-opt",
    names.STATIC_5: "static-5",
    names.HEURISTIC: "heuristic",
    names.DISCO: "disco",
    names.ORACLE: draft_lengths.ORACLE,
}
RULES_SAMPLED = (names.DISCO,)
TRACED = ("pld-plus", "medusa", "parallel-medusa", "eagle", "parallel-eagle")


class Setting(NamedTuple):
    """A method with settings other than its defaults and tuned ones."""

    method: str
    settings: dict[str, Any]


def settings_of(config: TransformerConfig) -> dict[str, Setting]:
    """The contestants at temperature 0 that are variants of a method."""
    every_head = tuple(
        (layer, head)
        for layer in range(config.num_hidden_layers)
        for head in range(config.num_attention_heads)
    )
    plus, attention = "pld-plus", "pld-plus-attention"
    return {
        names.PLD_SHORT: Setting("pld", {"num_tokens": 10, "allow_shorter": True}),
        names.PLD_LONG: Setting("pld", {"num_tokens": 70, "allow_shorter": True}),
        names.PLUS_SHORT: Setting(plus, {"num_tokens": 10}),
        names.PLUS_LONG: Setting(plus, {"num_tokens": 100}),
        names.PLUS_MEANS: Setting(plus, {"prefix_length": 4}),
        names.PLUS_STRICT: Setting(plus, {"min_similarity": 0.75}),
        names.ALL_HEADS: Setting(attention, {"heads": every_head}),
        names.ONE_LAYER: Setting(attention, {"heads": PromptLookupPlusAttention.heads_for(config)}),
    }


BLIND = {
    EAGLE2_BLIND: Setting("eagle2", {"noise_share": 0.0}),
    HASS_BLIND: Setting("hass", {"noise_share": 0.0}),
}


def run_claims(options: ClaimsOptions) -> list[Line]:
    """Measures, prints the claims, and returns them.

    Raises:
        SpecjaxError: for options by which nothing would be measured, or a folder that cannot be
            written; before anything is measured.
    """
    for name in ("limit", "runs", "max_new_tokens"):
        value = getattr(options, name)
        if value < 1:
            flag = name.replace("_", "-")
            raise SpecjaxError(f"--{flag} {value} must be at least 1: nothing would be measured")
    folder = None if options.out is None else writable_folder(options.out)
    started = time.perf_counter()
    target = load(POCKET)
    requests = requests_of(target, options)
    measured = measure_all(target, requests, options)
    lines = find(CLAIMS, measured)
    rows = [row for temperature in measured.rows.values() for row in temperature]
    about = _about(target, requests, options) | {"minutes": (time.perf_counter() - started) / 60}
    alarms = complaints(rows)
    show(lines, about, alarms)
    if folder is not None:
        write(folder, lines, about, alarms, [asdict(row) for row in rows])
    return lines


def requests_of(target: LoadedTarget, options: ClaimsOptions) -> list[Request]:
    """The prompts, kind by kind.

    Raises:
        SpecjaxError: for texts that would be longer than pocket can be.
    """
    tokenizer = target.require_tokenizer()
    tasks = list(read_tasks(POCKET, options.limit, options.seed))
    more = read_tasks(POCKET, 2 * options.limit, options.seed)
    chosen: list[Task] = [task for task in tasks if task.kind != COMPLETE]
    chosen += [task for task in more if task.kind == COMPLETE]
    requests = [Request(task.kind, token_ids(task, tokenizer)) for task in chosen]
    ids = [request.ids for request in requests]
    check_prompts(POCKET, ids, target.config, options.max_new_tokens)
    return requests


def measure_all(
    target: LoadedTarget, requests: Sequence[Request], options: ClaimsOptions
) -> Measured:
    """All that the claims read."""
    contestants = contestants_of(target, requests, 0.0, options, names_at(0.0, target.config))
    greedy, rows = _stage(target, contestants, requests, 0.0, options.runs, options)
    traces = _traces([contestants[name] for name in TRACED], requests)
    foretold = foretold_by_prompt(target, greedy[PLAIN])
    wanted = names_at(SAMPLED, target.config)
    contestants = contestants_of(target, requests, SAMPLED, options, wanted)
    sampled, sampled_rows = _stage(target, contestants, requests, SAMPLED, 1, options)
    return Measured(
        samples={0.0: greedy, SAMPLED: sampled},
        rows={0.0: rows, SAMPLED: sampled_rows},
        traces=traces,
        foretold=foretold,
        seed=options.seed,
    )


def names_at(temperature: float, config: TransformerConfig) -> list[str]:
    """The contestants at a temperature, plain decoding first."""
    methods = [method for method in METHODS if method != DRAFT_MODEL]
    if temperature == 0:
        return [*methods, *RULES, *settings_of(config)]
    return [*methods, *RULES_SAMPLED, *BLIND]


def contestants_of(
    target: LoadedTarget,
    requests: Sequence[Request],
    temperature: float,
    options: ClaimsOptions,
    wanted: Sequence[str],
) -> dict[str, OwnMethod]:
    """The contestants of these names, of `names_at`.

    Raises:
        SpecjaxError: if a part of pocket is missing or damaged.
    """
    asked = draft_lengths.Options(temperature=temperature, max_new_tokens=options.max_new_tokens)
    rules = {each.name: each for each in draft_lengths.contestants_of(target, asked, requests)}
    variants = {**settings_of(target.config), **BLIND}
    common: dict[str, Any] = {
        "target": target,
        "sampling": Sampling(temperature),
        "max_new_tokens": options.max_new_tokens,
        "padded_length": padded_length([request.ids for request in requests]),
        "seed": options.seed,
    }
    made = {}
    for name in wanted:
        if name in RULES:
            made[name] = replace(rules[RULES[name]], name=name, seed=options.seed)
            continue
        method, settings = variants.get(name, Setting(name, {}))
        drafter, params = load_drafter(method, target, **settings)
        params = Params(target.params, params)
        made[name] = OwnMethod(name=name, drafter=drafter, params=params, **common)
    return made


def _stage(
    target: LoadedTarget,
    contestants: dict[str, OwnMethod],
    requests: Sequence[Request],
    temperature: float,
    num_runs: int,
    options: ClaimsOptions,
) -> tuple[dict[str, list[Sample]], list[Measurement]]:
    own, batches = list(contestants.values()), batches_of(requests)
    programs: dict[str, Program] = {}
    title = f"T={temperature:g}"
    for each in watched(own, f"{title}: compiling", len(own)):
        programs |= warm_up([each], batches[0])
    runs = measure(own, batches, num_runs)
    count = len(own) * len(batches) * num_runs
    found = list(watched(runs, f"{title}: measuring", count))
    jax.clear_caches()  # a process may hold only so many compiled programs
    judge = NearTies(target, Sampling(temperature), options.seed, options.max_new_tokens)
    rows = summarise(found, programs, judge, temperature)
    by_name = {name: [each for each in found if each.method == name] for name in contestants}
    return by_name, rows


def _traces(contestants: Sequence[OwnMethod], requests: Sequence[Request]) -> dict[str, Trace]:
    """Rounds of some methods on the first and the last prompt."""
    prompts = [requests[0].ids, requests[-1].ids]
    found = {each.name: each for each in trace(contestants, prompts)}
    jax.clear_caches()
    return found


def foretold_by_prompt(target: LoadedTarget, plain: Sequence[Sample]) -> PerPrompt:
    """What the draft, pocket's classifier and its static length make of the texts: `Measured`."""
    draft = load_draft(target)
    trained = load_classifier(pocket_folder().parent / "classifier")
    frozen, reading = (
        FrozenModel(each.model, each.params, fingerprint(each.config, each.params))
        for each in (target, draft)
    )
    once = [each for each in plain if each.repeat == 0]
    texts = [Text(each.batch[0].ids, each.texts[0].tokens) for each in once]
    data = read_drafts(texts, frozen, reading, trained.position)
    logits = trained.model.run(trained.params, jnp.asarray(data.features))
    by_classifier = np.asarray(jax.nn.sigmoid(logits)) >= trained.threshold
    length = trained.scores["static_length"]
    by_length = np.ones_like(by_classifier) if length is None else data.depth < length
    columns = [data.is_match]
    for foretold in (by_classifier, by_length):
        columns += [foretold, foretold & data.is_match]
    counts = [
        [column[data.prompt == number].sum() for column in columns]
        for number in np.unique(data.prompt)
    ]
    return np.array(counts, float)


def _about(
    target: LoadedTarget, requests: Sequence[Request], options: ClaimsOptions
) -> dict[str, Any]:
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.config, target.params),
        "dtype": str(target.dtype),
        "device": jax.devices()[0].device_kind,
        "prompts": len(requests),
        "limit": options.limit,
        "runs": options.runs,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "versions": versions(),
        "revision": revision(),
        "command": shlex.join(["specjax", *sys.argv[1:]]),
    }
