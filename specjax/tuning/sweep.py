"""One setting tried at many values, on the same prompts in turn."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specjax.bench.contestants import OwnMethod
from specjax.bench.curves import Point
from specjax.bench.measure import Request, batches_of, measure, warm_up
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.prompt import padded_length
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget

Goal = Literal["accepted-length", "speed"]


def sweep(
    drafters: Mapping[Any, Drafter],
    requests: Sequence[Request],
    target: LoadedTarget,
    max_new_tokens: int,
    params: Any = None,
) -> list[Point]:
    """One Point per value, greedy; each prompt is run once per value.

    `params` are what all the drafters read.
    """
    contestants = [
        OwnMethod(
            name=str(value),
            target=target,
            drafter=drafter,
            params=Params(target.params, params),
            sampling=Sampling(),
            max_new_tokens=max_new_tokens,
            padded_length=padded_length([request.ids for request in requests]),
        )
        for value, drafter in drafters.items()
    ]
    batches = batches_of(requests)
    warm_up(contestants, batches[0])
    samples = list(measure(contestants, batches, num_runs=1))
    points = []
    for value in drafters:
        own = [sample for sample in samples if sample.method == str(value)]
        tokens = sum(sample.num_tokens for sample in own)
        rounds = sum(sample.passes for sample in own)
        seconds = sum(sample.seconds for sample in own)
        points.append(Point(value, tokens / rounds, tokens / seconds))
    return points


def best(points: Sequence[Point], goal: Goal, close: float = 1.0) -> Any:
    """The value with the highest speed, or the first with `close` times the highest accepted
    length."""
    if goal == "speed":
        return max(points, key=lambda point: point.tokens_per_second).value
    enough = close * max(point.accepted_length for point in points)
    return next(point.value for point in points if point.accepted_length >= enough)
