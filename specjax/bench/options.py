"""The options of a benchmark. Imports are few, so that the command line starts fast."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

from tyro.conf import UseAppendAction, arg

from specjax.core.errors import SpecjaxError
from specjax.core.settings import setting

if TYPE_CHECKING:
    from specjax.decoding.sampling import Sampling
    from specjax.loading.targets import LoadedTarget
    from specjax.models.target import Target

ALL_METHODS = "all"
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class BenchOptions:
    """The options of `specjax bench`: what is measured, and how often."""

    methods: Annotated[str, arg(metavar="A,B")] = ""
    """Drafting methods, separated by commas, or `all`: with pocket every method but grammar,
    otherwise those that need nothing. By default those that need nothing, and those of --drafter
    and --set. Plain decoding is always included. NAME=METHOD measures a method under another name,
    which --drafter and --set then take: variants of a method run side by side."""
    drafter: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD=FOLDER")] = ()
    """The folder or hub id that a method reads: rest=FOLDER for a datastore, draft-model=FOLDER
    for a draft model, eagle2=FOLDER for a head or the run folder of `specjax train`. Only the
    target pocket ships its own."""
    set: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="METHOD.NAME=VALUE")] = ()
    """A setting of one method, such as pld-plus.num_tokens=70; `specjax methods METHOD` lists
    them."""
    tasks: Annotated[str, arg(metavar="SOURCE")] = "pocket"
    """pocket, for edits and completions of its held-out code; a JSON or JSONL file with `prompt`
    or `turns` in each record, or that of Spec-Bench, HumanEval, MBPP, GSM8K, Alpaca or
    CNN/DailyMail; the address of such a file; or a dataset of the hub as
    OWNER/NAME:CONFIGURATION:SPLIT, such as openai/gsm8k:main:test."""
    limit: int = setting(4, at_least=1)
    """Questions of each kind of task."""
    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message before every chat."""
    chat_template: Annotated[str | None, arg(metavar="FILE|vicuna")] = None
    """The form of chats: a file with a Jinja template, or vicuna, as Spec-Bench has it for all
    models; by default the target's own."""
    max_new_tokens: int = setting(128, at_least=1)
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
    runs: int = setting(3, at_least=1)
    """Runs of each prompt by each method."""
    seed: int = setting(0, at_least=0, below=2**32)
    """The seed for sampling, and for the choice of pocket's tasks."""
    peers: Annotated[str, arg(metavar="A,B")] = ""
    """Also measure the greedy decoding, prompt lookup and draft model of other libraries with the
    same weights: transformers, in float32 on a CPU (needs torch), or llama.cpp, for Llama models at
    batch 1 in the target's dtype (needs llama-cpp-python). Several, separated by commas."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Keep every run in this folder as it comes, for `specjax report`; the same command resumes an
    interrupted benchmark."""

    @property
    def temperatures(self) -> list[float]:
        return numbers_in(self.temperature, "--temperature")

    @property
    def batch_sizes(self) -> list[int]:
        sizes = numbers_in(self.batch, "--batch", int)
        if min(sizes) < 1:
            raise SpecjaxError(
                f"--batch {self.batch!r} must list numbers above 0; write --batch 1,4"
            )
        return sizes

    def sampling(self, temperature: float) -> "Sampling":
        """Returns how tokens are drawn and accepted at a temperature."""
        from specjax.decoding.sampling import Sampling

        return Sampling(temperature, verification=self.verification)


class MethodVariant(NamedTuple):
    """A method with the folder that it reads and its settings; several may share a method."""

    method: str
    source: str | None = None
    settings: Mapping[str, Any] = {}


def names_in(text: str) -> list[str]:
    """Splits a comma-separated list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def numbers_in(text: str, flag: str, convert: Callable[[str], Number] = float) -> list[Number]:
    """Splits a comma-separated list of different numbers."""
    try:
        numbers = [convert(name) for name in names_in(text)]
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers):
        kind = "whole numbers" if convert is int else "numbers"
        raise SpecjaxError(f"{flag} {text!r} must list different {kind}; write {flag} 1,4")
    return numbers


def sources_in(assignments: Sequence[str]) -> dict[str, str]:
    """Parses --drafter: the folder by name, from METHOD=FOLDER."""
    sources = {}
    for assignment in assignments:
        name, _, folder = assignment.partition("=")
        if not folder:
            raise SpecjaxError(
                f"--drafter {assignment!r} is not METHOD=FOLDER; name the method that reads it"
            )
        if name in sources:
            raise SpecjaxError(f"--drafter names {name} twice; keep one of them")
        sources[name] = folder
    return sources


def parse_variants(
    methods: str, drafters: Sequence[str], settings: Sequence[str]
) -> dict[str, MethodVariant]:
    """Parses --methods, --drafter and --set into variants by name; `all` remains a name."""
    from specjax.loading.methods import METHODS

    names, sources = _method_names(methods), sources_in(drafters)
    settings_of: dict[str, list[str]] = {}
    for assignment in settings:
        name, dot, setting = assignment.partition(".")
        if not dot or "=" in name:
            raise SpecjaxError(
                f"--set {assignment!r} is not METHOD.NAME=VALUE; write --set pld.num_tokens=20"
            )
        settings_of.setdefault(name.strip(), []).append(setting)
    variants = {}
    for name in {**names, **sources, **settings_of}:
        method, values = names.get(name, name), {}
        if name != ALL_METHODS or name in {**sources, **settings_of}:  # which are of one method
            values = METHODS.read_settings(method, settings_of.get(name, ()))
        variants[name] = MethodVariant(method, sources.get(name), values)
    return variants


def _method_names(text: str) -> dict[str, str]:
    """Parses METHOD or NAME=METHOD."""
    from specjax.loading.methods import METHODS

    names: dict[str, str] = {}
    for item in names_in(text):
        alias, equals, method = map(str.strip, item.rpartition("="))
        is_free = alias and not {".", "="} & set(alias) and alias not in (*METHODS, ALL_METHODS)
        if equals and not is_free:
            raise SpecjaxError(
                f"--methods {item!r}: {alias!r} is already taken or invalid; choose another name, "
                "such as long=pld"
            )
        name = alias or method
        if name in names:
            raise SpecjaxError(f"--methods names {name} twice; give each a different name")
        names[name] = method
    return names


def variants_for(
    methods: str, drafters: Sequence[str], settings: Sequence[str], target: "LoadedTarget"
) -> dict[str, MethodVariant]:
    """Parses as `parse_variants`, and adds the methods that `all` or an empty list stands for."""
    variants = parse_variants(methods, drafters, settings)
    is_all = variants.pop(ALL_METHODS, None) is not None
    if names_in(methods) and not is_all:
        return variants
    names = default_methods(target.model, has_parts=is_all and target.name == "pocket")
    return {name: MethodVariant(name) for name in names} | variants


def default_methods(model: "Target", has_parts: bool = False) -> list[str]:
    """Returns the methods that need no params; with `has_parts`, as pocket has, all methods.

    `grammar` is left out, since it drafts nothing without one.
    """
    from specjax.loading.methods import METHODS

    names = []
    for name in METHODS:
        with suppress(SpecjaxError):  # of a method that needs params
            if not has_parts:
                METHODS.make(name, model.config, {}).check(model, None)
            names.append(name)
    return [name for name in names if name != "grammar"]
