"""Where the time of a round goes: `python -m specjax.bench.trace --method NAME --out FILE.png`.

Every method writes the same texts round by round, in three parts: the draft, the target's pass with
its verification, and the rest (commit and what the drafter learns). Draws a few rounds over time,
above plain decoding's steps for the same tokens (ParallelSpec, figures 1 and 5), and writes the
figures as JSON beside it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import UseAppendAction

from specjax.bench.contestants import OwnMethod
from specjax.bench.measure import PLAIN
from specjax.bench.rounds import PARTS, figures, trace
from specjax.bench.tasks import read_tasks, token_ids
from specjax.bench.timeline import draw
from specjax.core.errors import SpecjaxError, exit_code
from specjax.core.files import expand_user, writable
from specjax.decoding.drafter import Params
from specjax.decoding.prompt import padded_length
from specjax.decoding.request import check_length
from specjax.decoding.sampling import Sampling
from specjax.hub import POCKET, LoadedTarget, load
from specjax.loading import load_drafter
from specjax.methods import check_settings


@dataclass(frozen=True)
class Options:
    """Where does the time of a round go?"""

    out: Path
    """The picture, a PNG file; the figures go beside it as JSON."""
    target: str = POCKET
    """The model: pocket, a folder in Hugging Face format, or a hub id."""
    method: UseAppendAction[tuple[str, ...]] = ()
    """A method as NAME, or NAME=FOLDER with what it reads; pocket has its own. May be given several
    times."""
    tasks: str = POCKET
    """pocket for edits and completions of its held-out code, or a JSONL file."""
    limit: int = 2
    """Prompts of each kind of task."""
    max_new_tokens: int = 96
    """Stop after so many new tokens, if the text has not ended before."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    rounds: int = 5
    """Rounds that are drawn of each method."""


def methods_in(texts: Sequence[str]) -> dict[str, str | None]:
    """Method -> folder or None, from texts of the form NAME or NAME=FOLDER, plain first.

    Raises:
        SpecjaxError: for no text or one of another form, an unknown method, or one named twice.
    """
    if not texts:
        raise SpecjaxError("no methods are given; add --method NAME, such as --method eagle")
    found: dict[str, str | None] = {PLAIN: None}
    for text in texts:
        name, equals, folder = text.partition("=")
        if equals and not folder:
            raise SpecjaxError(f"--method {text!r} names no folder; write {name} or {name}=FOLDER")
        check_settings(name, {})
        if name in found:
            known = "is always measured" if name == PLAIN else "is named twice"
            raise SpecjaxError(f"--method {name} {known}; leave it out")
        found[name] = folder or None
    return found


def contestants_of(
    target: LoadedTarget,
    methods: Mapping[str, str | None],
    options: Options,
    prompts: Sequence[Sequence[int]],
) -> list[OwnMethod]:
    """The methods, for these prompts.

    Raises:
        SpecjaxError: for a method whose weights are missing or do not fit.
    """
    made = []
    for name, folder in methods.items():
        drafter, params = load_drafter(name, target, folder)
        made.append(
            OwnMethod(
                name=name,
                target=target,
                drafter=drafter,
                params=Params(target.params, params),
                sampling=Sampling(options.temperature),
                max_new_tokens=options.max_new_tokens,
                padded_length=padded_length(prompts),
            )
        )
    return made


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per method, in milliseconds."""
    titles = (*PARTS, "round", "in one program", "accepted", "x plain", "x plain in one program")
    result = Table("ms per round", *titles, box=None)
    for row in rows:
        seconds = (*(f"{part}_seconds" for part in PARTS), "round_seconds", "one_program_seconds")
        shares = "accepted_length", "speed_over_plain", "one_program_speed_over_plain"
        cells = [f"{1e3 * row[name]:.3f}" for name in seconds]
        result.add_row(row["method"], *cells, *(f"{row[name]:.2f}" for name in shares))
    return result


def _check(options: Options) -> Path:
    for name in ("limit", "max_new_tokens", "rounds"):
        if getattr(options, name) < 1:
            raise SpecjaxError(f"{name} {getattr(options, name)} must be at least 1")
    out = expand_user(options.out)
    if out.suffix != ".png":
        raise SpecjaxError(f"--out {options.out} is not a PNG file; name it FILE.png")
    if not out.parent.is_dir():
        raise SpecjaxError(f"--out {options.out}: its folder does not exist; make it first")
    if find_spec("matplotlib") is None:
        raise SpecjaxError("drawing needs matplotlib; run `pip install matplotlib`")
    return out


def _run(options: Options) -> None:
    out, methods = _check(options), methods_in(options.method)
    target = load(options.target)
    tokenizer = target.require_tokenizer()
    tasks = read_tasks(options.tasks, options.limit)
    prompts = [token_ids(task, tokenizer) for task in tasks]
    check_length(max(map(len, prompts)), options.max_new_tokens, target.config)
    contestants = contestants_of(target, methods, options, prompts)
    plain, *traces = trace(contestants, prompts)
    rows = [figures(each, plain) for each in (plain, *traces)]
    Console(soft_wrap=True, markup=False, highlight=False, width=120).print(table(rows))
    device = jax.devices()[0].device_kind
    print(f"medians over the rounds of {len(prompts)} prompts, in turn, on {device}")
    about = {
        "target": target.name,
        "device": device,
        "dtype": contestants[0].dtype,
        "temperature": options.temperature,
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "drawn": {each.name: each.excerpt(options.rounds) for each in traces},
        "methods": rows,
    }
    with writable(out):
        draw(traces, plain, options.rounds).savefig(out, dpi=120)
        out.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(f"drawn in {out}, figures in {out.with_suffix('.json')}")


if __name__ == "__main__":
    sys.exit(exit_code(partial(_run, tyro.cli(Options, description=__doc__))))
