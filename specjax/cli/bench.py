"""`specjax bench`: measures methods against plain decoding."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from tyro.conf import arg

from specjax.bench.options import BenchOptions


@dataclass(frozen=True)
class BenchCommand(BenchOptions):
    """Measure methods and plain decoding in turn on the same prompts, and compare medians."""

    sections: ClassVar[dict[str, str]] = {
        "target": "model",
        "methods": "methods",
        "tasks": "prompts",
        "temperature": "sampling",
        "runs": "measurement",
    }
    examples: ClassVar[tuple[str, ...]] = (
        "specjax bench",
        "specjax bench --methods pld,eagle2 --tasks humaneval.jsonl --out runs/bench",
    )

    target: str = "pocket"
    """The target: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype for weights and compute; by default the one that is fastest on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights when loading; its own text may change, drafting keeps that."""

    @property
    def if_stopped(self) -> str:
        """Says how an interrupted benchmark goes on; empty if it cannot."""
        return "the same command goes on" if self.out else ""

    def run(self) -> None:
        """Measures and prints the table."""
        from specjax.bench.run import run_bench
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.options import check_seed
        from specjax.hub import load

        check_seed(self.seed)
        use_compilation_cache()
        run_bench(partial(load, self.target, dtype=self.dtype, quantize=self.quantize), self)
        if self.out is not None:
            print(f"kept in {self.out}; `specjax report {self.out}` makes a page of it")
