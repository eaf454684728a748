"""How fast the members of a family would be, from one observed run and what passes cost.

Costs are in plain rounds. A round costs the target's pass at the width that its draft needs, and
the overhead of the method: what the observed run took beyond the passes of its own widths. The
overhead of a sequential draft grows with its tokens; any other is the same in all rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from specjax.bench.acceptance import Acceptance
from specjax.decoding.drafter import Drafter
from specjax.decoding.round import pass_widths
from specjax.models.pass_costs import RowCosts
from specjax.tuning.candidates import Family, Settings
from specjax.tuning.costs import choose_widths
from specjax.tuning.observation import Observed, Round, cut

OTHER_SIZE = 1.4  # times as many nodes


@dataclass(frozen=True)
class Candidate:
    """A method with settings, and what is expected of it."""

    method: str
    settings: Settings
    source: str | None
    num_nodes: int
    accepted_length: float  # tokens per round, bonus included
    expected: float  # accepted draft tokens per round that drafts
    row_widths: tuple[int, ...]
    costs: tuple[float, ...]  # of a round by its width; without a draft it is a plain one
    asked_cost: float  # of a round that was to draft, and did not
    speed: float  # over plain decoding

    @property
    def name(self) -> str:
        """The method and its settings in short."""
        told = ", ".join(f"{name}={_short(value)}" for name, value in self.settings.items())
        return f"{self.method} ({told})" if told else self.method


def _short(value: object) -> object:
    return f"{len(value)} paths" if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Model:
    """What the rounds of one drafter cost."""

    row_costs: RowCosts
    overhead: float  # per round, or per drafted token if the draft is sequential
    is_sequential: bool

    def round_cost(self, width: int, drafted: float) -> float:
        """Of a round that drafted so much, whose pass has `width` rows."""
        passes = drafted if self.is_sequential else 1
        return self.row_costs.at(width) + self.overhead * passes


def model_of(
    observed: Observed, row_costs: RowCosts, drafter: Drafter, is_sequential: bool
) -> Model:
    """The overhead is the median over the texts; observed passes ran at the drafter's widths."""
    widths = pass_widths(drafter, drafter.num_nodes)
    overheads = []
    for text, cost in zip(observed.texts, observed.costs, strict=True):
        fitting = [widths[int(np.searchsorted(widths, 1 + each.drafted))] for each in text]
        passes = sum(map(row_costs.at, fitting))
        work = sum(each.drafted for each in text) if is_sequential else len(text)
        if work:
            overheads.append((cost - passes) / work)
    overhead = max(0.0, median(overheads)) if overheads else 0.0
    return Model(row_costs, overhead, is_sequential)


def predict(
    family: Family, source: str | None, observed: Observed, drafter: Drafter, model: Model
) -> list[Candidate]:
    """What every member of a family would do, the smallest first."""
    found = []
    for size, settings in sorted(family.members.items()):
        if family.shape == "chain":
            if size > drafter.max_depth:
                continue  # heads predict no more
            rounds = cut(observed.texts, drafter.max_depth, size)
            accepted, num_nodes = _accepted(rounds), size + 1
        elif family.shape == "tree":
            num_nodes = min(size, drafter.num_nodes)
            rounds = [Round(min(each.drafted, num_nodes - 1), 0) for each in observed.rounds]
            share = np.log(num_nodes) / np.log(drafter.num_nodes)
            accepted = _accepted(observed.rounds) * float(share)
        else:
            rounds, num_nodes = observed.rounds, drafter.num_nodes
            accepted = _accepted(rounds)
        found.append(
            _candidate(family.method, settings, source, rounds, accepted, num_nodes, model)
        )
    return found


def _accepted(rounds: Sequence[Round]) -> float:
    """Accepted tokens per round that drafted."""
    drafting = [each.committed - 1 for each in rounds if each.drafted]
    return fmean(drafting) if drafting else 0.0


def _candidate(
    method: str,
    settings: Settings,
    source: str | None,
    rounds: Sequence[Round],
    accepted: float,
    num_nodes: int,
    model: Model,
) -> Candidate:
    wanted = [1 + each.drafted for each in rounds]
    widths = choose_widths(model.row_costs, wanted, num_nodes)
    drafts: Mapping[int, list[int]] = {width: [] for width in widths}
    for each in rounds:
        drafts[widths[int(np.searchsorted(widths, 1 + each.drafted))]].append(each.drafted)
    costs = {
        width: model.round_cost(width, fmean(drafted) if drafted else float(width - 1))
        for width, drafted in drafts.items()
    }
    mean_cost = sum(costs[width] * len(drafted) for width, drafted in drafts.items()) / len(rounds)
    drafting = sum(each.drafted > 0 for each in rounds) / len(rounds)
    length = 1 + accepted * drafting
    return Candidate(
        method=method,
        settings=settings,
        source=source,
        num_nodes=num_nodes,
        accepted_length=length,
        expected=accepted,
        row_widths=widths,
        costs=(1.0, *(costs[width] for width in widths[1:])),
        asked_cost=model.round_cost(1, 1.0),  # a sequential draft takes a pass to find that out
        speed=length / mean_cost,
    )


def optimistic_speed(chain: Observed, longest: int, depth: int, cost: float) -> float:
    """What a tree of that depth might reach with a head whose chain was observed.

    A tree knows more than one token for a place; it is granted that it halves the misses at every
    depth. Trees that are published get about that far with some tens of nodes.

    Args:
        chain: the rounds of the head's chain.
        longest: tokens that the chain drafted; of deeper places nothing is known, and none missed.
        depth: of the tree.
        cost: of its round, in plain rounds.
    """
    counts = np.bincount([each.committed for each in chain.rounds], minlength=longest + 2)
    rates = Acceptance(tuple(counts.tolist())).rates[:depth]
    better = [1 - (1 - rate) / 2 for rate in rates] + [1.0] * (depth - len(rates))
    return float(1 + np.sum(np.cumprod(better))) / cost


def finalists(candidates: Sequence[Candidate], least_speed: float, most: int) -> list[Candidate]:
    """The fastest, at most two of a method, and the second of them of another size.

    Predictions err more than neighbouring sizes differ.
    """
    chosen: list[Candidate] = []
    for each in sorted(candidates, key=lambda each: -each.speed):
        same = [other for other in chosen if other.method == each.method]
        is_other = all(_differ(each.num_nodes, other.num_nodes) for other in same)
        if each.speed >= least_speed and len(same) < 2 and is_other and len(chosen) < most:
            chosen.append(each)
    return chosen


def _differ(first: int, second: int) -> bool:
    return max(first, second) >= OTHER_SIZE * min(first, second)
