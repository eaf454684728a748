"""Reads and writes drafter heads as files: one engine for every kind of head and every layout.

A folder holds `config.json` and flat tensors. A `HeadFormat` describes which of them belong to a
kind of head and how layouts differ; the formats are in `specjax.models.io.formats`. The tensors
decide what the head is, because published configs are often silent or wrong, and the rest of the
config must agree. Tensors that the head does not have are an error: a partly read head drafts badly
without any visible sign.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike
from jaxtyping import Array

from specjax.core.errors import SpecjaxError, errors_at
from specjax.core.files import expand_user, readable
from specjax.models.config import TransformerConfig, Variant, json_object
from specjax.models.families import CONFIG, config_from, config_values, llama, read_values
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io import head_format
from specjax.models.io.head_format import ABOUT, HeadFile, HeadFormat, Names, Shapes, Values
from specjax.models.io.huggingface import BUFFER, check_weights, read_params, write_weights
from specjax.models.io.weights import StoredTensor, stored_tensors
from specjax.models.quantize import dequantized
from specjax.models.shapes import expected_shapes, shape_mismatches, shapes_of

CHECKPOINTS = "checkpoints"  # the subfolder of a training run
HEAD = "head"  # the folder of the head within that of its training run
SIZES = {  # keys of config.json: fields of the target's config
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "truncated_vocab_size": "vocab_size",
}


def made_by_run(folder: Path, name: str) -> Path:
    """Returns the result of the `specjax train` run in a folder, or the folder if it has no run."""
    if (folder / name).is_dir():
        return folder / name
    if (folder / CHECKPOINTS).is_dir():
        raise SpecjaxError(
            f"{folder} is a run that has not finished and has no {name} yet; repeat its command "
            "with --resume"
        )
    return folder


# ---- Recognising a kind of head ----------------------------------------------------------------


def detect_format(
    folder: Path, formats: Iterable[HeadFormat], expected: HeadFormat | None = None
) -> HeadFormat:
    """Returns the format of a head by its config alone; its weights may not be there yet.

    A config without any sign is of the `expected` format, or else of the format without signs.
    """
    title, formats = expected.signature.title if expected else "a drafter head", list(formats)
    values = _read_config(folder, title)
    kinds = map(values.get, ("model_type", "speculators_model_type", "architectures"))
    keys = (key for key, value in values.items() if value is not None)
    text = " ".join(map(str, (*keys, *kinds))).lower()
    matches = (some for some in _signatures(formats) if re.search(some.config, text))
    signature, by_signature = next(matches, None), {fmt.signature: fmt for fmt in formats}
    if signature is None:
        return expected or next(fmt for fmt in formats if not fmt.has_sign_in_config)
    detected = by_signature.get(signature)
    if detected is None or expected not in (None, detected):
        place = expand_user(folder) / CONFIG
        raise SpecjaxError(f"{place} describes {signature.title}; give {title}")
    return detected


def _signatures(formats: Iterable[HeadFormat]) -> list[head_format.Signature]:
    """Returns the signatures of everything that a folder may hold, by priority."""
    ordered = sorted(formats, key=lambda fmt: not fmt.has_sign_in_config)
    return [head_format.SPECULATORS, *(fmt.signature for fmt in ordered), head_format.WHOLE_MODEL]


def _check_tensors(folder: Path, shapes: Shapes, formats: Iterable[HeadFormat]) -> None:
    """Raises SpecjaxError unless the tensors are those of the first format."""
    bare = {name.removeprefix("model."): shape for name, shape in shapes.items()}
    expected, *_ = (fmt.signature for fmt in formats)
    matches = (some for some in _signatures(formats) if head_format.has(bare, some.tensors))
    if (signature := next(matches, None)) is not expected:
        names = ", ".join(list(bare)[:3])
        content = signature.title if signature else f"tensors of no known kind ({names})"
        raise SpecjaxError(f"{folder} holds {content}; give {expected.title}")


# ---- Reading the config ------------------------------------------------------------------------


def read_about(folder: Path) -> dict[str, Any]:
    """Returns what the head was saved with as `about`; {} for a head that others saved."""
    with errors_at(folder / CONFIG):
        return json_object(_read_config(folder), ABOUT)


def check_owner(folder: Path, target: str) -> None:
    """Raises SpecjaxError if the head was trained for a target of another fingerprint."""
    owner = read_about(folder).get("target", target)
    if owner != target:
        raise SpecjaxError(
            f"{folder}: this head was trained for target {owner}, but this one is {target}; "
            "give a head of this target, or train one"
        )


def _read_config(folder: Path, title: str = "a drafter head") -> dict[str, Any]:
    return read_values(expand_user(folder), f"give the folder of {title}")


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

    Does not check that the head was trained for this target; see `check_owner`. The params have
    `dtype`, whatever the files store. If the folder holds a head of one of the `others`, the error
    names its format. `progress` shows a bar on stderr, if that is a terminal.
    """
    folder, formats = expand_user(folder), (format, *others)
    with readable(folder):
        detect_format(folder, formats, format)
        path, values = folder / CONFIG, _read_config(folder)
        tensors = _head_tensors(format, values, stored_tensors(folder, format.files))
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        _check_tensors(folder, shapes, formats)
        for key, name in SIZES.items():
            _check_size(f"{path}", key, values.get(key), getattr(target, name))
        for pattern, name in format.sizes.items():
            size = head_format.rows(shapes, pattern) or None
            _check_size(f"{folder}", name, size, getattr(target, name))
        with errors_at(path):
            layers = target if format.layer_keys is None else _layers(values, format.layer_keys)
            head = format.module(format.config(shapes, layers, values, target))
        for key, expected in format.claims(head.config).items():
            value = values.get(key)
            if value not in (None, expected) and str(value) != str(expected):
                raise SpecjaxError(
                    f"{path}: {key} is {value!r}, but {expected!r} according to the weights; "
                    "correct it there, or use another head"
                )
        by_path = _tensors_by_path(folder, format, head, values, tensors)
        params = format.decode(read_params(by_path, dtype, f"Loading {folder.name}", progress))
        _check_draft_tokens(folder, params.get(DRAFT_TOKENS, ()), target.vocab_size)
        return head, params


def _head_tensors(
    format: HeadFormat, values: Values, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns the tensors of the head alone, by their names without the prefix."""
    ends = {name: match.end() for name in stored if (match := re.match(format.prefix, name))}
    kept = ends if format.is_within_model and ends else stored
    named = {name[ends.get(name, 0) :]: stored[name] for name in kept}
    ignored = re.compile(f"(?:{format.ignored(values)})|(?:{BUFFER.pattern})").fullmatch
    return {name: tensor for name, tensor in named.items() if not ignored(name)}


def _check_draft_tokens(folder: Path, tokens: Sequence[int] | Array, vocab_size: int) -> None:
    distinct = np.unique(np.asarray(tokens))
    if np.sum((distinct >= 0) & (distinct < vocab_size)) < len(tokens):
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


def _layers(values: Values, layer_keys: Mapping[str, str]) -> TransformerConfig:
    """Returns the layers that a config describes, without a sliding window.

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


def _tensors_by_path(
    folder: Path, format: HeadFormat, head: Any, values: Values, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Returns the stored tensor of each param; copies must be equal."""
    shapes = expected_shapes(head)
    alternatives = [_paths(shapes, names, head.config) for names in format.names]
    paths = max(alternatives, key=lambda paths: len(paths.keys() & stored.keys()))
    expected = {name: shapes[path] for name, path in paths.items()}
    optional = {name for name in paths if re.fullmatch(format.optional(values), name)}
    if not stored.keys() & optional:
        zeros = {name: partial(np.zeros, expected[name], np.float32) for name in optional}
        absent = {name: StoredTensor(name, expected[name], "F32", zeros[name]) for name in optional}
        stored = {**stored, **absent}
    integers = [name for name, path in paths.items() if path == DRAFT_TOKENS]
    check_weights(folder, stored, expected, integers)
    by_path: dict[str, StoredTensor] = {}
    for name, path in paths.items():
        first = by_path.setdefault(path, stored[name])
        if first is not stored[name] and not np.array_equal(first.read(), stored[name].read()):
            raise SpecjaxError(
                f"{folder}: {name} is not equal to {first.name}; heads of different blocks are not "
                "supported, only of one block that is repeated"
            )
    return by_path


def _paths(params: Iterable[str], names: Iterable[Names], config: Any) -> dict[str, str]:
    """Returns the names in a file, each with the path of its param."""
    paths = {}
    for path in params:
        for start, stored, copies in names:
            if match := re.match(re.escape(start).replace(r"\{\}", r"(\d+)"), path):
                for copy in copies(config):
                    name = stored.format(*match.groups(), copy=copy, **vars(config))
                    paths[name + path[match.end() :]] = path
                break
    return paths


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
    with_embedding: bool = False,
) -> None:
    """Writes a head into a new `folder`, completely or not at all.

    Args:
        folder: does not exist yet, or is empty.
        format: of the head, whose module is `head`.
        dtype: of the stored tensors.
        target_params: for layouts that hold the target's embedding or LM head as well.
        target_name: a hub id or folder, for layouts that name the target.
        layout: one of the format's, by the program that reads it; by default the first.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.
        with_embedding: hold the target's embedding even in a layout that is better without.
    """
    config, chosen = head.config, format.layouts[layout or next(iter(format.layouts))]
    if wrong := shape_mismatches(params, head):
        raise SpecjaxError(f"cannot save {folder}: {wrong}; give the head of these params")
    leaves = flatten_dict(params, sep=".")
    names = format.names[0] if chosen.names is None else chosen.names(config)
    tensors = {name: leaves[path] for name, path in _paths(leaves, names, config).items()}
    if format.layer_keys is not None:  # a Mistral layer without window is a Llama's
        values = config_values(replace(config.layers, model_type=llama.MODEL_TYPE))
        values |= {name: values[key] for key, name in format.layer_keys.items()}
    elif format.config(shapes_of(tensors), target, {}, target) == config:
        values = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    else:
        raise SpecjaxError(
            f"cannot save {folder}: the head does not have the shape with which it would be read "
            "for this target; give the target that it was made for"
        )
    values |= (chosen.values or format.claims)(config)
    values |= {ABOUT: dict(about)} if about else {}
    has_embedding = format.embedding and (chosen.has_embedding or with_embedding)
    if has_embedding and target_params is not None:
        tensors[format.embedding] = dequantized(target_params["embed_tokens"]["weight"])
    about_target = target, target_params, target_name
    file = HeadFile(folder, config, *about_target, values, tensors, chosen.file)
    chosen.edit(file)
    write_weights(folder, file.values, file.tensors, dtype, file.name)
