"""Describes how a kind of head is stored, as data.

The formats are in `specjax.models.io.formats`; `specjax.models.io.head_files` reads and writes by
them.
"""

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
TORCH_WEIGHTS = "pytorch_model.bin"  # the only file that EAGLE's first code reads
NOTHING = r"(?!)"  # a pattern
Shapes = Mapping[str, tuple[int, ...]]  # of tensors, by name


def has(pattern: str) -> Callable[[Shapes], bool]:
    """Returns whether a tensor has such a name."""
    return lambda shapes: any(re.fullmatch(pattern, name) for name in shapes)


def count(pattern: str) -> Callable[[Shapes], int]:
    """Returns how many different numbers the group of the pattern takes in the names."""
    return lambda shapes: len(
        {each[each.lastindex or 0] for name in shapes if (each := re.fullmatch(pattern, name))}
    )


def rows(pattern: str, absent: int | None = None) -> Callable[[Shapes], int | None]:
    """Returns the number of rows of the first tensor with such a name; `absent` without one."""
    return lambda shapes: next(
        (shape[0] for name, shape in shapes.items() if shape and re.fullmatch(pattern, name)),
        absent,
    )


class Names(NamedTuple):
    """Maps params whose paths begin with `ours` to stored names that begin with `theirs`.

    {} is a number in both. `theirs` may hold fields of the head's config, and {copy}, the number of
    a copy, where a file holds these params several times.
    """

    ours: str
    theirs: str
    copies: Callable[[Any], Iterable[int]] = lambda config: (0,)


@dataclass(frozen=True)
class Signs:
    """The patterns by which a kind of head is recognised."""

    title: str  # with an article, for messages
    tensors: str = NOTHING  # of a whole name
    config: str = NOTHING  # of a part of a key, `model_type` or `architectures`, in small letters


SPECULATORS = Signs(
    "a head in the format of speculators, which is not supported", config="speculators_model_type"
)
WHOLE_MODEL = Signs("a whole model", tensors=r"norm\.weight|layers\.0\.input_layernorm\.weight")


@dataclass(eq=False)
class HeadFile:
    """A head that is about to be written; its layout may change what is written."""

    folder: Path
    config: Any  # the head's
    target: TransformerConfig
    target_params: Any  # or None
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


@dataclass(frozen=True, eq=False)
class Layout:
    """The differences of a head written for one reader; None means as the format says."""

    file: str = WEIGHTS
    names: Callable[[Any], tuple[Names, ...]] | None = None  # by the head's config
    keys: Mapping[str, str] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)  # further values of config.json
    has_embedding: bool = True  # where the format has one, and the target's is known
    names_target: bool = False  # in config.json
    edit: Callable[[HeadFile], None] = lambda file: None


@dataclass(frozen=True, eq=False)
class HeadFormat:
    """The way in which one kind of head is stored; patterns match whole names without prefix."""

    kind: str
    signs: Signs
    module: Callable[[Any], Any]
    config: Callable[..., Any]  # (layers in config.json, or else the target's config, **fields)
    fields: Mapping[str, Callable[[Shapes], Any]]  # of the config, derived from the tensors
    keys: Mapping[str, str]  # of config.json, with their fields; must agree with the tensors
    names: tuple[tuple[Names, ...], ...]  # alternatives: what fits a file best is taken
    layouts: Mapping[str, Layout]  # by reader; training writes the first
    spellings: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)  # of fields, by key
    layer_keys: Mapping[str, str] | None = None  # renamed keys of layers; None: there are none
    sizes: Mapping[str, str] = field(default_factory=dict)  # pattern: the target's size, its rows
    limits: Mapping[str, tuple] = field(default_factory=dict)  # the values that a key may have
    prefix: str = ""  # pattern
    is_within_model: bool = False  # then tensors without the prefix are the target's
    ignored: str = NOTHING  # pattern of tensors that are the target's
    ignored_if: Mapping[str, str] = field(default_factory=dict)  # the same, by a key that is true
    embedding: str = ""  # the name of a copy of the target's
    optional: str = NOTHING  # pattern of tensors that are zero if a file has none of them
    required_if: str = ""  # a key: if it is true, they are not optional
    repeated: str = ""  # what the copies are, for messages
    unsupported: tuple[Signs, ...] = ()  # relatives that cannot be read
    # Further fields of the head's config: from config.json and the target's config.
    described: Callable[[Mapping[str, Any], TransformerConfig], dict[str, Any]] = (
        lambda values, target: {}
    )
    decode: Callable[[dict[str, Any]], dict[str, Any]] = lambda params: params  # what was read

    @property
    def files(self) -> tuple[str, ...]:
        """The names of weight files that only heads have."""
        return tuple(each.file for each in self.layouts.values() if each.file != WEIGHTS)
