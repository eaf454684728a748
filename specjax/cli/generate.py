"""`specjax generate`: continues a prompt, and measures the speed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from specjax.cli.decoding_options import DecodingOptions
from specjax.cli.prompts import Source, read_source, read_sources, tokenize
from specjax.core.errors import SpecjaxError, errors_at
from specjax.core.settings import setting

NUM_PAIRS = 3  # interleaved runs per method with --compare


@dataclass(frozen=True)
class Generate(DecodingOptions):
    """Generate the text of plain decoding with a drafting method, in less time.

    The prompt comes from the command, a file or standard input; without one, an embedded example
    runs. The reported speed includes prefill, but not compiling or printing. With --compare, the
    method and plain decoding take turns, three runs each.

      specjax generate --compare
      specjax generate 'Name three rivers.' --chat --target FOLDER
      git diff | specjax generate --system 'Summarise this.' --target FOLDER
      specjax generate --prompts questions.jsonl > answers.jsonl
    """

    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT")] = None
    """The text to continue, used exactly as given; - reads standard input."""
    prompt_file: Path | None = None
    """A UTF-8 file with the text to continue, used exactly as it is, final newline included;
    - reads standard input."""
    prompt_ids: Annotated[str | None, arg(metavar="1,2,3")] = None
    """Token ids to continue, separated by commas."""
    prompts: Path | None = None
    """Continue many prompts: a JSONL file, or - for standard input, with `prompt` or `messages` in
    each line. Prints a line of JSON for each, as --json does."""
    chat: bool = False
    """Treat the prompt as a message: use the tokenizer's chat template, or Vicuna's without one."""
    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message before the prompt; implies --chat."""
    compare: bool = False
    """Also run plain decoding, in turn with the method, and compare."""
    attribute: bool = False
    """Also print which part of the prompt each part of the output was copied from."""
    json: bool = False
    """Print one JSON object and nothing else."""
    logprobs: int | None = setting(None, at_least=0, at_most=20)
    """With --json or --prompts, add each token's log-probability and those of the N most likely
    tokens, raw and processed."""

    def run(self) -> None:
        options = self.prompt, self.prompt_file, self.prompt_ids, self.chat, self.system
        source = read_source(*options, has_example=self.prompts is None)
        if self.attribute:
            self._check_copies()
        if self.logprobs is not None and not self.json and self.prompts is None:
            raise SpecjaxError("--logprobs is part of the JSON output; add --json or --prompts")
        if self.prompts is not None:
            if source or self.compare:
                raise SpecjaxError(
                    "--prompts cannot be used with another prompt or --compare; leave one of them "
                    "out"
                )
            self._run_all(read_sources(self.prompts, self.chat, self.system))
            return
        assert source is not None
        from specjax.cli.generation import time_in_turn, timed_text
        from specjax.cli.generation_output import GenerateOutput

        output = GenerateOutput(self.json)
        target, request_for = self.load()
        request = request_for(tokenize(source, target), source.is_chat)
        output.source(source)
        requests = [request, request.with_plain()] if self.compare else [request]
        with output.busy("compiling"):
            compile_seconds = [request.compile() for request in requests]
        results = []
        if not self.json:
            output.legend()
            results = [timed_text(request, [output.stream(request)])]
        if self.json or self.compare:
            with output.busy("measuring"):
                results = time_in_turn(requests, NUM_PAIRS if self.compare else 1)
        output.warn(results)
        output.advise(results)
        if self.json:
            output.json(source, results, compile_seconds, self.attribute)
        else:
            if self.attribute:
                output.sources(results[0])
            output.figures(results, sum(compile_seconds))

    def _run_all(self, sources: list[Source]) -> None:
        """Continues every prompt of a file, in one compiled program."""
        from specjax.cli.generation import time_in_turn
        from specjax.cli.generation_output import GenerateOutput
        from specjax.decoding.prompt import from_ids, padded_length

        output = GenerateOutput(is_json=True)
        target, request_for = self.load()
        ids = []
        for source in sources:
            with errors_at(source.place):
                ids += tokenize(source, target).ids
        bucket = padded_length(ids)
        prompts = [from_ids([tokens], bucket) for tokens in ids]
        requests = list(map(request_for, prompts, [source.is_chat for source in sources]))
        for source, request in zip(sources, requests, strict=True):
            with errors_at(source.place):
                request.check()
        with output.busy("compiling"):
            seconds = requests[0].compile()
        for number, (source, request) in enumerate(zip(sources, requests, strict=True), 1):
            with output.busy(f"{number} of {len(requests)}"):
                results = time_in_turn([request], 1)
            output.warn(results)
            output.advise(results)
            output.json(source, results, [seconds], self.attribute)

    def _check_copies(self) -> None:
        from specjax.loading.methods import METHODS

        METHODS.read_settings(self.method, self.set)
        if not METHODS[self.method].copies:
            copying = ", ".join(name for name, method in METHODS.items() if method.copies)
            raise SpecjaxError(
                f"--attribute does not support --method {self.method!r}; choose one of {copying}"
            )
