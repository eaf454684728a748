"""Prints the output of `specjax generate`: results on stdout, everything else on stderr."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specjax.bench.acceptance import advice_on
from specjax.cli.generation import GenerationRequest, TimedText
from specjax.cli.live_text import DRAFTED, LiveText
from specjax.cli.prompts import INSTRUCTION, Source
from specjax.core.text import num_equal, safe_console, token_texts
from specjax.decoding.automaton import Grammar
from specjax.decoding.sampling import LOSSY
from specjax.run.runner import TimedRun


@dataclass(frozen=True)
class GenerateOutput:
    """The output of one command."""

    is_json: bool
    output: Console = field(default_factory=partial(safe_console, soft_wrap=True))
    notes: Console = field(default_factory=partial(safe_console, soft_wrap=True, stderr=True))

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
        """Explains the colours of the text, if the terminal has any."""
        if self.output.is_terminal and self.output.color_system and not self.output.no_color:
            legend = Text.assemble(("drafted and accepted", DRAFTED), ", added by the target")
            self.output.print(legend)

    def stream(self, request: GenerationRequest) -> TimedRun:
        live = LiveText(request.ending(), self.output)
        try:
            return request.run(live.add)
        finally:
            live.finish()

    def figures(self, results: Sequence[TimedText], compile_seconds: float) -> None:
        """Prints the speed, and with two results their comparison."""
        excluded = f"{compile_seconds:.1f} s of compiling not counted"
        if len(results) == 2:
            table = Table("method", box=None, pad_edge=False)
            for title in ("tokens/s", "seconds", "accepted length"):
                table.add_column(title, justify="right")
            for result in results:
                speed = f"{result.tokens_per_second:.1f}", f"{result.seconds:.3f}"
                table.add_row(result.method, *speed, f"{result.mean_accepted_length:.2f}")
            self.output.print(table)
            self.output.print(_comparison(*results))
            self.notes.print(f"medians of runs in turn; {excluded}")
            return
        [result] = results
        self.notes.print(
            f"{result.method}: {len(result.tokens)} tokens in {result.seconds:.3f} s, "
            f"{result.tokens_per_second:.1f} tokens/s\n"
            f"accepted length {result.mean_accepted_length:.2f} over {result.rounds} rounds; "
            f"{excluded}"
        )

    def warn(self, results: Sequence[TimedText]) -> None:
        """Warns if a text is not lossless, or may have ended before its grammar."""
        if any(result.is_lossy for result in results):
            self.notes.print(LOSSY, style="bold red")
        result = results[0]
        has_grammar = Grammar() in result.request.engine.sampling.processors
        if has_grammar and result.finish_reason == "length":
            problem = "the text may have ended before its grammar; raise --max-new-tokens"
            self.notes.print(problem, style="bold red")

    def advise(self, results: Sequence[TimedText]) -> None:
        for result in results:
            if text := advice_on(result.method, result.mean_accepted_length, result.rounds):
                self.notes.print(f"{result.method}: {text}", style="bold red")

    def json(
        self,
        source: Source,
        results: Sequence[TimedText],
        compile_seconds: Sequence[float],
        with_spans: bool,
    ) -> None:
        """Prints one JSON object; a span is its start and end in the output, and its source."""
        values, *others = (
            {"prompt": source.prompt, **result.record(seconds)}
            for result, seconds in zip(results, compile_seconds, strict=True)
        )
        if with_spans:
            values["spans"] = results[0].spans
        for plain in others:
            is_identical = values["tokens"] == plain["tokens"]
            is_reproducible = results[0].request.engine.sampling.is_reproducible
            values |= {"plain": plain, "identical": is_identical if is_reproducible else None}
        self.output.file.write(json.dumps(values) + "\n")
        self.output.file.flush()

    def sources(self, result: TimedText) -> None:
        """Prints the output part by part, with positions in output and prompt, both from 0."""
        texts = token_texts(result.request.target.tokenizer, result.tokens)
        table = Table("output tokens", "copied from", "text", box=None, pad_edge=False)
        position = 0
        for start, end, source in [*result.spans, (len(texts), len(texts), None)]:
            for first, last, place in ((position, start, None), (start, end, source)):
                if first < last:
                    copied = "" if place is None else _range(place, place + last - first)
                    text = repr("".join(texts[first:last]))[1:-1]
                    table.add_row(_range(first, last), copied, text)
            position = end
        self.output.print(table)


def _range(start: int, end: int) -> str:
    return str(start) if end == start + 1 else f"{start}-{end - 1}"


def _comparison(result: TimedText, plain: TimedText) -> str:
    target, sampling = result.request.target, result.request.engine.sampling
    ratio = f"{result.tokens_per_second / plain.tokens_per_second:.2f}x plain decoding"
    if sampling.is_lossy:
        return f"{ratio}; LOSSY, so the tokens are not compared"
    if not sampling.is_reproducible:
        return f"{ratio}; rejection draws other tokens, from the same distribution"
    if result.tokens == plain.tokens:
        is_quantized = target.dtype_name != target.dtype.name
        other = f" to those of the {target.dtype_name} target" if is_quantized else ""
        return f"{ratio}; all {len(result.tokens)} tokens are equal{other}"
    count = num_equal(result.tokens, plain.tokens)
    cause = f"two logits may have been too close for {target.dtype_name} to rank"
    if target.dtype.itemsize > 2 or target.has_native_layers:  # which are exact
        cause = "this is a bug in specjax, please report it"
    return f"{ratio}; only the first {count} tokens are equal: {cause}"
