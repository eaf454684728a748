"""Rules that decide, after each drafted token, whether a draft model drafts another.

A rule never drops the token that was just drawn. Under `rejection`, dropping a token because of its
value would bias the text: the validity of a node must not depend on its own token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.core.settings import Checked, check_at_most, setting
from specjax.models.heads.length_classifier import LengthClassifier, PositionKind, features_of
from specjax.models.shapes import shape_mismatches

State = Any  # a pytree that the rule defines


class LastDrafted(NamedTuple):
    """The token that was drawn last in each sequence."""

    # Softmax of the draft's logits, without temperature and filters, so that a threshold means the
    # same at every temperature.
    probs: Float[Array, "B V"]
    token: Int[Array, " B"]  # as an index of `probs`
    # Its index, from 0:
    in_draft: Int[Array, ""]
    in_new_text: Int[Array, " B"]
    in_text: Int[Array, " B"]  # prompt included


@dataclass(frozen=True)
class LengthRule(Checked, ABC):
    """The contract, with the defaults of a rule that has no params and no state."""

    def longest(self, max_length: int) -> int:
        """Returns the maximum number of tokens that it drafts, at most `max_length`."""
        return max_length

    def check(self, params: Any) -> None:
        """Raises SpecjaxError if these params are not the rule's."""
        if params is not None:
            raise SpecjaxError(
                f"the length rule {type(self).__name__} has no params but was given some; pass "
                "None as those of the rule"
            )

    def init(self, batch: int) -> State:
        """Returns the state before the first round."""
        return None

    @abstractmethod
    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        """Returns whether to draft a token after `last`; ignored in stopped sequences."""

    def update(
        self, state: State, drafted: Int[Array, " B"], accepted: Int[Array, " B"], longest: int
    ) -> State:
        """Returns the state after a round; a sequence that is done drafted 0."""
        return state


@dataclass(frozen=True)
class Fixed(LengthRule):
    """Always `length` tokens, as in Leviathan et al. 2023 and Chen et al. 2023."""

    length: int = setting(5, at_least=1)

    def longest(self, max_length: int) -> int:
        check_at_most("length", self.length, "max_length", max_length)
        return self.length

    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        return jnp.full(last.token.shape, last.in_draft + 1 < self.length)


@dataclass(frozen=True)
class Heuristic(LengthRule):
    """Drafts two tokens more after a fully accepted draft, one less after any other; at least 1.

    The schedule of that name in transformers, where the length may grow beyond the longest draft;
    here it is capped. Each sequence has a length, which restarts with each request (transformers
    keeps it for the next one).
    """

    start: int = setting(5, at_least=1)

    def longest(self, max_length: int) -> int:
        check_at_most("start", self.start, "max_length", max_length)
        return max_length

    def init(self, batch: int) -> Int[Array, " B"]:
        return jnp.full((batch,), self.start)

    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        return last.in_draft + 1 < state

    def update(
        self, state: State, drafted: Int[Array, " B"], accepted: Int[Array, " B"], longest: int
    ) -> Int[Array, " B"]:
        changed = jnp.clip(jnp.where(accepted == drafted, state + 2, state - 1), 1, longest)
        return jnp.where(drafted > 0, changed, state)


@dataclass(frozen=True)
class ThresholdRule(LengthRule):
    """Stops after a token whose score is below `threshold`; it is still verified."""

    threshold: float = setting(0.5, above=0, below=1)

    @abstractmethod
    def score(self, params: Any, last: LastDrafted) -> Float[Array, " B"]:
        """Returns the probability that `last` will be accepted."""

    def draft_another(self, params: Any, state: State, last: LastDrafted) -> Bool[Array, " B"]:
        return self.score(params, last) >= self.threshold


@dataclass(frozen=True)
class Confidence(ThresholdRule):
    """Stops after a token whose draft probability is below `threshold`; it is still verified.

    Like `assistant_confidence_threshold` in transformers, except that transformers takes the
    probability after temperature and filters, so a threshold depends on the temperature there.
    """

    threshold: float = 0.4

    def score(self, params: Any, last: LastDrafted) -> Float[Array, " B"]:
        return jnp.take_along_axis(last.probs, last.token[:, None], axis=1)[:, 0]


@dataclass(frozen=True)
class Disco(ThresholdRule):
    """Stops when a classifier expects the last token to be rejected; it is still verified.

    DISCO (Mamou et al. 2024, "Accelerating Speculative Decoding using Dynamic Speculation Length").
    Params are the weights of a `LengthClassifier`; `threshold` and `position` belong to them: the
    place within the draft (the paper's equation) or within the new text (its appendix). The paper
    leaves open whether the doubtful token is still verified; here it is, since its draft pass is
    already paid for.
    """

    position: PositionKind = "draft"

    def check(self, params: Any) -> None:
        advice = "pass those of specjax.models.io.classifier.load_classifier(folder)"
        try:
            network = _network(params)
        except (TypeError, KeyError, AttributeError, ValueError):
            raise SpecjaxError(
                f"the length rule Disco needs the weights of a classifier; {advice}"
            ) from None
        if wrong := shape_mismatches(params, network):
            raise SpecjaxError(f"these are not the weights of a classifier ({wrong}); {advice}")

    def score(self, params: Any, last: LastDrafted) -> Float[Array, " B"]:
        in_draft = jnp.full_like(last.in_new_text, last.in_draft)
        place = in_draft if self.position == "draft" else last.in_new_text
        logit = _network(params).run(params, features_of(last.probs, place))
        return jax.nn.sigmoid(logit)


def _network(params: Any) -> LengthClassifier:
    (hidden_size,) = params["hidden"]["bias"].shape
    return LengthClassifier(hidden_size)
