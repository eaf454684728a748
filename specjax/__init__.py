"""specjax: lossless speculative decoding for Llama-family models in JAX and Flax.

target = specjax.load("pocket")
drafter, drafter_params = specjax.load_drafter("pld-plus", target)
prompt = specjax.encode(target.tokenizer, ["..."])
out = specjax.speculative_generate(
    specjax.Params(target.params, drafter_params), prompt, jax.random.key(0),
    target=target.model, drafter=drafter,
)
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.prompt import Prompt, encode, from_ids
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation, Stats
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.models.llama import Llama

if TYPE_CHECKING:
    from specjax.hub import Target, load, load_drafter

__version__ = "0.1.0"
__all__ = [
    # load
    "load",
    "load_drafter",
    "Target",
    # ask
    "encode",
    "from_ids",
    "Prompt",
    "Params",
    "Sampling",
    # generate
    "speculative_generate",
    "stream",
    "reference_generate",
    "Generation",
    "Stats",
    # build on
    "Drafter",
    "Llama",
    "LlamaConfig",
    "SpecjaxError",
]

_FROM_HUB = ("load", "load_drafter", "Target")  # whose imports take longer than all the rest


def __getattr__(name: str):
    if name in _FROM_HUB:
        return getattr(import_module("specjax.hub"), name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")
