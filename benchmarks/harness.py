"""Shared by the benchmarks and recipes: options, tables, random models of known shapes."""

import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import tyro
from jaxtyping import Array, Float, Key

from specjax import LoadedTarget, SpecjaxError, Transformer, TransformerConfig
from specjax.core.errors import check_whole, exit_code
from specjax.run.distillation import answers_of
from specjax.run.tasks import TaskPrompt, read_tasks, task_prompts

# ---- Options ------------------------------------------------------------------------------------

OptionsType = TypeVar("OptionsType")


def main(run: Callable[[OptionsType], Any], options: type[OptionsType], doc: str | None) -> None:
    """Parses the command line, runs, and ends the process with its exit code."""
    sys.exit(exit_code(partial(run, tyro.cli(options, description=doc))))


def at_least_1(options: Any, *names: str) -> None:
    """Raises SpecjaxError unless each of these options is at least 1."""
    for name in names:
        check_whole(name, getattr(options, name), 1)


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raises SpecjaxError for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            raise SpecjaxError(f"{kind} {name!r} is unknown; choose from {', '.join(known)}")


def requests_for(
    target: LoadedTarget, tasks: str, limit: int, max_new_tokens: int
) -> list[TaskPrompt]:
    """Returns the prompts of the tasks, as `specjax bench` measures them."""
    answer = answers_of(target, max_new_tokens)
    return task_prompts(read_tasks(tasks, limit), target, max_new_tokens, answer)


# ---- Tables -------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Formats a Markdown table whose columns line up; all but the first are right-aligned."""
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    widths = [max(width, 4) for width in widths]

    def line(row: Sequence[str]) -> str:
        first, *others = zip(row, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    return "\n".join([line(header), line(rule), *map(line, cells)])


# ---- Random models of known shapes --------------------------------------------------------------

CYCLE = 128  # tokens after which a cycling target repeats itself
LOUDNESS = 3200.0  # of its embeddings, so that all layers together do not drown them


SIZES = {
    "160m": TransformerConfig(32000, 768, 3072, 12, 12, 12, 64),
    "7b": TransformerConfig(32000, 4096, 11008, 32, 32, 32, 128),  # Llama-2-7B, Vicuna-7B
    "tiny": TransformerConfig(64, 32, 48, 2, 4, 4, 8),
    "1b": TransformerConfig(  # Llama-3.2-1B
        128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True
    ),
    "8b": TransformerConfig(128256, 4096, 14336, 32, 32, 8, 128),  # Llama-3-8B
    "70b": TransformerConfig(128256, 8192, 28672, 80, 64, 8, 128),  # Llama-3-70B
    "13b": TransformerConfig(32000, 5120, 13824, 40, 40, 40, 128),  # Llama-2-13B, Vicuna-13B
    "68m": TransformerConfig(32000, 768, 3072, 2, 12, 12, 64),  # a draft model for 32000 tokens
}
IN_FLOAT32 = ("160m", "tiny")  # the others have weights in bfloat16


def random_target(size: str, longest: int) -> LoadedTarget:
    """Makes a target for texts of `longest` tokens, without a tokenizer."""
    check_known("size", [size], SIZES)
    model = Transformer(replace(SIZES[size], max_position_embeddings=longest))
    params = random_params(model, "float32" if size in IN_FLOAT32 else "bfloat16")
    return LoadedTarget(model, params, None, model.config, size)


def random_params(model: Transformer, dtype: str) -> Any:
    """Draws params as `model.initialise` would, one array after the other.

    One program for all would take half a minute to compile for 32 layers. So there is one per
    shape, and never more in memory than the params themselves and one array.
    """
    shapes = jax.eval_shape(model.initialise, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [_random(key, leaf.shape, dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: Key[Array, ""], shape: tuple[int, ...], dtype: str) -> Float[Array, "..."]:
    """Draws small weights; a Llama's only vectors are the scales of its norms, which are ones."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return 0.02 * jax.random.normal(key, shape, dtype)


def cycling(target: LoadedTarget) -> LoadedTarget:
    """Makes a target generate token t + 1 after token t, and start over every `CYCLE`.

    Random targets are undecided: in bfloat16 their two best logits are often equal up to rounding,
    which depends on the number of rows, so that no text is known in advance. Here the embedding of
    a token drowns what the layers add to it, and the LM head recognises it. Shapes and costs stay
    the same; the target must have a separate LM head.
    """
    tokens = jnp.arange(target.config.vocab_size)
    table = target.model.embed(target.params, tokens)
    last = jnp.minimum(tokens + CYCLE, len(tokens)) - 1  # of the cycle that a token begins
    before = jnp.where(tokens % CYCLE == 0, last, tokens - 1)
    loud = {"weight": (LOUDNESS * table).astype(table.dtype)}
    changed = {"embed_tokens": loud, "lm_head": {"weight": table[before]}}
    return replace(target, params={**target.params, **changed})
