"""The length rule that knows the target's text, to bound what any rule can gain."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.length_rules import LastDrafted, LengthRule

State = Any


@dataclass(frozen=True)
class Oracle(LengthRule):
    """Stops with the first token that the target will reject: the best that any rule can do.

    Params are the true texts `[B, S]` of plain decoding with the same key; under `coupled` (the
    default) every drafter generates the same, so they are known beforehand. Tokens beyond the end
    of a text count as wrong. For experiments, as in section 3 of DISCO (Mamou et al. 2024).
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
