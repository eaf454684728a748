"""Measures what rules for the draft length gain: python -m benchmarks.draft_lengths

Every rule runs in turn on the same prompts, as in DISCO's table 1, and the oracle, which stops at
the first token that the target would reject. The oracle's drafts show how much the best length
varies (figures 3 to 6, table 2). Equation 1 predicts the gain of a static length from the
acceptance rate and the cost of a draft pass. With --out, figures are kept for benchmarks.claims.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import TARGET, TASKS, at_least_1, device, main, option, requests_for, table
from benchmarks.oracle_file import OracleLengths, OracleResults, RuleFigures, write_oracle
from recipes.papers.figures import NUM_PARTS, drafted_lengths, improvement_factor, in_part
from recipes.papers.oracle import WithTruth
from specjax import Params, Sampling, load, load_drafter
from specjax.bench.measure import PLAIN, Sample, batches_of, measure, warm_up
from specjax.bench.summary import Measurement, last_task_rows, summarise
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import Fixed, Heuristic
from specjax.loading.targets import LoadedTarget
from specjax.run.runner import Runner
from specjax.run.tasks import Request

ORACLE = "oracle"
LONGEST = 20  # longer drafts share the last bar of the histogram


@dataclass(frozen=True)
class LengthOptions:
    """The options of this benchmark."""

    target: str = option(TARGET, "pocket")
    drafter: str = option("the draft: a folder or a hub id; by default pocket's own", "")
    classifier: str = option("DISCO's classifier, a folder; by default pocket's own", "")
    tasks: str = option(TASKS, "pocket")
    limit: int = option("prompts of each kind of task", 4)
    max_new_tokens: int = option("new tokens per prompt at most", 128)
    static_length: int = option("the best static length; by default the tuned one, or 5", 0)
    max_length: int = option("the longest draft of the rules that choose; by default as tuned", 0)
    temperature: float = option("0 is greedy; above 0, tokens are sampled", 0.0)
    runs: int = option("how often each rule runs each prompt", 3)
    out: str = option("also keep the figures in this folder", "")


def contestants_of(
    target: LoadedTarget, options: LengthOptions, requests: Sequence[Request]
) -> list[Runner]:
    """Makes plain decoding, every rule, and the oracle.

    Raises:
        SpecjaxError: for a draft or a classifier that is missing or does not fit.
    """
    longest = {"max_length": options.max_length} if options.max_length else {}
    classifier = {"classifier": options.classifier} if options.classifier else {}

    def tuned(rule: str, **settings: Any) -> tuple[Any, Any]:
        """Loads the draft with what was tuned for this rule, unless `settings` say otherwise."""
        source = options.drafter or None
        return load_drafter("draft-model", target, source, rule=rule, **settings)

    disco, params = tuned("disco", **longest, **classifier)
    best = options.static_length or tuned("fixed")[0].length
    confidence, no_rule = tuned("confidence", **longest)
    unbounded = replace(disco, **{"max_length": DraftModel.max_length, **longest})
    plain, _ = load_drafter(PLAIN, target)
    drafters: dict[str, tuple[Any, Any]] = {
        PLAIN: (plain, None),
        "heuristic": (replace(unbounded, rule=Heuristic(5)), no_rule),
        "static-5": (replace(disco, rule=Fixed(5), max_length=5), no_rule),
        "static-opt": (replace(disco, rule=Fixed(best), max_length=best), no_rule),
        "confidence": (confidence, no_rule),
        "disco": (disco, params),
    }
    prompts = [request.ids for request in requests]
    shared = prompts, options.max_new_tokens, Sampling(options.temperature)
    made = [Runner.for_prompts(name, target, *own, *shared) for name, own in drafters.items()]
    return [*made, WithTruth.of(ORACLE, made[0], unbounded, params)]


def oracle_lengths(task: str, runs: Sequence[Sequence[int]]) -> OracleLengths:
    """Sums up some texts, each given by the lengths of its rounds."""
    everything = [length for run in runs for length in run]
    parts = [list(in_part(runs, number)) for number in range(NUM_PARTS)]
    return OracleLengths(
        task,
        float(np.mean(everything)),
        float(np.std(everything)),
        [float(np.mean(part)) if part else None for part in parts],
        np.bincount(np.minimum(everything, LONGEST)).tolist(),
    )


def lengths_by_task(samples: Sequence[Sample]) -> list[OracleLengths]:
    """Sums up the oracle's drafts in its first run of every prompt, by kind of task."""
    runs: dict[str, list[list[int]]] = {}
    for sample in samples:
        if sample.method == ORACLE and sample.repeat == 0:
            of_kind = runs.setdefault(sample.batch[0].kind, [])
            of_kind += [drafted_lengths(text.from_draft) for text in sample.texts]
    return [oracle_lengths(kind, of_kind) for kind, of_kind in runs.items()]


def acceptance_rate(accepted_length: float, length: int) -> float:
    """Returns the rate at which drafts of `length` have this accepted length (bisection)."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        tokens = improvement_factor(middle, length, cost=0.0)
        low, high = (middle, high) if tokens < accepted_length else (low, middle)
    return (low + high) / 2


def draft_cost(contestants: Sequence[Runner], requests: Sequence[Request]) -> float:
    """Measures a step of the draft over one of the target, both decoding plainly."""
    plain, oracle = contestants[0], contestants[-1]
    draft = oracle.engine.drafter.draft  # pyright: ignore[reportAttributeAccessIssue]
    engine = replace(plain.engine, target=draft)
    alone = replace(plain, engine=engine, params=Params(oracle.params.drafter["draft"]))
    seconds, batches = [], batches_of(requests)
    for method in (plain, alone):
        warm_up([method], batches[0])
        samples = measure([method], batches, num_runs=1)
        passes = sum(sample.passes for sample in samples)
        seconds.append(sum(sample.decode_seconds for sample in samples) / passes)
    return seconds[1] / seconds[0]


def equation_1(rows: Sequence[Measurement], static: Mapping[str, int], cost: float) -> list[str]:
    """Compares equation 1 with the measured gains of the static lengths."""
    lines = []
    for row in last_task_rows(rows):
        if row.method in static:
            length = static[row.method]
            rate = acceptance_rate(row.mean_accepted_length, length)
            predicted = improvement_factor(rate, length, cost)
            lines.append(
                f"equation 1, {row.method} of {length}: acceptance rate {rate:.3f}, a draft pass "
                f"costs {cost:.2f} plain steps; factor {predicted:.2f}, measured {row.ratio:.2f}"
            )
    return lines


def run(options: LengthOptions) -> None:
    """Measures and prints the tables, and keeps the figures if asked to."""
    at_least_1(options, "limit", "runs", "max_new_tokens")
    target = load(options.target)
    requests = requests_for(target, options.tasks, options.limit, options.max_new_tokens)
    contestants, batches = contestants_of(target, options, requests), batches_of(requests)
    programs = warm_up(contestants, batches[0])
    samples = measure(contestants, batches, options.runs)
    measured = summarise(samples, programs, temperature=options.temperature)
    rules: dict[str, Any] = {each.name: each.engine.drafter for each in contestants}
    static = {name: rules[name].max_length for name in ("static-5", "static-opt")}
    names = "temperature", "runs", "max_new_tokens"
    about = {"target": target.name, "device": device(), "dtype": str(target.dtype)}
    about |= {name: getattr(options, name) for name in names}
    about["max_length"] = rules["disco"].max_length
    figures = [
        RuleFigures(
            *(row.task, row.method, 1e3 / row.tokens_per_second),
            *(row.ratio, row.ratio_quartiles, row.mean_accepted_length, row.identical),
        )
        for row in measured
    ]
    cost = draft_cost(contestants, requests)
    lines = equation_1(measured, static, cost)
    found = OracleResults(about, lengths_by_task(samples), figures, lines)
    if options.out:
        print(f"kept in {write_oracle(Path(options.out), found)}")
    show(found)
    print(f"medians of {options.runs} runs in turn on {device()}")


def show(found: OracleResults) -> None:
    """Prints the tables."""
    header = "task, rule", "ms/token", "x plain", "quartiles", "accepted length", "same"
    rows = [
        (
            f"{each.task}, {each.rule}",
            f"{each.ms_per_token:.3f}",
            f"{each.ratio:.2f}",
            "{:.2f}-{:.2f}".format(*each.ratio_quartiles),
            f"{each.accepted_length:.2f}",
            "yes" if each.identical else "NO",
        )
        for each in found.rules
    ]
    print(table(header, rows), end="\n\n")
    header = "oracle lengths", "mean", "std", "by tenths of the run", "rounds of 0, 1, 2, ..."
    rows = [
        (
            each.task,
            f"{each.mean:.2f}",
            f"{each.std:.2f}",
            " ".join("-" if mean is None else f"{mean:.1f}" for mean in each.course),
            " ".join(map(str, each.histogram)),
        )
        for each in found.lengths
    ]
    print(table(header, rows), *found.equation_1, sep="\n")


if __name__ == "__main__":
    main(run, LengthOptions, __doc__)
