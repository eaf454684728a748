"""Reads and writes drafter heads as files: one engine for every kind of head and every layout.

A folder holds `config.json` and flat tensors. A `HeadFormat` says, as data, which of them belong to
a kind of head and how layouts differ; the formats are in `specjax.models.io.formats`. The tensors
decide what the head is, because published configs are often silent or wrong; what the config does
say must agree. Tensors that the head does not have are an error: a head that is read in part drafts
badly without any visible sign.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable
from specjax.models.config import CHECK, TransformerConfig, Variant
from specjax.models.families import config_from, config_values, llama
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_format import (
    NOTHING,
    SPECULATORS,
    TORCH_WEIGHTS,
    WEIGHTS,
    WHOLE_MODEL,
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Shapes,
    Signs,
    has,
    rows,
)
from specjax.models.io.huggingface import BUFFER, check_weights, read_params, write_weights
from specjax.models.io.weights import StoredTensor, stored_tensors
from specjax.models.quantize import dequantized
from specjax.models.shapes import expected_shapes, shape_mismatches
from specjax.models.transformer import Transformer

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"  # the subfolder of a training run
HEAD = "head"  # the folder of the head within that of its training run
ABOUT = "specjax"  # the key of config.json for what other loaders do not read
SIZES = {  # keys of config.json: fields of the target's config
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "truncated_vocab_size": "vocab_size",
}


def made_by_run(folder: Path, name: str) -> Path:
    """Returns what the run of `specjax train` in a folder made, or the folder if it holds no run.

    Raises:
        SpecjaxError: if the run has not finished.
    """
    if (folder / name).is_dir():
        return folder / name
    if (folder / CHECKPOINTS).is_dir():
        raise SpecjaxError(
            f"{folder} is a run that has not finished and has no {name} yet; repeat its command "
            "with --resume"
        )
    return folder


# ---- Which kind of head it is ------------------------------------------------------------------


def detect_format(
    folder: Path, formats: Iterable[HeadFormat], wanted: HeadFormat | None = None
) -> HeadFormat:
    """Returns the format of a head by its config alone; its weights may not be there yet.

    A config that gives nothing away is of the `wanted` format, or else of that without such signs.

    Raises:
        SpecjaxError: if the config is missing or damaged, or describes another kind of head than
            `wanted`, or one that is not supported.
    """
    title, formats = wanted.signs.title if wanted else "a drafter head", list(formats)
    values = _read_config(folder, title)
    kinds = map(values.get, ("model_type", "speculators_model_type", "architectures"))
    keys = (key for key, value in values.items() if value is not None)
    said = " ".join(map(str, (*keys, *kinds))).lower()
    found = next((each for each in _signs_of(formats) if re.search(each.config, said)), None)
    if found is None:
        return wanted or next(each for each in formats if each.signs.config == NOTHING)
    chosen = next((each for each in formats if each.signs is found), None)
    if chosen is None or wanted not in (None, chosen):
        raise SpecjaxError(f"{expand_user(folder) / CONFIG} describes {found.title}; give {title}")
    return chosen


def _signs_of(formats: Iterable[HeadFormat]) -> list[Signs]:
    """Returns all that a folder may hold; what comes first counts."""
    formats = sorted(formats, key=lambda each: each.signs.config == NOTHING)  # these come last
    unsupported = [signs for each in formats for signs in each.unsupported]
    return [SPECULATORS, *unsupported, *(each.signs for each in formats), WHOLE_MODEL]


def _check_tensors(folder: Path, shapes: Shapes, formats: Iterable[HeadFormat]) -> None:
    """Raises SpecjaxError unless the tensors are those of the first format."""
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    wanted, *_ = (each.signs for each in formats)
    found = next((each for each in _signs_of(formats) if has(each.tensors)(bare)), None)
    if found is not wanted:
        what = found.title if found else f"tensors of no known kind ({', '.join(list(bare)[:3])})"
        raise SpecjaxError(f"{folder} holds {what}; give {wanted.title}")


# ---- What the config tells ---------------------------------------------------------------------


def read_about(folder: Path) -> dict[str, Any]:
    """Returns what the head was saved with as `about`; {} for a head of others.

    Raises:
        SpecjaxError: if the config is missing or damaged.
    """
    about = _read_config(folder).get(ABOUT, {})
    if not isinstance(about, dict):
        raise SpecjaxError(f"{folder / CONFIG}: {ABOUT} {about!r} is not an object; {CHECK}")
    return about


def check_owner(folder: Path, target: str) -> None:
    """Raises SpecjaxError if the head was trained for a target of another fingerprint."""
    owner = read_about(folder).get("target", target)
    if owner != target:
        raise SpecjaxError(
            f"{folder}: this head was trained for target {owner}, but this one is {target}; "
            "give a head of this target, or train one"
        )


def _read_config(folder: Path, title: str = "a drafter head") -> dict[str, Any]:
    path = expand_user(folder) / CONFIG
    with readable(path):
        exists = path.is_file()
    if not exists:
        raise SpecjaxError(f"{folder} holds no {CONFIG}; give the folder of {title}")
    return read_json(path)


# ---- Reading -----------------------------------------------------------------------------------


def load_head(
    folder: Path,
    format: HeadFormat,
    target: TransformerConfig,
    dtype: DTypeLike,
    progress: bool = False,
    *,
    others: Iterable[HeadFormat] = (),
) -> tuple[Any, dict[str, Any]]:
    """Reads a head in any layout of its format; returns the module and its params.

    A target of the same sizes passes; see `check_owner`.

    Args:
        folder: as published, or as `save_head` wrote it.
        format: of the head.
        target: whose tokens the head is to predict.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.
        others: formats that a message names if the folder holds one of them instead.

    Raises:
        SpecjaxError: if a file is missing or damaged, does not fit the others or the target, is
            quantised, or holds something else than such a head.
    """
    folder, formats = expand_user(folder), (format, *others)
    with readable(folder):
        detect_format(folder, formats, format)
        path, values = folder / CONFIG, _read_config(folder)
        stored = _own_tensors(format, values, stored_tensors(folder, format.files))
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        _check_tensors(folder, shapes, formats)
        for key, name in SIZES.items():
            _check_size(f"{path}", key, values.get(key), getattr(target, name))
        for pattern, name in format.sizes.items():
            _check_size(f"{folder}", name, rows(pattern)(shapes), getattr(target, name))
        fields = _read_fields(path, values, shapes, format)
        try:
            layers = target if format.layer_keys is None else _layers(values, format.layer_keys)
            fields |= format.described(values, target)
            head = format.module(format.config(layers, **fields))
        except SpecjaxError as error:
            raise SpecjaxError(f"{path}: {error}") from None
        wanted = _tensors_of(folder, format, head, values, stored)
        params = format.decode(read_params(wanted, dtype, f"Loading {folder.name}", progress))
        _check_draft_tokens(folder, params.get(DRAFT_TOKENS), target.vocab_size)
        return head, params


def _own_tensors(
    format: HeadFormat, values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns the tensors of the head alone, by their names without the prefix."""
    ends = {name: each.end() for name in stored if (each := re.match(format.prefix, name))}
    kept = ends if format.is_within_model and ends else stored
    named = {name[ends.get(name, 0) :]: stored[name] for name in kept}
    unused = [format.ignored, BUFFER.pattern]
    unused += [names for key, names in format.ignored_if.items() if values.get(key) is True]
    is_unused = re.compile("|".join(f"(?:{each})" for each in unused)).fullmatch
    return {name: tensor for name, tensor in named.items() if not is_unused(name)}


def _check_draft_tokens(folder: Path, tokens: Array | None, vocab_size: int) -> None:
    if tokens is None:
        return
    found = np.unique(tokens)
    if len(found) < len(tokens) or found[0] < 0 or found[-1] >= vocab_size:
        raise SpecjaxError(
            f"{folder}: {DRAFT_TOKENS} are not different tokens below {vocab_size}; download the "
            "head again"
        )


def _check_size(place: str, key: str, size: Any, expected: int) -> None:
    if size not in (None, expected):
        raise SpecjaxError(
            f"{place}: the head is for a target of {key} {size}, but this one has {expected}; "
            "give a head that was trained for this target"
        )


def _read_fields(
    path: Path, values: Mapping[str, Any], shapes: Shapes, format: HeadFormat
) -> dict[str, Any]:
    """Returns the fields of the head's config, derived from its tensors."""
    for key, known in format.limits.items():
        if values.get(key) not in (None, *known):
            wish = " or ".join(map(repr, known))
            raise SpecjaxError(
                f"{path}: {key} {values[key]!r} is not supported; give a head with {wish} there"
            )
    fields = {name: read(shapes) for name, read in format.fields.items()}
    for key, name in format.keys.items():
        expected = _spelled(format, key, fields[name])
        if values.get(key) is not None and str(values[key]) != str(expected):
            raise SpecjaxError(
                f"{path}: {key} is {values[key]!r}, but {expected!r} according to the weights; "
                "correct it there, or download the head again"
            )
    return fields


def _spelled(format: HeadFormat, key: str, value: Any) -> Any:
    return format.spellings.get(key, {}).get(value, value)


def _layers(values: Mapping[str, Any], layer_keys: Mapping[str, str]) -> TransformerConfig:
    """Returns the layers that a config describes; they see all of the text.

    Heads of Qwen have a Llama's layers, whatever their config calls them.
    """
    renamed = {key: values[name] for key, name in layer_keys.items() if name in values}
    kind = values.get("model_type", llama.MODEL_TYPE)
    kind = llama.MODEL_TYPE if kind in ("qwen2", "qwen3") else kind
    layers = config_from({**values, **renamed, "model_type": kind})
    if layers.variant != Variant():
        kind = f"{kind} with hidden_act {layers.variant.hidden_act!r}"
        raise SpecjaxError(f"layers of {kind} in a head are not supported; give a head of Llama's")
    return replace(layers, sliding_window=None)


def _tensors_of(
    folder: Path,
    format: HeadFormat,
    head: Any,
    values: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> dict[str, StoredTensor]:
    """Returns the stored tensor of each param; copies must be equal."""
    shapes = expected_shapes(head)
    alternatives = [_paths(shapes, names, head.config) for names in format.names]
    paths = max(alternatives, key=lambda each: len(each.keys() & stored.keys()))
    expected = {name: shapes[path] for name, path in paths.items()}
    optional = {name for name in paths if re.fullmatch(format.optional, name)}
    if not stored.keys() & optional and values.get(format.required_if) is not True:
        zeros = {name: partial(np.zeros, expected[name], np.float32) for name in optional}
        absent = {each: StoredTensor(each, expected[each], "F32", zeros[each]) for each in optional}
        stored = {**stored, **absent}
    integers = [name for name, path in paths.items() if path == DRAFT_TOKENS]
    check_weights(folder, stored, expected, integers)
    wanted: dict[str, StoredTensor] = {}
    for name, path in paths.items():
        first = wanted.setdefault(path, stored[name])
        if first is not stored[name] and not np.array_equal(first.read(), stored[name].read()):
            raise SpecjaxError(
                f"{folder}: {name} is not equal to {first.name}, but {format.repeated} are one "
                "block, repeated; others are not supported"
            )
    return wanted


def _paths(params: Iterable[str], names: Iterable[Names], config: Any) -> dict[str, str]:
    """Returns the names in a file, each with the path of its param."""
    found = {}
    for path in params:
        for ours, theirs, copies in names:
            if match := re.match(re.escape(ours).replace(r"\{\}", r"(\d+)"), path):
                for copy in copies(config):
                    name = theirs.format(*match.groups(), copy=copy, **vars(config))
                    found[name + path[match.end() :]] = path
                break
    return found


# ---- Writing -----------------------------------------------------------------------------------


def save_head(
    folder: Path,
    format: HeadFormat,
    head: Any,
    params: Mapping[str, Any],
    dtype: DTypeLike,
    *,
    target: TransformerConfig,
    target_params: Mapping[str, Any] | None = None,
    target_name: str | None = None,
    layout: str | None = None,
    about: Mapping[str, Any] | None = None,
    as_torch: bool = False,
    with_embedding: bool = False,
) -> None:
    """Writes a head into a new `folder`, wholly or not at all.

    Args:
        folder: does not exist yet, or is empty.
        format: of the head.
        head: the module.
        params: of the head.
        dtype: of the stored tensors.
        target: whose tokens the head predicts.
        target_params: of which some layouts hold the embedding or the LM head as well.
        target_name: a hub id or folder, for layouts that name the target.
        layout: one of the format's, by who is to read it; by default the first.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.
        as_torch: write `pytorch_model.bin` in place of safetensors; needs torch.
        with_embedding: hold the target's embedding even in a layout that is better without.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, the params are not
            those of the head, the head is not for this target, the layout cannot hold it or needs
            `target_params`, or torch is needed and not installed.
    """
    config, layout = head.config, layout or next(iter(format.layouts))
    if layout not in format.layouts:
        raise SpecjaxError(f"layout {layout!r} is unknown; choose {', '.join(format.layouts)}")
    for name in ("hidden_size", "vocab_size"):
        _check_size(f"cannot save {folder}", name, getattr(config, name), getattr(target, name))
    if wrong := shape_mismatches(params, head):
        raise SpecjaxError(f"cannot save {folder}: {wrong}; give the head of these params")
    if target_params is not None:
        Transformer(target).check(target_params)
    chosen = format.layouts[layout]
    if as_torch and chosen.file != WEIGHTS:
        raise SpecjaxError(f"layout {layout} is read from {chosen.file}; leave --format bin out")
    values = _values_of(folder, format, chosen, config, target)
    values |= {ABOUT: dict(about)} if about else {}
    if chosen.names_target and target_name is not None:
        values["base_model_name_or_path"] = target_name
    leaves = flatten_dict(params, sep=".")
    names = format.names[0] if chosen.names is None else chosen.names(config)
    tensors = {name: leaves[path] for name, path in _paths(leaves, names, config).items()}
    has_embedding = format.embedding and (chosen.has_embedding or with_embedding)
    if has_embedding and target_params is not None:
        tensors[format.embedding] = dequantized(target_params["embed_tokens"]["weight"])
    name = TORCH_WEIGHTS if as_torch else chosen.file
    file = HeadFile(folder, config, target, target_params, values, tensors, name)
    chosen.edit(file)
    write_weights(folder, file.values, file.tensors, dtype, file.name)


def _values_of(
    folder: Path, format: HeadFormat, layout: Layout, config: Any, target: TransformerConfig
) -> dict[str, Any]:
    """Returns what config.json says of a head of this config."""
    if format.layer_keys is not None:  # a Mistral layer without window is a Llama's
        values = config_values(replace(config.layers, model_type=llama.MODEL_TYPE))
        values |= {name: values[key] for key, name in format.layer_keys.items()}
    elif format.config(target, **{name: getattr(config, name) for name in format.fields}) == config:
        values = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    else:
        raise SpecjaxError(
            f"cannot save {folder}: the head does not have the shape with which it would be read "
            "for this target; give the target that it was made for"
        )
    keys = format.keys if layout.keys is None else layout.keys
    values |= {key: _spelled(format, key, getattr(config, name)) for key, name in keys.items()}
    return {**values, **layout.constants}
