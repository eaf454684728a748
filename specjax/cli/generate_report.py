"""Prints the output of `specjax generate`: results on stdout, everything else on stderr."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.bench.acceptance import advice_on
from specjax.bench.measure import PLAIN
from specjax.cli.measure import GenerationRequest, TimedText
from specjax.cli.prompts import INSTRUCTION, Source
from specjax.cli.text import DRAFTED, LiveText, show_sources, spans_in_prompt, write_page
from specjax.decoding.sampling import LOSSY
from specjax.run.runner import TimedRun


def _console(stderr: bool = False) -> Console:
    return Console(stderr=stderr, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class GenerateOutput:
    """The output of one command."""

    is_json: bool
    output: Console = field(default_factory=_console)
    notes: Console = field(default_factory=lambda: _console(stderr=True))

    def busy(self, doing: str) -> AbstractContextManager[Any]:
        """Shows a status on a terminal; redrawn rarely, it does not disturb timing."""
        if not self.notes.is_terminal:
            return nullcontext()
        return self.notes.status(f"{doing} ...", refresh_per_second=2)

    def source(self, source: Source) -> None:
        """Prints the instruction of the example, if that is the prompt."""
        if source.is_example and not self.is_json:
            self.notes.print(f"no prompt given, so here is an example: {INSTRUCTION}")

    def legend(self) -> None:
        """Says what the colours of a text mean, where there are any."""
        if self.output.is_terminal and self.output.color_system and not self.output.no_color:
            legend = Text.assemble(("drafted and accepted", DRAFTED), ", added by the target")
            self.output.print(legend)

    def stream(self, request: GenerationRequest) -> TimedRun:
        """Prints the text as it grows."""
        live = LiveText(request.target.tokenizer, self.output, request.stop)
        try:
            return request.run(live.add)
        finally:
            live.finish()

    def figures(
        self, request: GenerationRequest, results: Sequence[TimedText], compile_seconds: float
    ) -> None:
        """Prints the speed, and with two results their comparison."""
        counted = f"{compile_seconds:.1f} s of compiling not counted"
        if len(results) == 2:
            self.output.print(_table(results))
            self.output.print(_comparison(request, *results))
            self.notes.print(f"medians of runs in turn; {counted}")
            return
        [result] = results
        self.notes.print(
            f"{result.method}: {len(result.tokens)} tokens in {result.seconds:.3f} s, "
            f"{result.tokens_per_second:.1f} tokens/s\n"
            f"accepted length {result.mean_accepted_length:.2f} over {result.rounds} rounds; "
            f"{counted}"
        )

    def warn(self, request: GenerationRequest, results: Sequence[TimedText]) -> None:
        """Warns if almost nothing was accepted, or if the text is not lossless."""
        if request.engine.sampling.is_lossy and any(result.method != PLAIN for result in results):
            self.notes.print(LOSSY, style="bold red")
        for result in results:
            if text := advice_on(result.method, result.mean_accepted_length, result.rounds):
                self.notes.print(f"{result.method}: {text}", style="bold red")

    def sources(self, request: GenerationRequest, result: TimedText) -> None:
        """Prints which part of the prompt each part of the output repeats."""
        spans = spans_in_prompt(result.source, len(request.prompt_ids))
        show_sources(request.target.tokenizer, result.tokens, spans, self.output)

    def page(self, request: GenerationRequest, result: TimedText, path: Path) -> None:
        """Writes the sources as an HTML page."""
        spans = spans_in_prompt(result.source, len(request.prompt_ids))
        write_page(path, request.target.tokenizer, request.prompt_ids, result.tokens, spans)
        self.notes.print(f"sources written to {path}")

    def json(
        self,
        request: GenerationRequest,
        source: Source,
        results: Sequence[TimedText],
        compile_seconds: Sequence[float],
        with_spans: bool,
    ) -> None:
        """Prints one JSON object; a span is its start and end in the output, and its source."""
        fields = [_fields(request, *each) for each in zip(results, compile_seconds, strict=True)]
        values, *plain = [{"prompt": source.prompt, **each} for each in fields]
        if with_spans:
            values["spans"] = spans_in_prompt(results[0].source, len(request.prompt_ids))
        if plain:
            same = (
                results[0].tokens == results[1].tokens
                if request.engine.sampling.is_reproducible
                else None
            )
            values |= {"plain": plain[0], "identical": same}
        self.output.file.write(json.dumps(values) + "\n")
        self.output.file.flush()


def _fields(
    request: GenerationRequest, result: TimedText, compile_seconds: float
) -> dict[str, Any]:
    return {
        "target": request.target.name,
        "dtype": str(request.target.dtype),
        "padded_width": request.target.model.padded_width,
        "method": result.method,
        "seed": request.runner.seed,
        "temperature": request.engine.sampling.temperature,
        "verification": request.engine.sampling.verification,
        "is_lossy": request.engine.sampling.is_lossy and result.method != PLAIN,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": result.tokens,
        "num_new_tokens": len(result.tokens),
        "rounds": result.rounds,
        "mean_accepted_length": round(result.mean_accepted_length, 6),
        "seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "compile_seconds": compile_seconds,
    }


def _table(results: Sequence[TimedText]) -> Table:
    table = Table("method", box=None, pad_edge=False)
    for title in ("tokens/s", "seconds", "accepted length"):
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(
            result.method,
            f"{result.tokens_per_second:.1f}",
            f"{result.seconds:.3f}",
            f"{result.mean_accepted_length:.2f}",
        )
    return table


def _comparison(request: GenerationRequest, result: TimedText, plain: TimedText) -> str:
    ratio = f"{result.tokens_per_second / plain.tokens_per_second:.2f}x plain decoding"
    if request.engine.sampling.is_lossy:
        return f"{ratio}; LOSSY, so the tokens are not compared"
    if not request.engine.sampling.is_reproducible:
        return f"{ratio}; rejection draws other tokens, from the same distribution"
    if result.tokens == plain.tokens:
        quantized = request.target.dtype_name != request.target.dtype.name
        of_whom = f" to those of the {request.target.dtype_name} target" if quantized else ""
        return f"{ratio}; all {len(result.tokens)} tokens are equal{of_whom}"
    pairs = zip(result.tokens, plain.tokens, strict=False)
    num_equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return (
        f"{ratio}; only the first {num_equal} tokens are equal: two logits may have been too "
        f"close for {request.target.dtype_name} to rank"
    )
