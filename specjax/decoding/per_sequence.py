"""Settings that differ from sequence to sequence of a batch, in one compiled program."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.decoding.processors import LogitBias
from specjax.decoding.sampling import PerSequenceSampling, Sampling, SamplingValues

# Numbers that switch a control on in the program; the sequences' own are in SamplingValues.
ON = {
    "temperature": 1.0,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 2.0,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "logit_bias": ((0, 0.0),),
    "min_new_tokens": 1,
}
FLOATS = ("temperature", "top_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
OFF = {name: getattr(Sampling(), name) for name in (*ON, "top_k")}


def per_sequence(
    samplings: Sequence[Sampling], vocab_size: int
) -> tuple[PerSequenceSampling, SamplingValues]:
    """Returns the settings of a batch, and the values for its sequences.

    Pass both: the settings are static and name the controls that any sequence switches on, the
    values are arrays, `Params(..., sampling=values)`. One program serves all values; it also
    depends on the largest `top_k`. Each sequence generates the tokens that it generates alone.
    Verification, `bad_words`, `processors` and `logprobs` are the same for all; `vocab_size` is
    the target's.
    """
    if not samplings:
        raise SpecjaxError("there are no samplings; pass one for each sequence")
    shared = [replace(sampling, **OFF) for sampling in samplings]
    for field in fields(Sampling):
        if len({getattr(sampling, field.name) for sampling in shared}) > 1:
            raise SettingError(
                field.name, "differs between the sequences of a batch; generate them separately"
            )
    if shared[0].verification != "coupled":
        raise SettingError("verification", "must be coupled if sequences have their own settings")
    top_k = [one.top_k or 0 for one in samplings]
    top_k = [k if k < vocab_size else 0 for k in top_k]
    is_on = {name: any(getattr(one, name) != OFF[name] for one in samplings) for name in ON}
    chosen = {name: value for name, value in ON.items() if is_on[name]}

    bias = np.zeros((len(samplings), vocab_size), np.float32)
    for number, one in enumerate(samplings):
        pairs = dict(one.logit_bias)
        LogitBias(tuple(pairs.items())).check(None, vocab_size, ())
        bias[number, list(pairs)] = list(pairs.values())
    log_min_p = [math.log(one.min_p) if one.min_p else -math.inf for one in samplings]
    values = {name: [getattr(one, name) for one in samplings] for name in FLOATS}
    settings: dict[str, Any] = {**vars(shared[0]), **chosen, "top_k": max(top_k) or None}
    return PerSequenceSampling(**settings), SamplingValues(
        **{name: jnp.asarray(numbers, jnp.float32) for name, numbers in values.items()},
        top_k=jnp.asarray(top_k, jnp.int32),
        log_min_p=jnp.asarray(log_min_p, jnp.float32),
        min_new_tokens=jnp.asarray([one.min_new_tokens for one in samplings], jnp.int32),
        logit_bias=jnp.asarray(bias) if is_on["logit_bias"] else None,
    )
