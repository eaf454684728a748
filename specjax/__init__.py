"""specjax: lossless speculative decoding for Llama-family models in JAX and Flax.

    import jax, specjax

    target = specjax.load("pocket")
    print(specjax.generate_text(target, "import os\n", "pld-plus"))

Or step by step, as a pure function of arrays:

    drafter, drafter_params = specjax.load_drafter("pld-plus", target)
    prompt = specjax.encode(target.tokenizer, ["import os\n"])
    out = specjax.speculative_generate(
        specjax.Params(target.params, drafter_params), prompt, jax.random.key(0),
        target=target.model, drafter=drafter,
    )

Names are imported when they are first used, so that `import specjax` itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from specjax.core.companions import companion

if TYPE_CHECKING:
    from specjax.core.errors import SpecjaxError
    from specjax.decoding.automaton import Grammar
    from specjax.decoding.drafter import Drafter, Params
    from specjax.decoding.engine import Engine
    from specjax.decoding.generate import speculative_generate, stream
    from specjax.decoding.per_sequence import per_sequence
    from specjax.decoding.prompt import Prompt, chat_ids, encode, from_ids
    from specjax.decoding.reference import reference_generate
    from specjax.decoding.sampling import Sampling
    from specjax.decoding.state import Generation, Stats
    from specjax.loading.drafters import load_drafter
    from specjax.loading.grammar import load_grammar
    from specjax.loading.targets import LoadedTarget, load
    from specjax.models.config import TransformerConfig
    from specjax.models.target import Target
    from specjax.models.transformer import Transformer
    from specjax.run.text import Completion, generate_text, stream_text

__version__ = "0.1.0"
_HOMES = {
    # load
    "load": "specjax.loading.targets",
    "load_drafter": "specjax.loading.drafters",
    "load_grammar": "specjax.loading.grammar",
    "LoadedTarget": "specjax.loading.targets",
    # ask
    "encode": "specjax.decoding.prompt",
    "chat_ids": "specjax.decoding.prompt",
    "from_ids": "specjax.decoding.prompt",
    "Prompt": "specjax.decoding.prompt",
    "Params": "specjax.decoding.drafter",
    "Sampling": "specjax.decoding.sampling",
    "per_sequence": "specjax.decoding.per_sequence",
    "Grammar": "specjax.decoding.automaton",
    # generate
    "generate_text": "specjax.run.text",
    "stream_text": "specjax.run.text",
    "Completion": "specjax.run.text",
    "speculative_generate": "specjax.decoding.generate",
    "stream": "specjax.decoding.generate",
    "reference_generate": "specjax.decoding.reference",
    "Generation": "specjax.decoding.state",
    "Stats": "specjax.decoding.state",
    # build on
    "Engine": "specjax.decoding.engine",
    "Drafter": "specjax.decoding.drafter",
    "Target": "specjax.models.target",
    "Transformer": "specjax.models.transformer",
    "TransformerConfig": "specjax.models.config",
    "SpecjaxError": "specjax.core.errors",
}
__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name == "notebook":
        return companion(name)
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
