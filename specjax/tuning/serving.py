"""What all contestants of a search share: the target, the prompts, and how they are continued."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import PLAIN, Request
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget
from specjax.loading import load_drafter

FIRST_PROMPTS = 2  # of each kind, on which families are observed


@dataclass(frozen=True)
class Serving:
    """Prompts of several kinds, and the methods that can continue them.

    `sources` are the folders or hub ids that methods read, where they do not read pocket's own.
    """

    target: LoadedTarget
    requests: Sequence[Request]
    max_new_tokens: int
    sampling: Sampling = Sampling()
    sources: Mapping[str, str] = field(default_factory=dict)
    loaded: dict[Any, Any] = field(default_factory=dict)  # params that were read before

    def load(self, method: str, settings: Mapping[str, Any]) -> tuple[Drafter, Any]:
        """A drafter and its params, which all settings of a method share.

        Raises:
            SpecjaxError: see `load_drafter`.
        """
        source = self.sources.get(method)
        drafter, params = load_drafter(method, self.target, source, **settings)
        return drafter, self.loaded.setdefault((method, settings.get("rule")), params)

    def contestant(self, name: str, drafter: Drafter, params: Any) -> OwnMethod:
        """A drafter that continues these prompts."""
        return OwnMethod(
            name=name,
            target=self.target,
            drafter=drafter,
            params=Params(self.target.params, params),
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            padded_length=self.padded_length,
        )

    def plain(self) -> OwnMethod:
        """Plain decoding, which all are compared with."""
        return self.contestant(PLAIN, *self.load(PLAIN, {}))

    @property
    def padded_length(self) -> int:
        """Of all prompts."""
        return padded_length([request.ids for request in self.requests])

    @property
    def text_length(self) -> int:
        """Of a typical text, half of it written."""
        lengths = [len(request.ids) for request in self.requests]
        return int(median(lengths)) + self.max_new_tokens // 2

    def prompts(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The first prompt of each kind, and the next ones on which families are observed."""
        of_kind: dict[str, list[tuple[int, ...]]] = {}
        for request in self.requests:
            of_kind.setdefault(request.kind, []).append(request.ids)
        first = [prompts[0] for prompts in of_kind.values()]
        others = [ids for prompts in of_kind.values() for ids in prompts[1:FIRST_PROMPTS]]
        return first, others
