"""The registry: one row per method, from which commands, loading, training and tests derive."""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from specjax.core.errors import SpecjaxError
from specjax.core.settings import check_setting
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.hybrid import PARTS, Hybrid
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec, ParallelSpecMedusa
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.models.config import TransformerConfig
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.formats.eagle3 import EAGLE3
from specjax.models.io.formats.hydra import HYDRA
from specjax.models.io.formats.medusa import MEDUSA
from specjax.models.io.formats.parallel import PARALLEL
from specjax.models.io.head_format import HeadFormat
from specjax.training.objectives.base import HeadTraining
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.hass import HassFirstStage, HassSecondStage, HassTraining
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining, ParallelMedusaTraining

SearchSpace = tuple[Mapping[str, tuple], ...]  # of each mapping, all combinations of the values


@dataclass(frozen=True)
class Method:
    """One row of the registry."""

    drafter: type[Drafter]  # a frozen dataclass; its fields with defaults are the settings
    drafts: str  # in words, like the next two
    needs: str
    paper: str
    # Settings that fit a target, in place of defaults.
    settings_for: Callable[[TransformerConfig], dict[str, Any]] = lambda config: {}
    part: str = ""  # the folder among pocket's weights that it reads by default; "": it reads none
    head: HeadFormat | None = None  # the files of the head that it reads, if any
    training: type[HeadTraining] | None = None  # how `specjax train` makes that head
    stages: tuple[type[HeadTraining], ...] = ()  # or, one after another, as its authors made it
    copies: bool = False  # drafts from the text, so accepted tokens have a source there
    tuned: tuple[str, ...] = ()  # settings that `specjax tune` finds
    # Settings that `specjax tune machine` tries; `auto` cannot use a method without any.
    search_space: SearchSpace = ()

    @property
    def is_trained(self) -> bool:
        """Whether it drafts with trained weights: a head, or a draft model."""
        return self.part not in ("", "datastore")

    @property
    def settings(self) -> dict[str, Any]:
        """The names of its settings, with their defaults."""
        return {
            field.name: field.default
            for field in fields(self.drafter)
            if field.default is not MISSING
        }


HYBRID = "hybrid"
COPIED = (3, 10, 31)  # tokens of a chain that is copied
PUBLISHED: Mapping[str, tuple] = {}  # the tuned settings, or the defaults
CHAIN: Mapping[str, tuple] = {"choices": (((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),)}
DEPTH_TREES: SearchSpace = (
    PUBLISHED,
    {"tree": ("dynamic",), "top_k": (1,)},
    {"tree": ("dynamic",), "num_tokens": (8, 24)},
)
BEAMS: SearchSpace = (
    PUBLISHED,
    {"top_k": (1,), "depth": (3, 5)},
    {"top_k": (4,), "depth": (4,), "num_tokens": (8, 24)},
)

METHODS: dict[str, Method] = {
    "plain": Method(
        Autoregressive,
        "nothing: one token per pass",
        "nothing",
        "plain decoding, the baseline",
    ),
    "pld": Method(
        PromptLookup,
        "what followed an earlier occurrence of the last 3 tokens (or 2, or 1)",
        "nothing",
        "Prompt Lookup Decoding (Saxena, 2023)",
        copies=True,
        search_space=({"num_tokens": COPIED, "allow_shorter": (True,)},),
    ),
    "pld-plus": Method(
        PromptLookupPlus,
        "what followed the last token where the target's hidden states are most similar",
        "nothing",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"layer": PromptLookupPlus.layer_for(config)},
        copies=True,
        tuned=("layer", "num_tokens"),
        search_space=({"num_tokens": COPIED},),
    ),
    "pld-plus-attention": Method(
        PromptLookupPlusAttention,
        "what followed the last token where the target's induction heads attend most",
        "nothing",
        "PLD+ (Somasundaram et al., 2024)",
        lambda config: {"heads": PromptLookupPlusAttention.heads_for(config)},
        copies=True,
        tuned=("heads", "num_tokens"),
        search_space=({"num_tokens": COPIED},),
    ),
    "lookahead": Method(
        Lookahead,
        "n-grams that the target itself guessed in parallel",
        "nothing",
        "Lookahead Decoding (Fu et al., 2024)",
    ),
    "draft-model": Method(
        DraftModel,
        "the tokens of a small model, until a rule stops it: fixed, heuristic, confidence or disco",
        "a draft model of the target's vocabulary; for disco a classifier",
        "Leviathan et al. (2023); DISCO (Mamou et al., 2024)",
        part="draft",
        tuned=("rule", "length", "threshold", "max_length", "classifier"),
        search_space=(
            {"rule": ("fixed",), "length": (2, 5)},
            {"rule": ("confidence", "disco"), "max_length": (8,)},
        ),
    ),
    "rest": Method(
        Retrieval,
        "a tree of the most frequent continuations in a datastore",
        "a datastore",
        "REST (He et al., 2023)",
        part="datastore",
        search_space=({"max_drafted": (7, 23, 63)},),
    ),
    "medusa": Method(
        Medusa,
        "a tree from heads that each predict one depth",
        "Medusa heads",
        "Medusa (Cai et al., 2024)",
        part="medusa",
        head=MEDUSA,
        training=MedusaTraining,
        tuned=("choices",),
        search_space=DEPTH_TREES,
    ),
    "hydra": Method(
        Hydra,
        "Medusa's tree from heads that see the tokens drafted above",
        "Hydra heads",
        "Hydra (Ankner et al., 2024)",
        part="hydra",
        head=HYDRA,
        training=HydraTraining,
        tuned=("choices",),
        search_space=(PUBLISHED, CHAIN),
    ),
    "eagle": Method(
        Eagle,
        "a static tree from a one-layer head that predicts the target's next feature",
        "an EAGLE head",
        "EAGLE (Li et al., 2024 a)",
        part="eagle",
        head=EAGLE,
        training=EagleTraining,
        search_space=(PUBLISHED, CHAIN),
    ),
    "eagle2": Method(
        Eagle2,
        "a tree from an EAGLE head that grows where the head is confident",
        "an EAGLE head",
        "EAGLE-2 (Li et al., 2024 b)",
        part="eagle",
        head=EAGLE,
        search_space=BEAMS,
    ),
    "hass": Method(
        Eagle2,
        "the tree of EAGLE-2 from a head trained in the contexts of drafting",
        "a head trained with HASS",
        "HASS (Zhang et al., 2025)",
        part="hass",
        head=EAGLE,
        training=HassTraining,
        stages=(HassFirstStage, HassSecondStage),
        search_space=BEAMS,
    ),
    "eagle3": Method(
        Eagle2,
        "the tree of EAGLE-2 from a head that reads three of the target's layers",
        "an EAGLE-3 head",
        "EAGLE-3 (Li et al., 2025)",
        lambda config: {"depth": 8},  # heads are trained that far
        part="eagle3",
        head=EAGLE3,
        training=Eagle3Training,
        search_space=BEAMS,
    ),
    "parallel-medusa": Method(
        ParallelSpecMedusa,
        "Medusa's tree from one pass of one layer over the text and mask tokens",
        "a ParallelSpec head",
        "ParallelSpec (Xiao et al., 2024)",
        part="parallel-medusa",
        head=PARALLEL,
        training=ParallelMedusaTraining,
        tuned=("choices",),
        search_space=DEPTH_TREES,
    ),
    "parallel-eagle": Method(
        ParallelSpec,
        "EAGLE's tree from one pass of an EAGLE head over the text and mask tokens",
        "a ParallelSpec head",
        "ParallelSpec (Xiao et al., 2024)",
        part="parallel-eagle",
        head=PARALLEL,
        training=ParallelEagleTraining,
        tuned=("choices",),
        search_space=DEPTH_TREES,
    ),
    HYBRID: Method(
        Hybrid,
        "what two other methods draft, in one tree; by default `pld-plus` and `hass`",
        "what both need",
        "two methods in one tree",
    ),
    "auto": Method(
        Auto,
        "with the method that `specjax tune machine` chose, while it pays; untuned, with `pld`",
        "what that method needs",
        "a gate in front of another method",
        tuned=("machine", "method", "settings", "source", "break_even", "widths"),
    ),
}

HEAD_FORMATS = tuple({row.head.kind: row.head for row in METHODS.values() if row.head}.values())

BOOLEANS = {"true": True, "false": False}
SETTING_TYPES = {  # declared type of a setting: what counts as one, and what messages call it
    bool: (bool, "True or False"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
    str: (str, "a text"),
}


def make_drafter(
    method: str, config: TransformerConfig, settings: dict[str, Any], *parts: Any
) -> Drafter:
    """Makes the drafter of a method with `settings` in place of its defaults.

    Args:
        method: a name in `METHODS`.
        config: of the target.
        settings: by name.
        parts: the drafter's other fields: its head, or its draft model.

    Raises:
        SpecjaxError: for an unknown method or setting, a setting out of range, or missing parts.
    """
    check_settings(method, settings)
    row = METHODS[method]
    if len(parts) != len(fields(row.drafter)) - len(row.settings):
        raise SpecjaxError(f"method {method!r} needs {row.needs}; use specjax.load_drafter")
    return row.drafter(*parts, **(row.settings_for(config) | settings))


def check_settings(method: str, settings: dict[str, Any], are_all: bool = True) -> None:
    """Checks a method's settings before there is a target; raises what `make_drafter` would.

    Unless `are_all`, tuned ones may join them, so what only does not fit a default is let through.
    """
    if method not in METHODS:
        raise SpecjaxError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    row = METHODS[method]
    declared = get_type_hints(row.drafter)
    settings, of_parts = split_parts(method, settings)
    for part, own in of_parts.items():
        if isinstance(name := (row.settings | settings)[part], str):
            check_settings(name, own, are_all=False)
    for name, value in settings.items():
        if name not in row.settings:
            has = f"it has {', '.join(row.settings)}" if row.settings else "it has none"
            if method == "auto":
                has += ": `specjax tune machine` chooses them; name a method of your own to set any"
            raise SpecjaxError(f"method {method!r} has no setting {name!r}; {has}")
        if not _is_of(value, declared[name]):
            wanted = SETTING_TYPES.get(declared[name], (None, f"of the form {declared[name]}"))[1]
            raise SpecjaxError(
                f"setting {name} of method {method!r} is {value!r}, not {wanted}; "
                "`specjax methods` shows the defaults"
            )
    blank = object.__new__(row.drafter)  # its head or draft is not known yet
    for field in fields(row.drafter):
        value = (row.settings | settings).get(field.name)
        object.__setattr__(blank, field.name, value)
    try:
        for name, value in (row.settings | settings).items():
            check_setting(row.drafter, name, value)
        blank.check_settings()
    except SpecjaxError:
        if are_all or set(row.tuned) <= set(settings):
            raise


def read_settings(method: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Parses assignments `name=value` to values of the types that the method declares.

    Raises:
        SpecjaxError: if the method or a setting is unknown, or a value is not allowed.
    """
    each = [part for text in assignments for part in re.split(r",(?=[\w.-]+=)", text)]
    settings = _values(method, dict(map(_split, each)))
    check_settings(method, settings, are_all=False)
    return settings


def split_parts(
    method: str, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns the settings of a method, and those of the methods that it wraps, by part.

    Those of a part are named PART.NAME.
    """
    parts = PARTS if method == HYBRID else ()
    own = {part: {} for part in parts}
    rest = dict(settings)
    for name in settings:
        part, dot, inner = name.partition(".")
        if dot and part in parts:
            own[part][inner] = rest.pop(name)
    return rest, own


def _values(method: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values of the types that the method, or the one that is its part, declares."""
    if method not in METHODS:
        return dict(texts)
    own, of_parts = split_parts(method, texts)
    types = get_type_hints(METHODS[method].drafter)
    values = {name: _value(name, text, types.get(name, str)) for name, text in own.items()}
    for part, inner in of_parts.items():
        found = _values((METHODS[method].settings | own)[part], inner)
        values |= {f"{part}.{name}": value for name, value in found.items()}
    return values


def _split(assignment: str) -> tuple[str, str]:
    name, equals, text = assignment.partition("=")
    if not (name and equals):
        raise SpecjaxError(f"--set {assignment!r} is not NAME=VALUE; write --set num_tokens=20")
    return name.strip().replace("-", "_"), text.strip()


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        if kind is bool:
            return BOOLEANS[text.lower()]
        if str in get_args(kind):
            return text
        if kind in (int, float, str):
            return kind(text)
        return ast.literal_eval(text)
    except (ValueError, KeyError, SyntaxError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}
        raise SpecjaxError(
            f"--set {name}={text}: {text!r} is not {expected.get(kind, 'a Python value')}; "
            "see the defaults in `specjax methods`"
        ) from None


def _is_of(value: Any, declared: Any) -> bool:
    """Whether `value` has the type that a field declares; types of other forms are not judged."""
    if get_origin(declared) is tuple:
        inner = get_args(declared)
        if not isinstance(value, tuple):
            return False
        inner = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return len(value) == len(inner) and all(map(_is_of, value, inner))
    if isinstance(declared, UnionType):
        return any(_is_of(value, each) for each in get_args(declared))
    if declared is NoneType:
        return value is None
    if declared not in SETTING_TYPES:
        return True
    return isinstance(value, SETTING_TYPES[declared][0]) and isinstance(value, bool) == (
        declared is bool
    )
