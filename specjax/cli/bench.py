"""`specjax bench`: what the methods gain over plain decoding, and what of the papers holds."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Literal

from tyro.conf import arg, subcommand

from specjax.bench.claims.options import ClaimsOptions
from specjax.bench.options import BenchOptions
from specjax.core.errors import SpecjaxError


@dataclass(frozen=True)
class Claims(ClaimsOptions):
    """Check what the papers claim on pocket, in under 20 minutes; a report, and never a test."""


@dataclass(frozen=True)
class Methods:
    """Measure methods, as the options of `specjax bench` itself say."""


@dataclass(frozen=True)
class Bench(BenchOptions):
    """Measure methods against plain decoding, in turn on the same prompts, by medians."""

    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the weights and the arithmetic; by default float32 on CPU and bfloat16 elsewhere."""
    what: Annotated[
        Annotated[Methods, subcommand("methods")] | Annotated[Claims, subcommand("claims")],
        arg(name=""),
    ] = field(default_factory=Methods)

    def run(self) -> None:
        """Measures and prints the table, or the claims."""
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.settings import check_seed

        if isinstance(self.what, Claims):
            self._check_alone()
            check_seed(self.what.seed)
            use_compilation_cache()
            self._run_claims(self.what)
            return
        from specjax.bench.run import run_bench
        from specjax.hub import load

        check_seed(self.seed)
        use_compilation_cache()
        run_bench(partial(load, self.target, dtype=self.dtype), self)
        if self.out is not None:
            print(f"kept in {self.out}; `specjax report {self.out}` makes a page of it")

    def _check_alone(self) -> None:
        """Raises SpecjaxError for options in front of `claims`, which would do nothing."""
        if replace(self, what=Methods()) != Bench():
            raise SpecjaxError(
                "claims has options of its own; write them behind it: specjax bench claims "
                "--limit 3"
            )

    @staticmethod
    def _run_claims(options: ClaimsOptions) -> None:
        from specjax.bench.claims.run import run_claims

        run_claims(options)
        if options.out is not None:
            print(f"written to {options.out}")
