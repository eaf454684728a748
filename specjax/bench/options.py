"""What a benchmark can be told; apart from the rest, so that the command line reads it at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from specjax.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.models.config import LlamaConfig


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    methods: str = ""
    """Drafting methods, with commas between; by default all that need nothing but the target, and
    those of --drafter. Plain decoding is always among them."""
    drafter: UseAppendAction[tuple[str, ...]] = ()
    """What a method reads, as METHOD=FOLDER: rest=FOLDER for a datastore, draft-model=FOLDER (or a
    hub id) for a draft, eagle2=FOLDER (or a hub id, or the run of `specjax train`) for a head; by
    default pocket's own. May be given for several methods."""
    tasks: str = "pocket"
    """pocket for edits and completions of its held-out code, or a JSONL file with `prompt` or
    `turns` in each line."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    temperature: float = 0.0
    """0 takes the most likely token; above, tokens are drawn."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled draws exactly what plain decoding draws; rejection keeps the distribution only.
    typical, of Medusa (epsilon 0.09, delta 0.3), is LOSSY: above temperature 0 it accepts whatever
    is likely enough."""
    runs: int = 3
    """How often each method runs each prompt."""
    seed: int = 0
    """Decides what is drawn, and which tasks pocket makes."""
    peers: str = ""
    """transformers: also measure its plain greedy decoding of the same weights (needs torch)."""
    out: Path | None = None
    """Also append the results to this file, one JSON object per line, as they come."""


def names_in(text: str) -> list[str]:
    """The names in a text with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def sources_in(assignments: Sequence[str]) -> dict[str, str]:
    """Method -> folder, from texts of the form METHOD=FOLDER.

    Raises:
        SpecjaxError: for a text of another form, or an unknown method.
    """
    from specjax.decoding.drafters import check_settings

    sources = {}
    for assignment in assignments:
        method, equals, folder = assignment.partition("=")
        if not (equals and folder):
            raise SpecjaxError(f"--drafter {assignment!r} is not METHOD=FOLDER; write rest=FOLDER")
        check_settings(method, {})
        if method in sources:
            raise SpecjaxError(f"--drafter names {method} twice; keep one of them")
        sources[method] = folder
    return sources


def methods_in(text: str, config: "LlamaConfig") -> list[str]:
    """The methods that `text` names; if it names none, all that serve this target without params.

    Raises:
        SpecjaxError: for an unknown method.
    """
    from specjax.decoding.drafters import METHODS, check_settings

    names = names_in(text)
    for name in names:
        check_settings(name, {})
    return names or [name for name in METHODS if _needs_no_params(name, config)]


def _needs_no_params(method: str, config: "LlamaConfig") -> bool:
    from specjax.decoding.drafters import make_drafter

    try:
        make_drafter(method, config, {}).check(config, None)
    except SpecjaxError:
        return False
    return True
