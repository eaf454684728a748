"""`specjax generate`: text from a prompt, and how fast it came."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from specjax.cli.prompts import Source, read_source
from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.cli.measure import Job

NUM_PAIRS = 3  # interleaved runs per method with --compare


@dataclass(frozen=True)
class Generate:
    """Generate text with a drafting method; it says what plain decoding would say, in less time.

    Without a prompt it runs an embedded example. The speed is that of one run, in which prefill
    counts and compiling does not; on a terminal, where the text appears as it comes, that of a
    second run. With --compare, both methods run three times in turn.
    """

    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT")] = None
    """Text to continue, taken as it stands."""
    prompt_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """A UTF-8 file with the text to continue, taken as it stands, last newline included."""
    prompt_ids: Annotated[str | None, arg(metavar="1,2,3")] = None
    """Token ids to continue, with commas between."""
    chat: bool = False
    """The prompt is a message: use the tokenizer's chat template, or Vicuna's if it has none."""
    target: str = "pocket"
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    method: str = "pld"
    """The drafting method; `specjax methods` lists them."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """A setting of the method, such as num_tokens=20."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """What the method reads, if anything: for rest a datastore; for draft-model a draft, for the
    methods with a head that head or the run of `specjax train` (also hub ids); by default pocket's
    own."""
    tuned: Annotated[Path | None, arg(metavar="FILE")] = None
    """Settings that `specjax tune` found; by default those beside the target, if any."""
    max_new_tokens: int = 256
    """Stop after so many new tokens, if the text has not ended before."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    top_k: Annotated[int | None, arg(metavar="K")] = None
    """Draw from the K most likely tokens only."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens that is together this likely."""
    seed: int = 0
    """Decides what is drawn."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled draws exactly what plain decoding draws; rejection keeps the distribution only.
    typical, of Medusa (epsilon 0.09, delta 0.3), is LOSSY: above temperature 0 it accepts whatever
    is likely enough."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """Of the weights and the arithmetic; by default float32 on CPU and bfloat16 elsewhere."""
    compare: bool = False
    """Also run plain decoding, in turn with the method, and compare."""
    attribute: bool = False
    """Also tell which part of the prompt each part of the output was copied from."""
    attribute_html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a page with prompt and output side by side; pointing at a copy shows its source."""
    json: bool = False
    """Print one JSON object and nothing else."""

    def run(self) -> None:
        """Generates, measures and prints."""
        source = read_source(self.prompt, self.prompt_file, self.prompt_ids, self.chat)
        from specjax.cli.generate_report import Report
        from specjax.cli.measure import measure

        report = Report(self.json)
        job = self._job(source)
        report.source(source)
        stream_seconds = report.stream(job) if report.is_live else 0.0
        with report.busy("measuring"):
            jobs = [job, job.with_plain()] if self.compare else [job]
            tell = partial(report.text, job) if report.is_plain else None
            results = measure(jobs, NUM_PAIRS if self.compare else 1, tell)
        report.warn(job, results)
        if self.json:
            report.json(job, results, self.attribute)
        else:
            if self.attribute:
                report.sources(job, results[0])
            report.figures(job, results, stream_seconds)
        if self.attribute_html is not None:
            report.page(job, results[0], self.attribute_html)

    def _check_attribution(self) -> None:
        from specjax.core.files import expand_user
        from specjax.methods import METHODS

        page = self.attribute_html
        if (self.attribute or page is not None) and not METHODS[self.method].copies:
            copying = ", ".join(name for name, method in METHODS.items() if method.copies)
            raise SpecjaxError(
                f"method {self.method!r} does not copy, so it has no sources; use {copying}"
            )
        if page is not None and not expand_user(page).parent.is_dir():
            raise SpecjaxError(f"--attribute-html {page}: its folder does not exist; make it first")

    def _job(self, source: Source) -> "Job":
        """The request, checked as far as possible before the target loads."""
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.measure import Job
        from specjax.cli.prompts import tokenize
        from specjax.cli.settings import check_seed, read_settings
        from specjax.decoding.drafter import Params
        from specjax.decoding.sampling import Sampling
        from specjax.hub import load
        from specjax.loading import auto_choice, load_drafter

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.verification)
        settings = read_settings(self.method, self.set)
        self._check_attribution()
        check_seed(self.seed)
        use_compilation_cache()
        target = load(self.target, dtype=self.dtype)
        drafter, drafter_params = load_drafter(
            self.method, target, self.drafter, self.tuned, **settings
        )
        if self.method == "auto":
            print(auto_choice(target, self.tuned), file=sys.stderr)
        return Job(
            method=self.method,
            drafter=drafter,
            params=Params(target.params, drafter_params),
            target=target,
            prompt=tokenize(source, target),
            seed=self.seed,
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
        )
