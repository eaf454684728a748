"""Measures how much of a sampled draft is accepted: python -m benchmarks.draft_acceptance

A draft model samples a fixed number of tokens, and the target verifies them under both ways of
lossless verification. The limit is the overlap of the two distributions, 1 - TV (Leviathan et al.
2023, section 3): `rejection` reaches it, `coupled` pays a little for reproducing plain decoding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from benchmarks.harness import TARGET, TASKS, at_least_1, main, option, requests_for, table
from specjax import Params, Prompt, Sampling, from_ids, load, load_drafter, speculative_generate
from specjax.models.target import Target, causal_rows

TEMPERATURES = (0.5, 1.0, 1.5)
HEADER = (
    *("temperature", "1 - TV", "rejection: accepted length", "rate"),
    *("coupled: accepted length", "rate"),
)


@dataclass(frozen=True)
class AcceptanceOptions:
    """The options of this benchmark."""

    target: str = option(TARGET, "pocket")
    drafter: str = option("the draft: a folder or a hub id; by default pocket's own", "")
    tasks: str = option(TASKS, "pocket")
    limit: int = option("prompts of each kind of task", 4)
    length: int = option("tokens of every draft", 5)
    max_new_tokens: int = option("new tokens per prompt; texts do not end before", 128)


def overlap(
    text: Int[Array, "1 T"], models: Sequence[tuple[Target, Any]], temperature: float
) -> Float[Array, " T"]:
    """Returns 1 - TV of the two models' distributions after every token of the text."""
    found = [
        _distribution(params, text, model=model, temperature=temperature)
        for model, params in models
    ]
    return jnp.sum(jnp.minimum(*found), axis=-1)


@partial(jax.jit, static_argnames=("model", "temperature"))
def _distribution(
    params: Any, text: Int[Array, "1 T"], *, model: Target, temperature: float
) -> Float[Array, "T V"]:
    cache = model.new_cache(params, 1, text.shape[1])
    output, _ = model.run(params, causal_rows(text, jnp.zeros(1, jnp.int32)), cache)
    assert output.logits is not None
    return jax.nn.softmax(output.logits[0] / temperature, axis=-1)


def acceptance(stats: Any, length: int) -> tuple[float, float]:
    """Returns accepted length, and the share of verified tokens that were accepted.

    Tokens after a rejected one are not verified; a round that accepts fewer than `length` rejects
    one. The last round of a text, which may be cut, counts like the others.
    """
    counts = np.sum(np.asarray(stats.accepted_lengths), axis=0)  # of rounds, by tokens committed
    accepted = counts @ np.maximum(np.arange(len(counts)) - 1, 0)
    rejected = counts[: length + 1].sum()
    return float(stats.mean_accepted_length), float(accepted / (accepted + rejected))


def run(options: AcceptanceOptions) -> None:
    """Measures and prints the table."""
    at_least_1(options, "limit", "length", "max_new_tokens")
    target = load(options.target)
    rule = {"rule": "fixed", "length": options.length, "max_length": options.length}
    drafter, params = load_drafter("draft-model", target, options.drafter or None, **rule)
    requests = requests_for(target, options.tasks, options.limit, options.max_new_tokens)
    prompt = from_ids([request.ids for request in requests])
    models = [(target.model, target.params), (drafter.draft, params["draft"])]  # pyright: ignore
    rows = []
    for temperature in TEMPERATURES:
        cells, tokens = [], None
        for verification in ("rejection", "coupled"):
            out = speculative_generate(
                Params(target.params, params),
                prompt,
                jax.random.key(0),
                target=target.model,
                drafter=drafter,
                sampling=Sampling(temperature, verification=verification),
                max_new_tokens=options.max_new_tokens,
            )
            tokens = out.tokens
            cells += [f"{value:.3f}" for value in acceptance(out.stats, options.length)]
        shared = mean_overlap(prompt, tokens, models, temperature)
        rows.append((temperature, f"{shared:.3f}", *cells))
    print(table(HEADER, rows))
    print(f"drafts of {options.length} sampled tokens, {len(requests)} prompts")


def mean_overlap(
    prompt: Prompt, tokens: Any, models: Sequence[tuple[Target, Any]], temperature: float
) -> float:
    """Averages the overlap over the new tokens of texts that the target has sampled itself."""
    shares = []
    for row, length in enumerate(np.asarray(prompt.length)):
        text = jnp.concatenate([prompt.tokens[row, :length], tokens[row]])
        missing = prompt.tokens.shape[1] - int(length)  # one shape
        found = overlap(jnp.pad(text, (0, missing))[None], models, temperature)
        shares.append(np.asarray(found)[length - 1 : length - 1 + tokens.shape[1]])
    return float(np.mean(shares))


if __name__ == "__main__":
    main(run, AcceptanceOptions, __doc__)
