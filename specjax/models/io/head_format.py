"""Describes how a kind of head is stored, as data for `specjax.models.io.head_files`."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from specjax.core.errors import SpecjaxError
from specjax.models.config import TransformerConfig
from specjax.models.quantize import dequantized
from specjax.models.transformer import Transformer

WEIGHTS = "model.safetensors"  # where other loaders look first
ABOUT = "specjax"  # the key of config.json for what other loaders do not read
NOTHING = r"(?!)"  # a pattern
Values = Mapping[str, Any]  # of config.json
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


def has(shapes: Shapes, pattern: str) -> bool:
    """Returns whether a tensor has such a name."""
    return any(re.fullmatch(pattern, name) for name in shapes)


def count(shapes: Shapes, pattern: str) -> int:
    """Returns how many different numbers the group of the pattern takes in the names."""
    matches = [match for name in shapes if (match := re.fullmatch(pattern, name))]
    return len({match[match.lastindex or 0] for match in matches})


def rows(shapes: Shapes, pattern: str) -> int:
    """Returns the number of rows of the first tensor with such a name; 0 without one."""
    matching = (shape for name, shape in shapes.items() if shape and re.fullmatch(pattern, name))
    return next(matching, (0,))[0]


class Names(NamedTuple):
    """Maps params whose paths begin with `path` to stored names that begin with `stored`.

    {} is a number in both. `stored` may hold fields of the head's config, and {copy}, the number of
    a copy, where a file holds these params several times.
    """

    path: str
    stored: str
    copies: Callable[[Any], Iterable[int]] = lambda config: (0,)


class Signature(NamedTuple):
    """The patterns by which a kind of head is recognised."""

    title: str  # with an article, for messages
    tensors: str = NOTHING  # of a whole name
    config: str = NOTHING  # of a part of a key, `model_type` or `architectures`, in small letters


SPECULATORS = Signature(
    "a head in the format of speculators, which is not supported", config="speculators_model_type"
)
WHOLE_MODEL = Signature("a whole model", tensors=r"norm\.weight|layers\.0\.input_layernorm\.weight")


@dataclass(eq=False)
class HeadFile:
    """A head that is about to be written; a layout's `edit` may change the last three fields."""

    folder: Path
    config: Any  # the head's
    target: TransformerConfig
    target_params: Any  # or None
    target_name: str | None
    values: dict[str, Any]  # of config.json
    tensors: dict[str, Any]
    name: str

    def lm_head(self, reader: str) -> Float[Array, "V D"]:
        """Returns the target's LM head, for a `reader` that needs one where the head has none."""
        if self.target_params is None:
            raise SpecjaxError(
                f"cannot save {self.folder}: this head uses the target's LM head, and {reader} "
                "reads one from the file; give the target's params as well"
            )
        return dequantized(Transformer(self.target).lm_head(self.target_params))

    def name_target(self) -> None:
        """Adds the target's name to config.json, if it is known."""
        if self.target_name is not None:
            self.values["base_model_name_or_path"] = self.target_name


@dataclass(frozen=True, eq=False)
class Layout:
    """A head's files for one reader; None means as the format describes."""

    file: str = WEIGHTS
    names: Callable[[Any], tuple[Names, ...]] | None = None  # from the head's config
    values: Callable[[Any], Values] | None = None  # of config.json, from the head's config
    has_embedding: bool = True  # where the format has one, and the target's is known
    edit: Callable[[HeadFile], None] = lambda file: None


@dataclass(frozen=True, eq=False)
class HeadFormat:
    """The way in which one kind of head is stored; patterns match whole names without prefix."""

    kind: str
    signature: Signature
    module: Callable[[Any], Any]
    # The head's config, from its tensors, the layers in config.json (without `layer_keys` the
    # target's config), config.json, and the target's config.
    config: Callable[[Shapes, TransformerConfig, Values, TransformerConfig], Any]
    claims: Callable[[Any], Values]  # values of config.json that the head's config determines
    names: tuple[tuple[Names, ...], ...]  # alternatives: the best match for a file is taken
    layouts: Mapping[str, Layout]  # by reader; training writes the first
    layer_keys: Mapping[str, str] | None = None  # renamed keys of layers; None: no layers described
    sizes: Mapping[str, str] = field(default_factory=dict)  # pattern: the target's size, its rows
    prefix: str = ""  # pattern
    is_within_model: bool = False  # then tensors without the prefix are the target's
    ignored: Callable[[Values], str] = lambda values: NOTHING  # pattern of the target's tensors
    optional: Callable[[Values], str] = lambda values: NOTHING  # zero if a file has none of them
    embedding: str = ""  # the name of a copy of the target's
    decode: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params  # after reading

    @property
    def has_sign_in_config(self) -> bool:
        """Whether config.json shows that a head is of this kind."""
        return self.signature.config != NOTHING

    @property
    def files(self) -> tuple[str, ...]:
        """The names of weight files that only heads have."""
        names = (layout.file for layout in self.layouts.values())
        return tuple(name for name in names if name != WEIGHTS)
