"""`specjax generate`: text from a prompt, and its speed."""

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
    """Generate text with a drafting method: plain decoding's text, in less time.

    Without a prompt it runs an embedded example. The reported speed is that of one run, prefill
    included, compilation excluded; on a terminal, which streams the text, that of a second run.
    With --compare, both methods run three times in turn.
    """

    prompt: Annotated[Positional[str | None], arg(metavar="PROMPT")] = None
    """Text to continue, used exactly as given."""
    prompt_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """A UTF-8 file with the text to continue, used exactly, last newline included."""
    prompt_ids: Annotated[str | None, arg(metavar="1,2,3")] = None
    """Token ids to continue, with commas between."""
    chat: bool = False
    """The prompt is a message: use the tokenizer's chat template, or Vicuna's if it has none."""
    target: str = "pocket"
    """The target: pocket, a folder in Hugging Face format, a GGUF file, or a hub id."""
    method: str = "pld"
    """The drafting method; `specjax methods` lists them."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="NAME=VALUE")] = ()
    """A setting of the method, such as num_tokens=20."""
    drafter: Annotated[str | None, arg(metavar="FOLDER")] = None
    """What the method reads: a datastore (rest), a draft model (draft-model), or a head or the run
    of `specjax train` (methods with a head); hub ids work too. By default pocket's own."""
    tuned: Annotated[Path | None, arg(metavar="FILE")] = None
    """Settings that `specjax tune` found; by default those for the target, if any."""
    max_new_tokens: int = 256
    """The maximum number of new tokens."""
    temperature: float = 0.0
    """0 is greedy; above 0, tokens are sampled."""
    top_k: Annotated[int | None, arg(metavar="K")] = None
    """Sample from the K most likely tokens only."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this total probability."""
    seed: int = 0
    """The seed for sampling."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled samples exactly plain decoding's tokens; rejection preserves only the distribution.
    typical (Medusa; epsilon 0.09, delta 0.3) is LOSSY: above temperature 0 it accepts any token
    that is likely enough."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, arg(metavar="float32|bfloat16|float16")
    ] = None
    """The dtype for weights and compute; by default the one that is fastest on this machine."""
    quantize: Annotated[str | None, arg(metavar="int8|int4")] = None
    """Quantise the target's weights when loading; its own text may change, drafting keeps that."""
    compare: bool = False
    """Also run plain decoding, in turn with the method, and compare."""
    attribute: bool = False
    """Also print which part of the prompt each part of the output was copied from."""
    attribute_html: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write a page with prompt and output side by side; hovering over a copy shows its source."""
    json: bool = False
    """Print only one JSON object."""

    def run(self) -> None:
        """Generates, measures and prints the results."""
        source = read_source(self.prompt, self.prompt_file, self.prompt_ids, self.chat)
        from specjax.cli.generate_report import GenerateOutput
        from specjax.cli.measure import time_in_turn

        output = GenerateOutput(self.json)
        job = self._job(source)
        output.source(source)
        stream_seconds = output.stream(job) if output.is_live else 0.0
        with output.busy("measuring"):
            jobs = [job, job.with_plain()] if self.compare else [job]
            show = partial(output.text, job) if output.is_plain else None
            results = time_in_turn(jobs, NUM_PAIRS if self.compare else 1, show)
        output.warn(job, results)
        if self.json:
            output.json(job, results, self.attribute)
        else:
            if self.attribute:
                output.sources(job, results[0])
            output.figures(job, results, stream_seconds)
        if self.attribute_html is not None:
            output.page(job, results[0], self.attribute_html)

    def _check_attribution(self) -> None:
        from specjax.core.files import check_writable, expand_user
        from specjax.methods import METHODS

        page = self.attribute_html
        if (self.attribute or page is not None) and not METHODS[self.method].copies:
            copying = ", ".join(name for name, method in METHODS.items() if method.copies)
            raise SpecjaxError(
                f"method {self.method!r} does not copy, so it has no sources; use {copying}"
            )
        if page is not None:
            check_writable(expand_user(page), is_file=True)

    def _job(self, source: Source) -> "Job":
        """Returns the request; options are checked before the target loads."""
        from specjax.cli.environment import use_compilation_cache
        from specjax.cli.measure import Job
        from specjax.cli.prompts import tokenize
        from specjax.cli.settings import check_seed, read_settings
        from specjax.decoding.drafter import Params
        from specjax.decoding.engine import Engine
        from specjax.decoding.sampling import Sampling
        from specjax.hub import load
        from specjax.loading import load_drafter
        from specjax.tuned import auto_choice

        sampling = Sampling(self.temperature, self.top_k, self.top_p, self.verification)
        settings = read_settings(self.method, self.set)
        self._check_attribution()
        check_seed(self.seed)
        use_compilation_cache()
        target = load(self.target, dtype=self.dtype, quantize=self.quantize)
        drafter, drafter_params = load_drafter(
            self.method, target, self.drafter, self.tuned, **settings
        )
        if self.method == "auto":
            print(auto_choice(target, self.tuned), file=sys.stderr)
        return Job(
            method=self.method,
            engine=Engine(target.model, drafter, sampling, self.max_new_tokens, target.eos),
            params=Params(target.params, drafter_params),
            target=target,
            prompt=tokenize(source, target),
            seed=self.seed,
        )
