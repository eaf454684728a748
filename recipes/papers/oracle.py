"""DISCO's oracle (Mamou et al. 2024, section 3): drafts that end where the target disagrees."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from specjax import LoadedTarget, Params, SpecjaxError, load_drafter
from specjax.bench.measure import Contestant, TaskPrompt
from specjax.bench.options import BenchOptions
from specjax.bench.results import Condition
from specjax.bench.run import make_contestants
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.length_rules import LastDrafted, LengthRule, State
from specjax.run.runner import Program, Runner, Trial


@dataclass(frozen=True)
class Oracle(LengthRule):
    """Stops with the first token that the target will reject: the best that any rule can do.

    Params are the true texts `[B, S]` of plain decoding with the same key; under `coupled` (the
    default) every drafter generates the same, so they are known beforehand. Tokens beyond the end
    of a text count as wrong.
    """

    def check(self, params: Any) -> None:
        if getattr(params, "ndim", None) != 2 or not jnp.issubdtype(params.dtype, jnp.integer):
            raise SpecjaxError(
                "the length rule Oracle needs the whole true texts, token ids [batch, length]; "
                "generate them with plain decoding and the same key"
            )

    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        at = last.in_text[:, None]
        truth = jnp.take_along_axis(params, at, axis=1, mode="fill", fill_value=-1)
        return truth[:, 0] == last.token


@dataclass(frozen=True, eq=False)
class WithTruth(Runner):
    """The oracle as a contestant, which gets plain decoding's text of each prompt."""

    plain: Runner | None = None

    def prepare(self, sequences: Sequence[Sequence[int]], trial: Trial = (0, 0)) -> Any:
        assert self.plain is not None
        prompt = self.plain.prepare(sequences, trial)
        answers = self.plain.read(self.plain.decode(self.plain.prefill(prompt)))
        length = self.padded_length + self.engine.max_new_tokens
        texts = np.full((len(sequences), length), -1, np.int32)
        for text, ids, answer in zip(texts, sequences, answers, strict=True):
            text[: len(ids) + len(answer.tokens)] = [*ids, *answer.tokens]
        drafter_params = {**self.params.drafter, "rule": jnp.asarray(texts)}
        return prompt, replace(self, params=Params(self.params.target, drafter_params))

    def compile(self, prepared: Any) -> Program:
        prompt, informed = prepared
        return Runner.compile(informed, prompt)

    def prefill(self, prepared: Any) -> Any:
        prompt, informed = prepared
        return informed, Runner.prefill(informed, prompt)

    def decode(self, state: Any) -> Any:
        informed, started = state
        return Runner.decode(informed, started)


@dataclass(frozen=True)
class WithOracle:
    """Makes the contestants of a benchmark and adds a draft model's oracle."""

    name: str
    source: str | None  # of the draft; None: pocket's own
    max_length: int

    def __call__(
        self,
        target: LoadedTarget,
        options: BenchOptions,
        requests: Sequence[TaskPrompt],
        condition: Condition,
    ) -> list[Contestant]:
        contestants = make_contestants(target, options, requests, condition)
        plain = contestants[0]
        settings = {"rule": "fixed", "max_length": self.max_length}
        drafter, params = load_drafter("draft-model", target, self.source, **settings)
        assert isinstance(plain, Runner) and isinstance(drafter, DraftModel)
        engine = replace(plain.engine, drafter=replace(drafter, rule=Oracle()))
        unruled = Params(plain.params.target, {**params, "rule": None})
        oracle = WithTruth(self.name, engine, unruled, plain.padded_length, plain.seed, plain)
        return [*contestants, oracle]
