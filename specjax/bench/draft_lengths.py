"""What rules for the draft length are worth: `python -m specjax.bench.draft_lengths`.

Measures every rule in turn on the same prompts, as DISCO's Table 1 does, and the oracle, which
stops with the first token that the target will not say. The oracle's own drafts tell how much the
best length varies (Figures 3 to 6, Table 2). Equation 1 predicts what a static length gains, from
the acceptance rate and the cost of a draft pass; it stands beside what was measured.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from specjax.bench.contestants import OwnMethod, Prepared
from specjax.bench.measure import PLAIN, Program, Request, Sample, batches_of, measure, warm_up
from specjax.bench.oracle import (
    OracleLengths,
    OracleResults,
    RuleFigures,
    acceptance_rate,
    drafted_lengths,
    improvement_factor,
    oracle_lengths,
    rule_figures,
    write_oracle,
)
from specjax.bench.summary import Measurement, summarise
from specjax.bench.tasks import read_tasks, token_ids
from specjax.core.errors import SpecjaxError, exit_code
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import Confidence, Fixed, Heuristic, Oracle
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, LoopState
from specjax.hub import LoadedTarget, load
from specjax.loading import load_drafter

ORACLE = "oracle"


@dataclass(frozen=True)
class Options:
    """What is a rule for the draft length worth?"""

    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """The draft: a folder or a hub id; by default pocket's own."""
    classifier: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """DISCO's classifier; by default pocket's own."""
    tasks: str = "pocket"
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    static_length: int = 3
    """The best static length, as `specjax tune length --rule fixed` found it."""
    max_length: int = 20
    """The longest draft of the rules that choose."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    runs: int = 3
    """How often each rule runs each prompt."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Also keep the figures in this folder, for `specjax report`."""


@dataclass(frozen=True, eq=False)
class WithTruth(OwnMethod):
    """The oracle, which is told what plain decoding says to each prompt."""

    plain: OwnMethod | None = None

    def prepare(self, rows: Sequence[Sequence[int]]) -> tuple[Prepared, Any]:
        """The prompts, and params with the whole texts in the place of the rule's."""
        assert self.plain is not None
        asked = self.plain.prepare(rows)
        said = self.plain.read(self.plain.finish(self.plain.start(asked)))
        texts = np.full((len(rows), self.padded_length + self.max_new_tokens), -1, np.int32)
        for text, ids, answer in zip(texts, rows, said, strict=True):
            text[: len(ids) + len(answer.tokens)] = [*ids, *answer.tokens]
        return asked, {**self.params.drafter, "rule": jnp.asarray(texts)}

    def compile(self, prepared: tuple[Prepared, Any]) -> Program:
        """Compiles prefill and rounds."""
        asked, params = prepared
        return OwnMethod.compile(self._told(params), asked)

    def start(self, prepared: tuple[Prepared, Any]) -> tuple[LoopState, Any]:
        """The state before the first round, and the params for those to come."""
        asked, params = prepared
        return OwnMethod.start(self._told(params), asked), params

    def finish(self, state: tuple[LoopState, Any]) -> Generation:
        """The new texts, finished."""
        before, params = state
        return OwnMethod.finish(self._told(params), before)

    def _told(self, params: Any) -> "WithTruth":
        return replace(self, params=Params(self.target.params, params))


def contestants_of(
    target: LoadedTarget, options: Options, requests: Sequence[Request]
) -> list[OwnMethod]:
    """Plain decoding, every rule, and the oracle.

    Raises:
        SpecjaxError: for a draft or a classifier that is missing or does not fit.
    """
    settings: dict[str, Any] = {"rule": "disco", "max_length": options.max_length}
    if options.classifier is not None:
        settings["classifier"] = str(options.classifier)
    disco, params = load_drafter("draft-model", target, options.drafter, **settings)
    assert isinstance(disco, DraftModel)
    plain, _ = load_drafter(PLAIN, target)
    no_rule = {**params, "rule": None}
    drafters = {
        PLAIN: (plain, None),
        "heuristic": (replace(disco, rule=Heuristic(5)), no_rule),
        "static-5": (replace(disco, rule=Fixed(5), max_length=5), no_rule),
        "static-opt": (
            replace(disco, rule=Fixed(options.static_length), max_length=options.static_length),
            no_rule,
        ),
        "confidence": (replace(disco, rule=Confidence()), no_rule),
        "disco": (disco, params),
    }
    common: dict[str, Any] = {
        "target": target,
        "sampling": Sampling(options.temperature),
        "max_new_tokens": options.max_new_tokens,
        "padded_length": padded_length([request.ids for request in requests]),
    }
    made = [
        OwnMethod(name=name, drafter=drafter, params=Params(target.params, own), **common)
        for name, (drafter, own) in drafters.items()
    ]
    oracle = replace(disco, rule=Oracle())
    told = WithTruth(
        name=ORACLE, drafter=oracle, params=Params(target.params, no_rule), plain=made[0], **common
    )
    return [*made, told]


def lengths_by_task(samples: Sequence[Sample]) -> list[OracleLengths]:
    """What the oracle drafted in its first run of every prompt, by kind of task."""
    runs: dict[str, list[list[int]]] = {}
    for sample in samples:
        if sample.method == ORACLE and sample.repeat == 0:
            of_kind = runs.setdefault(sample.batch[0].kind, [])
            of_kind += [drafted_lengths(text.from_draft) for text in sample.texts]
    return [oracle_lengths(kind, of_kind) for kind, of_kind in runs.items()]


def oracle_table(lengths: Sequence[OracleLengths]) -> Table:
    """Mean, deviation and course of the oracle's lengths, and their histogram, by kind of task."""
    table = Table("oracle lengths", "mean", "std", "by tenths of the run", "0, 1, 2, ...", box=None)
    for each in lengths:
        course = " ".join("-" if mean is None else f"{mean:.1f}" for mean in each.course)
        histogram = " ".join(map(str, each.histogram))
        table.add_row(each.task, f"{each.mean:.2f}", f"{each.std:.2f}", course, histogram)
    return table


def rule_table(rows: Sequence[RuleFigures]) -> Table:
    """Milliseconds per token and accepted length of every rule."""
    titles = "ms/token", "x plain", "quartiles", "accepted", "same"
    table = Table("task, rule", *titles, box=None)
    for row in rows:
        low, high = row.ratio_quartiles
        table.add_row(
            f"{row.task}, {row.rule}",
            f"{row.ms_per_token:.3f}",
            f"{row.ratio:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row.accepted_length:.2f}",
            "yes" if row.identical else "NO",
        )
    return table


def _run(options: Options) -> None:
    if min(options.limit, options.runs, options.static_length, options.max_new_tokens) < 1:
        raise SpecjaxError("limit, runs, static_length and max_new_tokens must be at least 1")
    target = load(options.target)
    tokenizer = target.require_tokenizer()
    tasks = read_tasks(options.tasks, options.limit)
    requests = [Request(task.kind, token_ids(task, tokenizer)) for task in tasks]
    contestants, batches = contestants_of(target, options, requests), batches_of(requests)
    programs = warm_up(contestants, batches[0])
    samples = list(measure(contestants, batches, options.runs))
    rows = summarise(samples, programs, temperature=options.temperature)
    plain, oracle = contestants[0], contestants[-1]
    cost = draft_cost(plain, oracle, requests)
    about = {
        "target": target.name,
        "device": jax.devices()[0].device_kind,
        "dtype": plain.dtype,
        "temperature": options.temperature,
        "runs": options.runs,
        "max_new_tokens": options.max_new_tokens,
        "max_length": options.max_length,
    }
    lengths, rules = lengths_by_task(samples), list(map(rule_figures, rows))
    found = OracleResults(about, lengths, rules, _equation_1(rows, options.static_length, cost))
    if options.out is not None:
        write_oracle(options.out, found)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(rule_table(found.rules))
    console.print(oracle_table(found.lengths))
    for line in found.equation_1:
        print(line)
    print(f"medians of {options.runs} runs in turn on {about['device']}")


def draft_cost(plain: OwnMethod, oracle: OwnMethod, requests: Sequence[Request]) -> float:
    """A step of the draft over one of the target, each decoding plainly; prefill does not count."""
    drafter = oracle.drafter
    assert isinstance(drafter, DraftModel)
    weights = oracle.params.drafter["draft"]
    alone = replace(
        plain,
        target=replace(plain.target, model=drafter.draft, params=weights),
        params=Params(weights),
    )
    seconds, batches = [], batches_of(requests)
    for method in (plain, alone):
        warm_up([method], batches[0])
        samples = list(measure([method], batches, num_runs=1))
        passes = sum(sample.passes for sample in samples)
        seconds.append(sum(sample.decode_seconds for sample in samples) / passes)
    return seconds[1] / seconds[0]


def _equation_1(rows: Sequence[Measurement], static_length: int, cost: float) -> list[str]:
    """What equation 1 says of the static lengths, with the rate that their drafts show."""
    last_task = rows[-1].task  # all kinds, or the only one
    overall = {row.method: row for row in rows if row.task == last_task}
    lines = []
    for name, length in (("static-5", 5), ("static-opt", static_length)):
        row = overall[name]
        rate = acceptance_rate(row.mean_accepted_length, length)
        predicted = improvement_factor(rate, length, cost)
        lines.append(
            f"equation 1, {name} of {length}: acceptance rate {rate:.3f}, a draft pass costs "
            f"{cost:.2f} plain steps; factor {predicted:.2f}, measured {row.ratio:.2f}"
        )
    return lines


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
