"""The options of a benchmark; they import little, so that the command line starts fast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from specjax.core.errors import SpecjaxError
from specjax.core.settings import setting

if TYPE_CHECKING:
    from specjax.decoding.sampling import Sampling
    from specjax.models.target import Target

ALL_METHODS = "all"


@dataclass(frozen=True)
class BenchOptions:
    """The options of `specjax bench`: what is measured, and how often."""

    methods: Annotated[str, arg(metavar="A,B")] = ""
    """Drafting methods, separated by commas, or all that this target can have. By default those
    that need nothing, and those of --drafter and --set. Plain decoding is always included.
    NAME=METHOD measures a method under another name, which --drafter and --set then take: variants
    of a method run side by side."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD=FOLDER")] = ()
    """The folder or hub id that a method reads: rest=FOLDER for a datastore, draft-model=FOLDER
    for a draft model, eagle2=FOLDER for a head or the run folder of `specjax train`. By default
    pocket's own."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD.NAME=VALUE")] = ()
    """A setting of one method, such as pld-plus.num_tokens=70; `specjax methods METHOD` lists
    them."""
    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for edits and completions of its held-out code; a JSONL file with `prompt` or
    `turns` in each line, or that of Spec-Bench, HumanEval, MBPP, GSM8K, Alpaca, CNN/DailyMail,
    CodeEditorBench, XATU or ArgRewrite; the address of such a file; or a dataset of the hub as
    OWNER/NAME:CONFIGURATION:SPLIT, such as openai/gsm8k:main:test."""
    limit: int = 4
    """Prompts of each kind of task."""
    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message before every chat."""
    chat_template: Annotated[str | None, arg(metavar="FILE|vicuna")] = None
    """The form of chats: a file with a Jinja template, or vicuna, as Spec-Bench has it for all
    models; by default the target's own."""
    max_new_tokens: int = 128
    """New tokens per prompt at most."""
    temperature: Annotated[str, arg(metavar="X,X")] = "0"
    """0 takes the most likely token; above 0, tokens are sampled. Several, separated by commas."""
    batch: Annotated[str, arg(metavar="N,N")] = "1"
    """Prompts of a kind that are decoded at once; where there are too few, the first ones are
    repeated. Several sizes, separated by commas."""
    verification: Literal["coupled", "rejection", "typical"] = "coupled"
    """coupled samples exactly plain decoding's tokens; rejection preserves only the distribution.
    typical (Medusa; epsilon 0.09, delta 0.3) is LOSSY: above temperature 0 it accepts any token
    that is likely enough."""
    runs: int = 3
    """Runs of each prompt by each method."""
    seed: int = setting(0, at_least=0, below=2**32)
    """The seed for sampling, and for the tasks that pocket makes."""
    peers: Annotated[str, arg(metavar="A,B")] = ""
    """Also measure the greedy decoding, prompt lookup and draft model of other libraries with the
    same weights: transformers, in float32 on a CPU (needs torch), or llama.cpp, for Llama models at
    batch 1 in the target's dtype (needs llama-cpp-python). Several, separated by commas."""
    trace: bool = False
    """Also time the parts of each round (draft, verify, rest) on the first and the last prompt;
    compiling them takes minutes. Needs --out."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Keep every run in this folder as it comes, for `specjax report`; the same command resumes an
    interrupted benchmark."""


def names_in(text: str) -> list[str]:
    """Returns the names in a text with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]


def temperatures_in(text: str) -> list[float]:
    """Returns the temperatures in a text with commas between.

    Raises:
        SpecjaxError: for none, or one that is no number.
    """
    return _different(text, float, "--temperature", "numbers; write 0,1")


def batches_in(text: str) -> list[int]:
    """Returns the batch sizes in a text with commas between.

    Raises:
        SpecjaxError: for none, or one that is no whole number above 0.
    """
    found = _different(text, int, "--batch", "whole numbers above 0; write 1,4")
    if min(found) < 1:
        raise SpecjaxError(f"--batch {text!r} must name whole numbers above 0; write 1,4")
    return found


def _different(text: str, kind: type, flag: str, wanted: str) -> list:
    try:
        found = [kind(name) for name in names_in(text)]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found):
        raise SpecjaxError(f"{flag} {text!r} must name different {wanted}")
    return found


def sampling_of(options: BenchOptions, temperature: float) -> "Sampling":
    """Returns how tokens are drawn and accepted.

    Raises:
        SpecjaxError: for a bad temperature.
    """
    from specjax.decoding.sampling import Sampling

    return Sampling(temperature, verification=options.verification)


def variants_in(text: str) -> dict[str, str]:
    """Returns the methods by the names under which they run, from METHOD or NAME=METHOD.

    Raises:
        SpecjaxError: for an unknown method, a name with a dot or equals sign, or one that is
            given twice or means something else.
    """
    from specjax.loading.methods import METHODS

    found: dict[str, str] = {}
    for each in names_in(text):
        name, equals, method = map(str.strip, each.rpartition("="))
        name = name if equals else method
        if method != ALL_METHODS or equals:
            METHODS.check(method, {})
        is_free = name and not {".", "="} & set(name) and name not in (*METHODS, ALL_METHODS)
        if equals and not is_free:
            raise SpecjaxError(f"--methods {each!r}: {name!r} is no free name; write long=pld")
        if name in found:
            raise SpecjaxError(f"--methods names {name} twice; give each a name of its own")
        found[name] = method
    return found


def sources_in(
    assignments: Sequence[str], methods: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns the folder of each method, from texts of the form METHOD=FOLDER.

    `methods` are those of contestants with names of their own, which then stand for METHOD.

    Raises:
        SpecjaxError: for a text of another form, or an unknown method.
    """
    from specjax.loading.methods import METHODS

    sources = {}
    for assignment in assignments:
        method, equals, folder = assignment.partition("=")
        if not (equals and folder):
            raise SpecjaxError(
                f"--drafter {assignment!r} is not METHOD=FOLDER; name the method that reads it"
            )
        METHODS.check(methods.get(method, method), {})
        if method in sources:
            raise SpecjaxError(f"--drafter names {method} twice; keep one of them")
        sources[method] = folder
    return sources


def settings_in(
    assignments: Sequence[str], methods: Mapping[str, str] = MappingProxyType({})
) -> dict[str, dict[str, Any]]:
    """Returns the settings of each method, from texts of the form METHOD.NAME=VALUE.

    `methods` are those of contestants with names of their own, which then stand for METHOD.

    Raises:
        SpecjaxError: for a text of another form, an unknown method or setting, or a bad value.
    """
    from specjax.loading.methods import METHODS

    of_method: dict[str, list[str]] = {}
    for assignment in assignments:
        method, dot, setting = assignment.partition(".")
        if not dot or "=" in method:
            raise SpecjaxError(
                f"--set {assignment!r} is not METHOD.NAME=VALUE; write --set pld.num_tokens=20"
            )
        of_method.setdefault(method.strip(), []).append(setting)
    return {
        method: METHODS.read_settings(methods.get(method, method), each)
        for method, each in of_method.items()
    }


def methods_in(text: str, model: "Target", has_parts: bool = False) -> dict[str, str]:
    """Returns the methods that `text` names, as `variants_in`; if none, all that need no params.

    Args:
        text: names with commas between, or `all`.
        model: of the target.
        has_parts: whether heads, a draft and a datastore come with the target, as with pocket.

    Raises:
        SpecjaxError: for an unknown method.
    """
    from specjax.loading.methods import METHODS

    named = variants_in(text)
    if named.pop(ALL_METHODS, None):
        needed = [name for name in METHODS if has_parts or _needs_no_params(name, model)]
        return {name: name for name in needed} | named
    return named or {name: name for name in METHODS if _needs_no_params(name, model)}


def _needs_no_params(method: str, model: "Target") -> bool:
    from specjax.loading.methods import METHODS

    try:
        METHODS.make(method, model.config, {}).check(model, None)
    except SpecjaxError:
        return False
    return True
