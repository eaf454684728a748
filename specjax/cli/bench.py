"""`specjax bench`: measures methods against plain decoding."""

from dataclasses import dataclass

from specjax.bench.options import BenchOptions
from specjax.cli.decoding_options import PassOptions


@dataclass(frozen=True)
class BenchCommand(PassOptions, BenchOptions):
    """Measure methods and plain decoding in turn on the same prompts, and compare medians.

    specjax bench
    specjax bench --methods pld,eagle2 --tasks humaneval.jsonl --out runs/bench
    """

    @property
    def if_stopped(self) -> str:
        """Advice on resuming an interrupted benchmark; empty if it cannot resume."""
        return "run the same command to resume" if self.out else ""

    def run(self) -> None:
        """Measures and prints the table."""
        from specjax.bench.run import run_bench

        run_bench(self.load_target, self)
        if self.out is not None:
            print(f"kept in {self.out}; `specjax report {self.out}` writes a report of it")
