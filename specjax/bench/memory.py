"""What a request holds in memory: `python -m specjax.bench.memory`.

A request of P prompt tokens and n new ones needs one KV cache of P + n slots. Whether it holds just
one is XLA's decision, as it copies whatever it cannot change in place. This asks the compiled
program of a whole generation, and then measures a process that runs it. To keep the run short every
token counts as EOS: the program and all its buffers are those of n new tokens, yet it stops after
one round.
"""

import json
import re
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from specjax.bench.options import methods_in
from specjax.core.errors import SpecjaxError, exit_code
from specjax.decoding.drafter import Params
from specjax.decoding.generate import num_slots, speculative_generate
from specjax.decoding.prompt import Prompt
from specjax.methods import make_drafter
from specjax.models.cache import KVCache
from specjax.models.config import TransformerConfig
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.transformer import Transformer

MEGABYTE = 10**6
LEAST = {"prompt_length": 2, "max_new_tokens": 1, "num_layers": 1, "width": 64, "vocabulary": 2}


@dataclass(frozen=True)
class Options:
    """How many KV caches does a request hold? One is right."""

    methods: str = ""
    """Drafting methods, with commas between; by default all that need no weights of their own."""
    prompt_length: int = 1024
    """Tokens of the prompt."""
    max_new_tokens: int = 1024
    """New tokens that the request asks for."""
    num_layers: int = 12
    """Layers of the model, which is all zeros."""
    width: int = 1024
    """Its hidden size; heads are 64 wide, and each has its own keys and values."""
    vocabulary: int = 8192
    """Its number of tokens."""
    measure: bool = True
    """Also run each program, in a process of its own, and measure how that grows."""

    def config(self) -> TransformerConfig:
        """The model's config: 0.2 billion parameters unless told otherwise.

        Raises:
            SpecjaxError: for a size that makes no model or no request.
        """
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise SpecjaxError(f"{name} {getattr(self, name)} must be at least {least}")
        heads = self.width // 64
        return TransformerConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=4 * self.width,
            num_hidden_layers=self.num_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=64,
            max_position_embeddings=self.prompt_length + self.max_new_tokens,
        )


@dataclass(frozen=True)
class Held:
    """What the compiled program of one request holds, in bytes."""

    method: str
    params: int
    cache: int  # one KV cache of the request
    scores: int  # attention scores of one layer in one prefill pass, which come and go
    arguments: int
    temporary: int  # all that lives and dies inside the program: cache, scores, activations
    output: int
    cache_copies: float  # copies of a KV cache that the program's loops contain; 0 is right

    @property
    def caches(self) -> float:
        """Temporary memory, counted in KV caches."""
        return self.temporary / self.cache


def held(
    method: str, config: TransformerConfig, prompt_length: int, max_new_tokens: int
) -> tuple[Held, Any]:
    """Compiles a request (greedy, batch 1) and asks what it holds; also returns the program."""
    target, drafter = Transformer(config), make_drafter(method, config, {})
    params = jax.eval_shape(target.initialise, jax.eval_shape(partial(jax.random.key, 0)))
    prompt = jax.eval_shape(partial(_prompt, prompt_length))
    request = partial(
        speculative_generate,
        target=target,
        drafter=drafter,
        max_new_tokens=max_new_tokens,
        eos=tuple(range(config.vocab_size)),
    )
    key = jax.eval_shape(partial(jax.random.key, 0))
    program = jax.jit(request).lower(Params(params), prompt, key).compile()
    slots = num_slots(prompt_length, max_new_tokens, drafter)
    cache = jax.eval_shape(partial(KVCache.create, config, 1, slots))
    chunk = min(PREFILL_CHUNK, prompt_length)
    sizes, text = program.memory_analysis(), program.as_text()
    assert sizes is not None and text is not None  # some experimental backends tell nothing
    found = Held(
        method=method,
        params=_num_bytes(params),
        cache=_num_bytes(cache),
        scores=config.num_attention_heads * chunk * slots * 4,
        arguments=sizes.argument_size_in_bytes,
        temporary=sizes.temp_size_in_bytes,
        output=sizes.output_size_in_bytes,
        cache_copies=_copies(text, cache.keys[0].shape) / (2 * config.num_hidden_layers),
    )
    return found, program


def growth(options: Options, method: str) -> int:
    """By how many bytes this process grows, at its largest, while it runs one request."""
    config = options.config()
    _, program = held(method, config, options.prompt_length, options.max_new_tokens)
    shapes = jax.eval_shape(Transformer(config).initialise, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    arguments = (Params(params), _prompt(options.prompt_length), jax.random.key(0))
    jax.block_until_ready(arguments)
    before = _resident()
    jax.block_until_ready(program(*arguments))
    return _most_resident() - before


def table(found: list[Held], grown: list[int | None]) -> Table:
    """One row per method: sizes in megabytes, then the last two in KV caches.

    `caches` is the temporary memory; `copies` counts those that the program's loops make.
    """
    titles = ("params", "cache", "scores", "temporary", "output", "grew by", "caches", "copies")
    result = Table("method", box=None, pad_edge=False)
    for title in titles:
        result.add_column(title, justify="right")
    for row, bytes_grown in zip(found, grown, strict=True):
        sizes = (row.params, row.cache, row.scores, row.temporary, row.output, bytes_grown)
        megabytes = ["-" if size is None else f"{size / MEGABYTE:.1f}" for size in sizes]
        result.add_row(row.method, *megabytes, f"{row.caches:.2f}", f"{row.cache_copies:g}")
    return result


def main() -> int:
    """Compiles, measures and prints; returns the exit code."""
    return exit_code(partial(_run, tyro.cli(Options, description=__doc__)))


def _run(options: Options) -> None:
    found, grown = [], []
    for method in methods_in(options.methods, options.config()):
        row, _ = held(method, options.config(), options.prompt_length, options.max_new_tokens)
        found.append(row)
        is_in_host_memory = jax.default_backend() == "cpu"
        can_measure = options.measure and is_in_host_memory
        grown.append(_growth_of_fresh_process(options, method) if can_measure else None)
    console = Console()
    console.print(table(found, grown))
    console.print(
        "sizes in MB; caches: temporary / cache; copies: caches that the loops copy (0 is right)",
        soft_wrap=True,
    )


def _growth_of_fresh_process(options: Options, method: str) -> int:
    """`growth`, where nothing has been allocated and freed before."""
    code = (
        "import json, sys; from specjax.bench.memory import Options, growth; "
        "print(growth(Options(**json.loads(sys.argv[1])), sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, json.dumps(asdict(options)), method]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(run.stdout)


def _prompt(length: int) -> Prompt:
    return Prompt(jnp.zeros((1, length), jnp.int32), jnp.full((1,), length))


def _num_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _copies(program: str, shape: tuple[int, ...]) -> int:
    """Copies of an array of `shape` in the optimized program, the entry's own left out.

    The entry makes the empty cache that the loops start from.
    """
    loops = program[: program.index("\nENTRY ")]
    wanted = ",".join(str(size) for size in shape)
    return len(re.findall(rf"= \w+\[{wanted}\]\S* copy\(", loops))


def _resident() -> int:
    """Bytes that this process holds in memory now; where that is unknown, the most so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return _most_resident()
    return pages * resource.getpagesize()


def _most_resident() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


if __name__ == "__main__":
    sys.exit(main())
