"""How much of a drawn draft is accepted: `python -m specjax.bench.draft_acceptance`.

A draft model draws a static number of tokens, and the target judges them under both ways of
verification. What no rule can exceed is the overlap of the two distributions, 1 - TV (Leviathan et
al. 2023, section 3): `rejection` reaches it, `coupled` pays a little for saying what plain decoding
says.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from specjax.bench.tasks import read_tasks, token_ids
from specjax.core.errors import SpecjaxError, exit_code
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import Prompt, from_ids
from specjax.decoding.sampling import Sampling
from specjax.hub import load
from specjax.loading import load_drafter
from specjax.models.target import causal_rows
from specjax.models.transformer import Transformer

TEMPERATURES = (0.5, 1.0, 1.5)


@dataclass(frozen=True)
class Options:
    """How much of a drawn draft is accepted?"""

    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """The draft: a folder or a hub id; by default pocket's own."""
    tasks: str = "pocket"
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 4
    """Prompts of each kind of task."""
    length: int = 5
    """Tokens of every draft."""
    max_new_tokens: int = 128
    """New tokens per prompt; texts do not end before."""


def overlap(
    text: Int[Array, "1 T"],
    models: Sequence[tuple[Transformer, Any]],
    temperature: float,
) -> Float[Array, " T"]:
    """1 - TV of the two models' distributions after every token of the text."""
    laws = [_law(params, text, model=model, temperature=temperature) for model, params in models]
    return jnp.sum(jnp.minimum(*laws), axis=-1)


@partial(jax.jit, static_argnames=("model", "temperature"))
def _law(
    params: Any, text: Int[Array, "1 T"], *, model: Transformer, temperature: float
) -> Float[Array, "T V"]:
    cache = model.new_cache(params, 1, text.shape[1])
    output, _ = model.run(params, causal_rows(text, jnp.zeros(1, jnp.int32)), cache)
    assert output.logits is not None
    return jax.nn.softmax(output.logits[0] / temperature, axis=-1)


def acceptance(stats: Any, length: int) -> tuple[float, float]:
    """Accepted length, and the share of judged tokens that were accepted.

    Tokens behind a rejected one are not judged; a round that accepts fewer than `length` rejects
    one. The last round of a text, which may be cut, counts like the others.
    """
    counts = np.sum(np.asarray(stats.accepted_lengths), axis=0)  # of rounds, by tokens committed
    accepted = counts @ np.maximum(np.arange(len(counts)) - 1, 0)
    rejected = counts[: length + 1].sum()
    return float(stats.mean_accepted_length), float(accepted / (accepted + rejected))


def _run(options: Options) -> None:
    if min(options.limit, options.length, options.max_new_tokens) < 1:
        raise SpecjaxError("limit, length and max_new_tokens must be at least 1")
    target = load(options.target)
    drafter, params = load_drafter(
        "draft-model",
        target,
        options.drafter,
        rule="fixed",
        length=options.length,
        max_length=options.length,
    )
    assert isinstance(drafter, DraftModel)
    tasks = read_tasks(options.tasks, options.limit)
    ids = [token_ids(task, target.require_tokenizer()) for task in tasks]
    prompt = from_ids(ids)
    models = [(target.model, target.params), (drafter.draft, params["draft"])]
    table = Table("temperature", "1 - TV", box=None)
    for name in ("rejection", "coupled"):
        table.add_column(f"{name}: accepted length")
        table.add_column("rate")
    for temperature in TEMPERATURES:
        cells = []
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
            cells += [f"{value:.3f}" for value in acceptance(out.stats, options.length)]
        shared = _mean_overlap(prompt, out.tokens, models, temperature)
        table.add_row(str(temperature), f"{shared:.3f}", *cells)
    Console(soft_wrap=True, markup=False, highlight=False).print(table)
    print(f"drafts of {options.length} drawn tokens, {len(ids)} prompts")


def _mean_overlap(
    prompt: Prompt,
    tokens: Int[Array, "B M"],
    models: Sequence[tuple[Transformer, Any]],
    temperature: float,
) -> float:
    """Over the positions of the new tokens, in texts that the target has drawn itself."""
    shares = []
    for row, length in enumerate(np.asarray(prompt.length)):
        text = jnp.concatenate([prompt.tokens[row, :length], tokens[row]])
        missing = prompt.tokens.shape[1] - int(length)  # one shape
        found = overlap(jnp.pad(text, (0, missing))[None], models, temperature)
        shares.append(np.asarray(found)[length - 1 : length - 1 + tokens.shape[1]])
    return float(np.mean(shares))


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
