"""Observes families of settings, those that may pay, and tells what their members would do."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specjax.bench.contestants import OwnMethod
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter
from specjax.models.pass_costs import RowCosts
from specjax.tuning.candidates import Family
from specjax.tuning.observation import Observed, observe
from specjax.tuning.prediction import Candidate, Model, model_of, optimistic_speed, predict
from specjax.tuning.serving import Serving

HOPELESS = 0.6  # of plain's speed, on the first prompt of each kind: no more prompts are spent
NEAR_BEST = 0.9  # of the best predicted speed: what a tree must promise, to be tried

Outcome = Sequence[Candidate] | str  # what was predicted of a family, or why nothing was


class Chain(NamedTuple):
    """What is known of a head by the chain that it drafted."""

    observed: Observed
    longest: int
    model: Model


@dataclass
class Search:
    """Takes one family after the other; what came before decides whether a tree is tried."""

    serving: Serving
    row_costs: RowCosts
    report: Callable[[Family, Outcome], None] = lambda family, outcome: None
    plain: OwnMethod = field(init=False)
    chains: dict[tuple[str, str | None], Chain] = field(default_factory=dict)  # by head
    found: list[Candidate] = field(default_factory=list)

    def __post_init__(self):
        self.plain = self.serving.plain()

    def run(self, families: Iterable[Family]) -> list[Candidate]:
        """What is expected of all members of all families that this target serves."""
        for family in families:
            try:
                drafter, params = self.serving.load(family.method, family.largest)
                outcome = self._try(family, drafter, params)
            except SpecjaxError as error:
                outcome = f"not served: {error}"
            self.report(family, outcome)
            if not isinstance(outcome, str):
                self.found += outcome
        return self.found

    def _try(self, family: Family, drafter: Drafter, params: object) -> Outcome:
        if drafter.num_probes:
            return "not tried: auto cannot leave out its probe rows where they do not pay"
        if (promise := self._promise(family, drafter)) is not None:
            best = max((each.speed for each in self.found), default=1.0)
            if promise < NEAR_BEST * max(best, 1.0):
                return f"not tried: even with half its chain's misses {promise:.2f}x"
        own = self.serving.contestant(family.method, drafter, params)
        first, others = self.serving.prompts()
        observed = observe(own, self.plain, first)
        candidates = self._predict(family, observed, drafter)
        if others and max(each.speed for each in candidates) >= HOPELESS:
            observed += observe(own, self.plain, others)
            candidates = self._predict(family, observed, drafter)
        return candidates

    def _predict(self, family: Family, observed: Observed, drafter: Drafter) -> list[Candidate]:
        model = model_of(observed, self.row_costs, drafter, family.is_sequential)
        if family.shape == "chain" and family.part:
            self.chains[self._head(family)] = Chain(observed, drafter.max_depth, model)
        source = self.serving.sources.get(family.method)
        return predict(family, source, observed, drafter, model)

    def _promise(self, family: Family, drafter: Drafter) -> float | None:
        """The speed that a tree might reach at best; None if nothing is known of its head."""
        chain = self.chains.get(self._head(family))
        if chain is None or not family.has_tree:
            return None
        least = min(family.members) or drafter.num_nodes
        nodes = max(least, drafter.max_depth + 1)
        cost = chain.model.round_cost(nodes, float(drafter.max_depth))
        return optimistic_speed(chain.observed, chain.longest, drafter.max_depth, cost)

    def _head(self, family: Family) -> tuple[str, str | None]:
        return family.part, self.serving.sources.get(family.method)
