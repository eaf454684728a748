"""Random targets of known shapes: where only the cost is asked, weights need not be had."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from specjax.core.errors import SpecjaxError
from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer

CYCLE = 128  # tokens after which a cycling target repeats itself
LOUDNESS = 3200.0  # of its embeddings, so that all layers together do not drown them


class Shape(NamedTuple):
    """What decides the cost of a model."""

    vocabulary: int
    width: int
    feed_forward: int
    layers: int
    heads: int
    dtype: str
    key_value_heads: int = 0  # 0: one for each head
    is_tied: bool = False  # the embedding is the LM head as well

    def config(self, longest: int) -> TransformerConfig:
        """That of a Llama for texts of `longest` tokens."""
        return TransformerConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads or self.heads,
            head_dim=self.width // self.heads,
            max_position_embeddings=longest,
            tie_word_embeddings=self.is_tied,
        )


SIZES = {
    "160m": Shape(32000, 768, 3072, 12, 12, "float32"),
    "7b": Shape(32000, 4096, 11008, 32, 32, "bfloat16"),  # Llama-2-7B, Vicuna-7B
    "tiny": Shape(64, 32, 48, 2, 4, "float32"),
    "1b": Shape(128256, 2048, 8192, 16, 32, "bfloat16", 8, True),  # Llama-3.2-1B
    "13b": Shape(32000, 5120, 13824, 40, 40, "bfloat16"),  # Llama-2-13B, Vicuna-13B
    "68m": Shape(32000, 768, 3072, 2, 12, "bfloat16"),  # a draft model for 32000 tokens
}


def default_size() -> str:
    """What this machine can be asked: 160m on CPU, else 7b."""
    return "160m" if jax.default_backend() == "cpu" else "7b"


def random_target(size: str, longest: int) -> tuple[Transformer, Any, str]:
    """A target for texts of `longest` tokens, its params, and their dtype.

    Raises:
        SpecjaxError: for an unknown size.
    """
    check_size(size)
    shape = SIZES[size]
    target = Transformer(shape.config(longest))
    return target, random_params(target, shape.dtype), shape.dtype


def check_size(size: str) -> None:
    """Raises SpecjaxError for an unknown size."""
    if size not in SIZES:
        raise SpecjaxError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")


def random_params(model: Transformer, dtype: str) -> Any:
    """Params as `model.initialise` would draw them, one array after the other.

    All in one program would take half a minute to compile for 32 layers; so there is one program
    per shape, and never more in memory than the params themselves and one array.
    """
    shapes = jax.eval_shape(model.initialise, jax.random.key(0))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    made = [_random(key, leaf.shape, dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, made)


@partial(jax.jit, static_argnums=(1, 2))
def _random(key: Key[Array, ""], shape: tuple[int, ...], dtype: str) -> Float[Array, "..."]:
    """Small weights; a Llama's only vectors are the scales of its norms, which begin as ones."""
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return 0.02 * jax.random.normal(key, shape, dtype)


def cycling(params: Any) -> Any:
    """The weights of a target that says token t + 1 after token t, and begins anew every `CYCLE`.

    Random targets are undecided: in bfloat16 their two best logits are often equal up to rounding,
    which depends on the number of rows, so that no text can be told in advance. Here the embedding
    of a token drowns what the layers add to it, and the LM head knows the token by it. Shapes, and
    with them the cost, are those of `params`, which must have an LM head of their own.
    """
    table = params["embed_tokens"]["weight"]
    tokens = jnp.arange(len(table))
    last = jnp.minimum(tokens + CYCLE, len(table)) - 1  # of the cycle that a token begins
    before = jnp.where(tokens % CYCLE == 0, last, tokens - 1)
    loud = {"weight": (LOUDNESS * table).astype(table.dtype)}
    return {**params, "embed_tokens": loud, "lm_head": {"weight": table[before]}}
