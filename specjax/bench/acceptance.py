"""Accepted length, and the acceptance rate at every depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from specjax.decoding.drafter import Drafter
from specjax.decoding.prompt import from_ids, padded_length
from specjax.decoding.sampling import Sampling
from specjax.loading.methods import METHODS
from specjax.loading.targets import LoadedTarget
from specjax.models.sharding import DATA
from specjax.run.engines import make_engine

BATCH = 8  # prompts at a time, or on a mesh more, to spread evenly
# Even an untrained head gets a token right sometimes: random heads of pocket reach 1.00 to 1.03.
USELESS = 1.1
# In 64 rounds a drafter that is right once in four falls below it once in 1000 times.
MIN_ROUNDS = 64


@dataclass(frozen=True)
class Acceptance:
    """The outcome of all rounds together. Entry n of `counts`: rounds that committed n tokens."""

    counts: tuple[int, ...]

    @property
    def accepted_length(self) -> float:
        """Tokens per pass of the target, bonus token included."""
        return float(np.dot(self.counts, np.arange(len(self.counts))) / max(1, sum(self.counts)))

    @property
    def rates(self) -> list[float]:
        """At each depth, the share of rounds that accepted one more token (HASS, figure 5).

        Only rounds that had accepted everything above count. A round that drafted no more, or was
        cut at the end of a text, counts as rejected. The list ends at the deepest depth tried.
        """
        at_least = np.cumsum(self.counts[::-1])[::-1]  # rounds that committed n tokens or more
        return [
            float(at_least[depth + 1] / at_least[depth])
            for depth in range(1, len(self.counts) - 1)
            if at_least[depth]
        ]


def advice(accepted_length: float, rounds: int) -> str:
    """Returns a warning if almost nothing was accepted in many rounds, or ""."""
    if accepted_length >= USELESS or rounds < MIN_ROUNDS:
        return ""
    return (
        f"accepted length {accepted_length:.2f}: almost nothing that it drafted was accepted in "
        f"{rounds} rounds; check that the drafter was trained for this target, with its "
        "tokenizer and chat template, and that all weights of drafter and target were loaded"
    )


def advice_on(method: str, accepted_length: float, rounds: int) -> str:
    """Returns `advice` for a method with trained weights, or ""."""
    is_trained = method in METHODS and METHODS[method].is_trained
    return advice(accepted_length, rounds) if is_trained else ""


def acceptance(
    target: LoadedTarget,
    drafter: Drafter,
    drafter_params: object,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 128,
    seed: int = 0,
) -> Acceptance:
    """Measures the acceptance of a drafter on prompts, several at a time."""
    order = sorted(prompts, key=len)
    width = padded_length(order)
    engine, params = make_engine(target, (drafter, drafter_params), max_new_tokens, sampling)
    total = np.zeros(drafter.max_depth + 2, np.int64)
    count = 1 if target.mesh is None else target.mesh.shape[DATA]
    size = -(-BATCH // count) * count
    for first in range(0, len(order), size):
        batch = list(order[first : first + size])
        num_prompts = len(batch)
        batch += batch[-1:] * (size - num_prompts)  # every batch has the same shape
        out = engine.generate(params, from_ids(batch, width), jax.random.key(seed + first))
        total += np.asarray(out.stats.accepted_lengths)[:num_prompts].sum(axis=0)
    return Acceptance(tuple(total.tolist()))
