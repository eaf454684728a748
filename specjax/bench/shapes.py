"""Random targets of known shapes: where only the cost is asked, weights need not be had."""

from functools import partial
from typing import Any

import jax

from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.models.llama import Llama

SIZES = {  # vocabulary, width, feed-forward, layers, heads, dtype
    "160m": (32000, 768, 3072, 12, 12, "float32"),
    "7b": (32000, 4096, 11008, 32, 32, "bfloat16"),
    "tiny": (64, 32, 48, 2, 4, "float32"),
}


def default_size() -> str:
    """What this machine can be asked: 160m on CPU, else 7b."""
    return "160m" if jax.default_backend() == "cpu" else "7b"


def random_target(size: str, longest: int) -> tuple[Llama, Any, str]:
    """A target for texts of `longest` tokens, its params, and their dtype.

    Raises:
        SpecjaxError: for an unknown size.
    """
    if size not in SIZES:
        raise SpecjaxError(f"size {size!r} is unknown; choose one of {', '.join(SIZES)}")
    vocabulary, width, feed_forward, layers, heads, dtype = SIZES[size]
    config = LlamaConfig(
        vocabulary, width, feed_forward, layers, heads, heads, width // heads, longest
    )
    target = Llama(config)
    params = jax.jit(partial(target.initialise, dtype=dtype))(jax.random.key(0))
    return target, params, dtype
