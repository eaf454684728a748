"""What a benchmark can be told; apart from the rest, so that the command line reads it at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tyro.conf import UseAppendAction

from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.decoding.sampling import Sampling
    from specjax.models.config import TransformerConfig

ALL_METHODS = "all"


@dataclass(frozen=True)
class BenchOptions:
    """What is measured, and how often."""

    methods: str = ""
    """Drafting methods, with commas between, or all that this target can have; by default those
    that need nothing but the target, and those of --drafter. Plain decoding is always among
    them."""
    drafter: UseAppendAction[tuple[str, ...]] = ()
    """What a method reads, as METHOD=FOLDER: rest=FOLDER for a datastore, draft-model=FOLDER (or a
    hub id) for a draft, eagle2=FOLDER (or a hub id, or the run of `specjax train`) for a head; by
    default pocket's own. May be given for several methods."""
    tasks: str = "pocket"
    """pocket for edits and completions of its held-out code, or a file: Spec-Bench's questions,
    HumanEval, MBPP, GSM8K, Alpaca or CNN/DailyMail as JSONL, or lines with `prompt` or `turns`."""
    limit: int = 4
    """Prompts of each kind of task."""
    max_new_tokens: int = 128
    """Stop after so many new tokens, if the text has not ended before."""
    temperature: str = "0"
    """0 takes the most likely token; above, tokens are drawn. Several with commas between."""
    batch: str = "1"
    """How many prompts of a kind are served at once; where there are too few, the first ones stand
    for more. Several with commas between."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled draws exactly what plain decoding draws; rejection keeps the distribution only.
    typical, of Medusa (epsilon 0.09, delta 0.3), is LOSSY: above temperature 0 it accepts whatever
    is likely enough."""
    runs: int = 3
    """How often each method runs each prompt."""
    seed: int = 0
    """Decides what is drawn, and which tasks pocket makes."""
    peers: str = ""
    """transformers: also measure its plain greedy decoding of the same weights, its prompt lookup
    and its assisted generation, in float32 on CPU (needs torch)."""
    trace: bool = False
    """Also time draft, verify and rest of the rounds on their own, on the first and the last
    prompt; takes more programs, and so minutes. Needs --out."""
    out: Path | None = None
    """Keep every run in this folder as it comes, for `specjax report`; the same command goes on
    with what was stopped."""


def names_in(text: str) -> list[str]:
    """The names in a text with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def temperatures_in(text: str) -> list[float]:
    """The temperatures in a text with commas between.

    Raises:
        SpecjaxError: for none, or one that is no number.
    """
    try:
        found = [float(name) for name in names_in(text)]
    except ValueError:
        raise SpecjaxError(f"--temperature {text!r} is not a list of numbers; write 0,1") from None
    if not found or len(set(found)) < len(found):
        raise SpecjaxError(f"--temperature {text!r} must name different numbers; write 0,1")
    return found


def batches_in(text: str) -> list[int]:
    """The sizes of batches in a text with commas between.

    Raises:
        SpecjaxError: for none, or one that is no whole number above 0.
    """
    try:
        found = [int(name) for name in names_in(text)]
    except ValueError:
        found = []
    if not found or min(found) < 1 or len(set(found)) < len(found):
        raise SpecjaxError(f"--batch {text!r} must name different whole numbers; write 1,4")
    return found


def sampling_of(options: BenchOptions, temperature: float) -> "Sampling":
    """How tokens are drawn and accepted.

    Raises:
        SpecjaxError: for a bad temperature.
    """
    from specjax.decoding.sampling import Sampling

    return Sampling(temperature, verification=options.verification)


def sources_in(assignments: Sequence[str]) -> dict[str, str]:
    """Method -> folder, from texts of the form METHOD=FOLDER.

    Raises:
        SpecjaxError: for a text of another form, or an unknown method.
    """
    from specjax.methods import check_settings

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


def methods_in(text: str, config: "TransformerConfig", has_parts: bool = False) -> list[str]:
    """The methods that `text` names; if it names none, all that serve this target without params.

    Args:
        text: names with commas between, or `all`.
        config: of the target.
        has_parts: whether heads, a draft and a datastore come with the target, as with pocket.

    Raises:
        SpecjaxError: for an unknown method.
    """
    from specjax.methods import METHODS, check_settings

    names = names_in(text)
    if ALL_METHODS in names and has_parts:
        return list(METHODS)
    names = [] if ALL_METHODS in names else names
    for name in names:
        check_settings(name, {})
    return names or [name for name in METHODS if _needs_no_params(name, config)]


def _needs_no_params(method: str, config: "TransformerConfig") -> bool:
    from specjax.methods import make_drafter

    try:
        make_drafter(method, config, {}).check(config, None)
    except SpecjaxError:
        return False
    return True
