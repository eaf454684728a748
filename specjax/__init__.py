"""specjax: lossless speculative decoding for Llama-family models in JAX and Flax.

    target = specjax.load("pocket")
    drafter, drafter_params = specjax.load_drafter("pld-plus", target)
    prompt = specjax.encode(target.tokenizer, ["..."])
    out = specjax.speculative_generate(
        specjax.Params(target.params, drafter_params), prompt, jax.random.key(0),
        target=target.model, drafter=drafter,
    )

Names are imported when they are first used, so that `import specjax` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.core.errors import SpecjaxError
    from specjax.decoding.drafter import Drafter, Params
    from specjax.decoding.engine import Engine
    from specjax.decoding.generate import speculative_generate, stream
    from specjax.decoding.prompt import Prompt, chat_ids, encode, from_ids
    from specjax.decoding.reference import reference_generate
    from specjax.decoding.sampling import Sampling
    from specjax.decoding.state import Generation, Stats
    from specjax.hub import LoadedTarget, load
    from specjax.loading import load_drafter
    from specjax.models.config import TransformerConfig
    from specjax.models.target import Target
    from specjax.models.transformer import Transformer

__version__ = "0.1.0"
__all__ = [
    # load
    "load",
    "load_drafter",
    "LoadedTarget",
    # ask
    "encode",
    "chat_ids",
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
    "Engine",
    "Drafter",
    "Target",
    "Transformer",
    "TransformerConfig",
    "SpecjaxError",
]

_HOMES = {
    "specjax.loading": ("load_drafter",),
    "specjax.hub": ("load", "LoadedTarget"),
    "specjax.models.target": ("Target",),
    "specjax.decoding.prompt": ("encode", "chat_ids", "from_ids", "Prompt"),
    "specjax.decoding.drafter": ("Drafter", "Params"),
    "specjax.decoding.engine": ("Engine",),
    "specjax.decoding.sampling": ("Sampling",),
    "specjax.decoding.generate": ("speculative_generate", "stream"),
    "specjax.decoding.reference": ("reference_generate",),
    "specjax.decoding.state": ("Generation", "Stats"),
    "specjax.models.transformer": ("Transformer",),
    "specjax.models.config": ("TransformerConfig",),
    "specjax.core.errors": ("SpecjaxError",),
}


def __getattr__(name: str):
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'specjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
