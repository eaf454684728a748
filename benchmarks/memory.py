"""Measures what a request holds in memory: python -m benchmarks.memory

A request of P prompt tokens and n new ones needs one KV cache of P + n slots. Whether it holds just
one is XLA's decision, as it copies whatever it cannot change in place. This compiles a whole
generation and asks the program.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.harness import Shape, main, option, table
from specjax import Engine, Params, Prompt, Transformer, TransformerConfig, speculative_generate
from specjax.bench.options import methods_in
from specjax.core.errors import SpecjaxError
from specjax.loading.methods import make_drafter
from specjax.models.cache import KVCache
from specjax.models.prefill import PREFILL_CHUNK

MIN_SIZES = {"prompt_length": 2, "max_new_tokens": 1, "num_layers": 1, "width": 64, "vocabulary": 2}
HEADER = ("method", "params", "cache", "scores", "temporary", "output", "caches", "copies")


@dataclass(frozen=True)
class MemoryOptions:
    """The options of this benchmark."""

    methods: str = option("methods, with commas between; by default all without weights", "")
    prompt_length: int = option("tokens of the prompt", 1024)
    max_new_tokens: int = option("new tokens that the request asks for", 1024)
    num_layers: int = option("layers of the model", 12)
    width: int = option(
        "its hidden size; heads are 64 wide, with keys and values of their own", 1024
    )
    vocabulary: int = option("its number of tokens", 8192)

    def config(self) -> TransformerConfig:
        """Returns the model's config: by default 0.2 billion parameters.

        Raises:
            SpecjaxError: for a size that makes no model or no request.
        """
        for name, minimum in MIN_SIZES.items():
            if getattr(self, name) < minimum:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least {minimum}")
        sizes = self.vocabulary, self.width, 4 * self.width, self.num_layers, self.width // 64
        return Shape(*sizes, "float32").config(self.prompt_length + self.max_new_tokens)


class HeldMemory(NamedTuple):
    """The memory that the compiled program of one request holds, in bytes."""

    params: int
    cache: int  # one KV cache of the request
    scores: int  # attention scores of one layer in one prefill pass
    temporary: int  # all that lives and dies inside the program: cache, scores, activations
    output: int
    cache_copies: float  # copies of a KV cache that the program's loops contain; 0 is right


def held(
    method: str, config: TransformerConfig, prompt_length: int, max_new_tokens: int
) -> HeldMemory:
    """Compiles a request (greedy, batch 1) and asks what it holds."""
    target, drafter = Transformer(config), make_drafter(method, config, {})
    key = jax.eval_shape(partial(jax.random.key, 0))
    params = jax.eval_shape(target.initialise, key)
    prompt = jax.eval_shape(
        lambda: Prompt(jnp.zeros((1, prompt_length), jnp.int32), jnp.full(1, prompt_length))
    )
    settings = {"target": target, "drafter": drafter, "max_new_tokens": max_new_tokens}
    request = jax.jit(partial(speculative_generate, **settings))
    program = request.lower(Params(params), prompt, key).compile()
    slots = Engine(**settings).num_slots(prompt_length)
    cache = jax.eval_shape(partial(KVCache.create, config, 1, slots))
    sizes, text = program.memory_analysis(), program.as_text()
    assert sizes is not None and text is not None  # some experimental backends return nothing
    copies = _copies(text, cache.keys[0].shape) / (2 * config.num_hidden_layers)
    return HeldMemory(
        params=_num_bytes(params),
        cache=_num_bytes(cache),
        scores=config.num_attention_heads * min(PREFILL_CHUNK, prompt_length) * slots * 4,
        temporary=sizes.temp_size_in_bytes,
        output=sizes.output_size_in_bytes,
        cache_copies=copies,
    )


def run(options: MemoryOptions) -> None:
    """Compiles and prints the table."""
    config = options.config()
    sizes = config, options.prompt_length, options.max_new_tokens
    names = methods_in(options.methods, Transformer(config))
    rows = []
    for name in names:
        found = held(name, *sizes)
        megabytes = [f"{size / 1e6:.1f}" for size in found[:5]]
        caches = found.temporary / found.cache
        rows.append([name, *megabytes, f"{caches:.2f}", f"{found.cache_copies:g}"])
    print(table(HEADER, rows))
    print("sizes in MB; caches: temporary / cache; copies: caches that loops copy (0 is right)")


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _copies(program: str, shape: tuple[int, ...]) -> int:
    """Counts copies of an array of `shape` in the optimised program, without the entry's own.

    The entry makes the empty cache that the loops start from.
    """
    loops = program[: program.index("\nENTRY ")]
    wanted = ",".join(str(size) for size in shape)
    return len(re.findall(rf"= \w+\[{wanted}\]\S* copy\(", loops))


if __name__ == "__main__":
    main(run, MemoryOptions, __doc__)
