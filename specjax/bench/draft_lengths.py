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
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from specjax.bench.measure import PLAIN, Measurement, Request, measure, summarise, warm_up
from specjax.bench.run import OwnMethod
from specjax.bench.tasks import read_tasks, token_ids
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import Confidence, Fixed, Heuristic, Oracle
from specjax.decoding.generate import stream
from specjax.decoding.prompt import BUCKET
from specjax.decoding.sampling import Sampling
from specjax.drafting import load_drafter
from specjax.errors import SpecjaxError, exit_code
from specjax.hub import Target, load

ORACLE = "oracle"
NUM_BARS = 10  # parts of a run, in which the oracle's lengths are told apart
MOST_SHOWN = 20  # longer drafts share the last bar of the histogram


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


@dataclass(frozen=True, eq=False)
class WithTruth(OwnMethod):
    """The oracle, which is told what plain decoding says to each prompt."""

    plain: OwnMethod | None = None

    def prepare(self, ids: Sequence[int]) -> Any:
        """The prompt, and the whole text in the place of the rule's params."""
        assert self.plain is not None
        request = self.plain.prepare(ids)
        answer = self.plain.read(self.plain.run(request)).tokens
        text = np.full((1, self.padded_length + self.max_new_tokens), -1, np.int32)
        text[0, : len(ids) + len(answer)] = [*ids, *answer]
        return *request, {**self.params.drafter, "rule": jnp.asarray(text)}

    def run(self, request: Any) -> Any:
        """The new text, finished."""
        *asked, params = request
        return OwnMethod.run(self._told(params), tuple(asked))

    def lengths(self, request: Any) -> list[int]:
        """How many tokens it drafted in each round that the target accepted, in order."""
        *asked, params = request
        told, total, lengths = self._told(params), 0, []
        for part in stream(
            told.params,
            *asked,
            target=told.target.model,
            drafter=told.drafter,
            sampling=told.sampling,
            max_new_tokens=told.max_new_tokens,
            eos=told.target.eos,
            rounds_per_call=1,
        ):
            drafted = int(part.from_draft.sum())
            lengths.append(drafted - total)
            total = drafted
        return lengths

    def _told(self, params: Any) -> "WithTruth":
        return replace(self, params=Params(self.target.params, params))


def improvement_factor(acceptance_rate: float, length: int, cost: float) -> float:
    """Equation 1: the gain of a static length; `cost` is that of a draft pass over a target's."""
    if acceptance_rate == 1:
        return (length + 1) / (length * cost + 1)
    tokens = (1 - acceptance_rate ** (length + 1)) / (1 - acceptance_rate)
    return tokens / (length * cost + 1)


def contestants_of(target: Target, options: Options, longest: int) -> list[OwnMethod]:
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
        "padded_length": -(-longest // BUCKET) * BUCKET,
        "seed": 0,
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


def oracle_table(oracle: WithTruth, requests: Sequence[Request]) -> Table:
    """Mean, deviation and course of the oracle's lengths, and their histogram, by kind of task."""
    table = Table("oracle lengths", "mean", "std", "by tenths of the run", "0, 1, 2, ...", box=None)
    for kind, group in groupby(requests, key=lambda request: request.kind):
        runs = [oracle.lengths(oracle.prepare(request.ids)) for request in group]
        flat = np.array([length for run in runs for length in run])
        bars: list[list[int]] = [[] for _ in range(NUM_BARS)]
        for run in runs:
            for number, length in enumerate(run):
                bars[number * NUM_BARS // len(run)].append(length)
        course = " ".join(f"{np.mean(bar):.1f}" if bar else "-" for bar in bars)
        counts = np.bincount(np.minimum(flat, MOST_SHOWN))
        histogram = " ".join(map(str, counts.tolist()))
        table.add_row(kind, f"{flat.mean():.2f}", f"{flat.std():.2f}", course, histogram)
    return table


def rule_table(rows: Sequence[Measurement]) -> Table:
    """Milliseconds per token and accepted length of every rule."""
    titles = "ms/token", "x plain", "quartiles", "accepted", "same"
    table = Table("task, rule", *titles, box=None)
    for row in rows:
        low, high = row.ratio_quartiles
        table.add_row(
            f"{row.task}, {row.method}",
            f"{1e3 / row.tokens_per_second:.3f}",
            f"{row.ratio:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row.mean_accepted_length:.2f}",
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
    contestants = contestants_of(target, options, max(len(request.ids) for request in requests))
    compiling = warm_up(contestants, requests[0].ids)
    rows, samples = [], []
    for kind, group in groupby(requests, key=lambda request: request.kind):
        fresh = list(measure(contestants, list(group), options.runs))
        rows += summarise(kind, fresh, compiling)
        num_before = len(samples)  # numbers of prompts differ between kinds
        samples += [sample._replace(number=sample.number + num_before) for sample in fresh]
    rows += summarise("all", samples, compiling)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(rule_table(rows))
    oracle = contestants[-1]
    assert isinstance(oracle, WithTruth)
    console.print(oracle_table(oracle, requests))
    _show_equation_1(rows, options.static_length, draft_cost(contestants[0], oracle, requests))
    print(f"medians of {options.runs} runs in turn on {jax.devices()[0].device_kind}")


def draft_cost(plain: OwnMethod, oracle: OwnMethod, requests: Sequence[Request]) -> float:
    """A step of the draft over one of the target, each decoding plainly; prefill counts in both."""
    drafter = oracle.drafter
    assert isinstance(drafter, DraftModel)
    weights = oracle.params.drafter["draft"]
    alone = replace(
        plain,
        target=replace(plain.target, model=drafter.draft, params=weights),
        params=Params(weights),
    )
    seconds = []
    for method in (plain, alone):
        warm_up([method], requests[0].ids)
        samples = list(measure([method], requests, num_runs=1))
        rounds = sum(sample.answer.rounds for sample in samples)
        seconds.append(sum(sample.seconds for sample in samples) / rounds)
    return seconds[1] / seconds[0]


def _show_equation_1(rows: Sequence[Measurement], static_length: int, cost: float) -> None:
    """What equation 1 says of the static lengths, with the rate that their drafts show."""
    everything = {row.method: row for row in rows if row.task == "all"}
    for name, length in (("static-5", 5), ("static-opt", static_length)):
        row = everything[name]
        rate = _acceptance_rate(row.mean_accepted_length, length)
        predicted = improvement_factor(rate, length, cost)
        print(
            f"equation 1, {name} of {length}: acceptance rate {rate:.3f}, a draft pass costs "
            f"{cost:.2f} plain steps; factor {predicted:.2f}, measured {row.ratio:.2f}"
        )


def _acceptance_rate(accepted_length: float, length: int) -> float:
    """The rate at which drafts of `length` would give this accepted length (bisection)."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        tokens = improvement_factor(middle, length, cost=0.0)
        low, high = (middle, high) if tokens < accepted_length else (low, middle)
    return (low + high) / 2


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
