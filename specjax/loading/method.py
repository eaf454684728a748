"""The registry's machinery: what a method is, its settings, and how it loads itself."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import jax

from specjax.core.errors import SpecjaxError, check_type
from specjax.core.settings import check_setting
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.recycling import Recycling
from specjax.loading.hub import POCKET, pocket_part
from specjax.loading.parts import (
    classifier_of,
    load_datastore,
    load_draft,
    load_head,
    load_successors,
    source_or_pocket,
)
from specjax.loading.targets import LoadedTarget
from specjax.loading.tuned import auto_choice, tuned_for
from specjax.loading.vocabularies import shared_vocabulary
from specjax.models.config import TransformerConfig
from specjax.models.heads import HeadWeights
from specjax.models.heads.layered import with_lm_head_rows
from specjax.models.io.head_format import HeadFormat
from specjax.models.native import has_packed, pack_params
from specjax.models.precision import cheap_rows
from specjax.models.quantize import kind_of
from specjax.training.objectives.base import HeadTraining

SearchSpace = tuple[Mapping[str, tuple], ...]  # of each mapping, all combinations of the values
Loaded = tuple[Drafter, Any]  # a drafter and its params; None for a drafter that reads none

# Prompt lookup's break-even where none was measured: wide passes are slow with XLA's products on a
# CPU only.
ASSUMED_BREAK_EVEN = {"cpu": 1.5, "native": 0.3, "other": 0.1}


@dataclass(frozen=True)
class Request:
    """The arguments of `load_drafter`."""

    methods: "Registry"
    name: str
    target: LoadedTarget
    source: str | Path | None = None
    tuned_file: str | Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    uses_tuned: bool = True

    @property
    def method(self) -> "Method":
        """The method's row."""
        return self.methods[self.name]

    def load(self) -> Loaded:
        """Loads the drafter and checks that it fits the target."""
        load = self.method.load or (load_with_head if self.method.head else load_alone)
        drafter, params = load(self)
        drafter.check(self.target.model, params)
        drafter.taps.check(self.target.config)
        if has_packed(self.target.params):
            # Rounding does not make drafts worse, and halves the bytes to read.
            params = pack_params(params, "int8" if self.target.dtype.itemsize == 2 else None)
        return drafter, params

    def make(self, *parts: Any, **settings: Any) -> Drafter:
        """Makes the drafter with these settings, overridden by those of the request."""
        settings |= self.settings
        kind = kind_of(self.target.params)
        return self.methods.make(self.name, self.target.config, settings, *parts, kind=kind)

    def part(self) -> str | Path:
        """Returns the source, or by default the part that ships with pocket."""
        needs = f"method {self.name!r} needs {self.method.needs}"
        return source_or_pocket(self.target, self.source, self.method.part, needs)

    def reject_source(self) -> None:
        """Raises SpecjaxError if there is a source."""
        if self.source is not None:
            raise SpecjaxError(
                f"method {self.name!r} takes no drafter, got {str(self.source)!r}; leave it out"
            )

    def tuned(self) -> Mapping[str, Any]:
        """Returns the tuned settings of the method."""
        if not (self.method.tuned and self.uses_tuned):
            return {}
        return tuned_for(self.target, self.tuned_file).settings.get(self.name, {})


# ---- How methods load themselves ----------------------------------------------------------------


def load_alone(request: Request) -> Loaded:
    """Loads a drafter that reads nothing."""
    request.reject_source()
    return request.make(**request.tuned()), None


def load_seeded(request: Request) -> Loaded:
    """Loads a drafter that may start from the target's successors of each token."""
    drafter = cast(Recycling, load_alone(request)[0])
    count = drafter.num_successors
    return drafter, load_successors(request.target, count) if drafter.seeded else None


def load_with_head(request: Request) -> Loaded:
    """Loads a drafter with a trained head."""
    formats, format = request.methods.head_formats, cast(HeadFormat, request.method.head)
    head, params = load_head(request.part(), request.target, formats, format)
    if has_packed(request.target.params):
        bound = HeadWeights(params, request.target.model, request.target.params)
        params = with_lm_head_rows(head, bound)
    return request.make(head), params


def load_with_datastore(request: Request) -> Loaded:
    """Loads a drafter that searches a datastore."""
    params = load_datastore(request.target, request.part())
    return request.make(), params


def load_with_draft_model(request: Request) -> Loaded:
    """Loads a drafter with a draft model, and the classifier of its rule `disco`."""
    draft = load_draft(request.target, request.source)
    settings, rule_params = dict(request.settings), None
    if settings.get("rule") == "disco":
        is_pocket = request.source in (None, POCKET)
        folder = settings.get("classifier") or (pocket_part("classifier") if is_pocket else None)
        if folder is None:
            raise SpecjaxError(
                "rule 'disco' needs a classifier of this target and draft; make one with `specjax "
                "train disco` and give its folder: classifier=FOLDER"
            )
        trained, rule_params = classifier_of(request.target, draft, folder)
        settings = {name: value for name, value in settings.items() if value is not None}
        settings = {"threshold": trained.threshold, **settings, "position": trained.position}
    drafter = replace(request, settings=settings).make(draft.model)
    params = {"draft": draft.params, "rule": rule_params}
    if (shared := shared_vocabulary(request.target, draft)) is not None:
        params["vocabulary"] = request.target.place(shared)
    return drafter, params


def load_parts(request: Request) -> Loaded:
    """Loads a drafter made of other methods, which `Method.parts` names."""
    method = request.method
    fitted = method.fitted(request.target.config, {}, kind_of(request.target.params))
    defaults = {**method.settings, **fitted}
    if request.source is None and request.target.name != POCKET:
        defaults |= method.untrained
    settings, of_parts = method.split({**defaults, **request.settings})
    loaded = {}
    for part, option in method.parts.items():
        check_type(part, settings[part], str, "the name of a method")
        source = settings[option] or None if option else request.source
        inner = replace(request, name=settings[part], source=source, settings=of_parts[part])
        try:
            loaded[part] = inner.load()
        except SpecjaxError as error:
            is_missing = option and source is None and inner.method.part
            advice = f": {option}=FOLDER" if is_missing else ""
            raise SpecjaxError(f"the {part} of {request.name}: {error}{advice}") from None
        if isinstance(loaded[part][0], Auto):
            raise SpecjaxError(
                f"{request.name} does not support {settings[part]!r} as its {part}; choose "
                "another method"
            )
    drafters = {part: drafter for part, (drafter, _) in loaded.items()}
    drafter = replace(request, settings=settings | drafters).make()
    return drafter, {part: params for part, (_, params) in loaded.items()}


def load_auto(request: Request) -> Loaded:
    """Loads the method that `specjax tune machine` chose, behind its gate."""
    request.reject_source()
    choice = auto_choice(request.target, request.tuned_file)
    try:
        settings = dict(choice.settings)
        request.methods.check(choice.method, settings)
        inner = replace(request, name=choice.method, source=choice.source, settings=settings)
        drafter, params = replace(inner, uses_tuned=False).load()
        if not choice.widths:
            platform = "native" if has_packed(request.target.params) else jax.default_backend()
            assumed = ASSUMED_BREAK_EVEN.get(platform, ASSUMED_BREAK_EVEN["other"])
            return Auto(drafter, assumed), params
        if choice.widths[-1] != drafter.num_nodes:
            raise SpecjaxError(
                f"its passes have {drafter.num_nodes} nodes now, but passes of "
                f"{choice.widths[-1]} were timed"
            )
        if drafter.num_nodes == 1:
            return drafter, params
        return Auto(drafter, choice.break_even), params
    except (SpecjaxError, TypeError) as error:
        raise SpecjaxError(
            f"auto cannot load {choice.method}, which was chosen for it: {error}; run `specjax "
            "tune machine` again"
        ) from None


# ---- The row ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """One row of the registry."""

    drafter: type[Drafter]  # a frozen dataclass; its fields with defaults are the settings
    drafts: str  # a description, like the next two
    needs: str
    paper: str
    # Settings that fit a target, in place of defaults.
    settings_for: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}
    # Further ones on a CPU, where each token of a pass costs time, given the nodes of a cheap pass.
    on_cpu: Callable[[int], dict[str, Any]] = lambda nodes: {}
    load: Callable[[Request], Loaded] | None = None  # by default that of its head, if any
    part: str = ""  # the folder among pocket's weights that it reads by default, if it reads any
    head: HeadFormat | None = None  # the files of the head that it reads, if any
    training: type[HeadTraining] | None = None  # how `specjax train` makes that head
    stages: tuple[type[HeadTraining], ...] = ()  # or, one after another, as its authors made it
    copies: bool = False  # drafts from the text, so accepted tokens have a source there
    tuned: tuple[str, ...] = ()  # settings that `specjax tune` finds
    # Settings that `specjax tune machine` tries; `auto` cannot use a method without any.
    search_space: SearchSpace = ()
    # Settings that name other methods, each with the setting that is its source ("": --drafter).
    parts: Mapping[str, str] = field(default_factory=dict)
    untrained: Mapping[str, str] = field(default_factory=dict)  # parts for a target without a head

    @property
    def is_trained(self) -> bool:
        """Whether it reads a head or a draft model; `hybrid` leaves that to its parts."""
        return self.part not in ("", "datastore")

    @property
    def settings(self) -> dict[str, Any]:
        """The names of its settings, with their defaults."""
        declared = fields(self.drafter)
        return {entry.name: entry.default for entry in declared if entry.default is not MISSING}

    def fitted(
        self, config: TransformerConfig, settings: Mapping[str, Any], kind: str | None = None
    ) -> dict[str, Any]:
        """Returns what fits a target and the default device, in place of defaults.

        On a CPU a tree fits the `num_tokens` or the `depth` in `settings`, or else weights of this
        `kind` (int8, int4, None: floats); `max_tokens` belongs to the `num_tokens` beside it. A
        static tree has none of these.
        """
        fitted = self.settings_for(config)
        is_static = "choices" in settings or settings.get("tree") == "static"
        if jax.default_backend() != "cpu" or is_static:
            return fitted
        if "num_tokens" in settings and "num_tokens" in self.on_cpu(2):
            sizes = self.on_cpu(max(2, settings["num_tokens"]))
            sizes.pop("max_tokens", None)
        else:
            sizes = self.on_cpu(max(cheap_rows(config, kind), settings.get("depth", 0) + 1))
        return {**fitted, **sizes}

    def published(self, config: TransformerConfig) -> dict[str, Any]:
        """Returns the settings that a CPU replaces, as they are on other devices."""
        elsewhere = {**self.settings, **self.settings_for(config)}
        return {name: elsewhere[name] for name in self.on_cpu(2)}  # whatever the number of nodes

    def split(
        self, settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Splits off the settings of parts, which are named PART.NAME."""
        of_parts = {part: {} for part in self.parts}
        rest = dict(settings)
        for name in settings:
            part, dot, inner = name.partition(".")
            if dot and part in of_parts:
                of_parts[part][inner] = rest.pop(name)
        return rest, of_parts


class Registry(dict[str, Method]):
    """The methods by name."""

    @property
    def head_formats(self) -> tuple[HeadFormat, ...]:
        """The formats of all heads."""
        formats = {method.head.kind: method.head for method in self.values() if method.head}
        return tuple(formats.values())

    def make(
        self,
        name: str,
        config: TransformerConfig,
        settings: Mapping[str, Any],
        *parts: Any,
        kind: str | None = None,
    ) -> Drafter:
        """Makes a drafter for a target with this config.

        `parts` are the fields that are not settings: its head, or its draft model. `kind` is int8
        or int4 for a quantised target.
        """
        self.check(name, settings)
        method = self[name]
        if len(parts) != len(fields(method.drafter)) - len(method.settings):
            raise SpecjaxError(f"method {name!r} needs {method.needs}; use specjax.load_drafter")
        return method.drafter(*parts, **{**method.fitted(config, settings, kind), **settings})

    def check(self, name: str, settings: Mapping[str, Any]) -> None:
        """Checks a method's name and each of its settings, before there is a target."""
        if name not in self:
            raise SpecjaxError(f"method {name!r} is unknown; choose one of {', '.join(self)}")
        method = self[name]
        settings, of_parts = method.split(settings)
        for part, inner in of_parts.items():
            if isinstance(part_name := self._method_of(part, method, settings, inner), str):
                self.check(part_name, inner)
        for setting, value in settings.items():
            if setting not in method.settings:
                available = ", ".join(method.settings) or "none"
                raise SpecjaxError(
                    f"method {name!r} has no setting {setting!r}; its settings are: {available}"
                )
            # Defaults depend on the target and the device.
            advice = f"`specjax methods {name} --target TARGET` shows the default"
            check_setting(method.drafter, setting, value, advice)

    def _method_of(self, part: str, method: Method, settings: Mapping[str, Any], inner: Any) -> Any:
        """Returns the method of a part; if not set, the first of its defaults that fits `inner`."""
        defaults = method.settings[part], method.untrained.get(part, method.settings[part])
        fitting = [name for name in defaults if inner.keys() <= self[name].settings.keys()]
        return settings.get(part, (*fitting, *defaults)[0])

    def read_settings(self, name: str, assignments: Sequence[str]) -> dict[str, Any]:
        """Parses assignments NAME=VALUE, several in one text with commas between, and checks them.

        The fields of the method's drafter give the types.
        """
        texts = [part for text in assignments for part in re.split(r",(?=[\w.-]+=)", text)]
        settings = self._parsed(name, dict(map(_split, texts)))
        self.check(name, settings)
        return settings

    def _parsed(self, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
        if name not in self:
            return dict(texts)
        settings, of_parts = self[name].split(texts)
        types = get_type_hints(self[name].drafter)
        values = {key: _value(text, types.get(key, str)) for key, text in settings.items()}
        for part, inner in of_parts.items():
            parsed = self._parsed(self._method_of(part, self[name], settings, inner), inner)
            values |= {f"{part}.{setting}": value for setting, value in parsed.items()}
        return values


def _split(assignment: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        raise SpecjaxError(f"--set {assignment!r} is not NAME=VALUE; write --set num_tokens=20")
    return name.strip().replace("-", "_"), text.strip()


def _value(text: str, hint: Any) -> Any:
    """Parses a text as a value of a type; returns the text where it cannot."""
    try:
        if hint is bool:
            return {"true": True, "false": False}[text.lower()]
        if str in (hint, *get_args(hint)):
            return text
        return hint(text) if hint in (int, float) else ast.literal_eval(text)
    except (ValueError, KeyError, SyntaxError, TypeError):
        return text
