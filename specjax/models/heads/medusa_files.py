"""Medusa heads as files: read what the authors and others have published, write what servers read.

Three forms are read, told apart by the names of the tensors: the authors' (`medusa_lm_head.pt` or
`.safetensors`; `0.1.weight` is the LM head of head 0), the same behind `medusa_head.` within a
whole model of Medusa-2, and vLLM's (`blocks.0.layers.0.weight`, `lm_heads.0.weight`). Heads
without LM heads, which the authors call version 2, use the target's. Notable choices: the tensors
say how many heads and layers there are, because configs on the hub say 2 where there are 5; what is
in the file but in no head is an error, as for EAGLE heads.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, readable
from specjax.models.config import TransformerConfig
from specjax.models.heads.files import (
    WEIGHTS,
    check_layout,
    check_sizes,
    leaves_to_save,
    read_repeated,
    read_values,
    write_head,
    zeros,
)
from specjax.models.heads.lm_heads import lm_head_to_save
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.medusa_names import OF_AUTHORS, OF_VLLM, Names
from specjax.models.heads.other_heads import TITLES, refuse_other_configs, refuse_other_weights
from specjax.models.io.checkpoint import CONFIG
from specjax.models.io.weights import StoredTensor, stored_tensors

LAYOUTS = ("specjax", "medusa", "vllm")  # by whose loader is to read it; training writes the first
SAFETENSORS, TORCH = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
WITHIN_A_MODEL = re.compile(r"medusa_heads?\.")
REPEATED = "the layers of a Medusa head"


# ---- Reading -----------------------------------------------------------------------------------


def load_medusa(
    folder: Path, target: TransformerConfig, dtype: DTypeLike, progress: bool = False
) -> tuple[MedusaHeads, dict[str, Any]]:
    """Reads Medusa heads: the module and its params.

    A target of the same shape passes: see `check_owner`. Of a whole Medusa-2 model only the heads
    are read; they fit the model that they were trained with.

    Args:
        folder: as published, or as `save_medusa` wrote it, in any layout.
        target: whose tokens the heads are to predict.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, does not fit the others or the target, is
            quantised, or holds something else than such heads.
    """
    folder = expand_user(folder)
    with readable(folder):
        values = read_values(folder, TITLES["medusa"])
        refuse_other_configs(folder / CONFIG, values, "medusa")
        stored = _of_heads(stored_tensors(folder, (SAFETENSORS, TORCH)))
        whole = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
        refuse_other_weights(folder, whole, "medusa")
        _check_config(folder / CONFIG, values, target, stored)
        names = OF_VLLM if any(map(OF_VLLM.block_in, stored)) else OF_AUTHORS
        if names is OF_VLLM:
            stored = _without_defaults(values, stored)
        head = MedusaHeads(_read_config(folder, values, stored, names, target))
        paths = names.paths(head.config)
        params = read_repeated(folder, head, stored, paths, REPEATED, dtype, progress)
    return head, params


def _of_heads(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Without the prefix that heads have within a whole model, and without that model."""
    marked = {
        WITHIN_A_MODEL.sub("", name, count=1): tensor
        for name, tensor in stored.items()
        if WITHIN_A_MODEL.match(name)
    }
    return marked or dict(stored)


def _check_config(
    path: Path,
    values: Mapping[str, Any],
    target: TransformerConfig,
    stored: Mapping[str, StoredTensor],
) -> None:
    """Refuses heads of another target, and what vLLM knows but heads here do not."""
    hidden_size = values.get("hidden_size") or target.hidden_size
    vocab_size = values.get("vocab_size") or target.vocab_size
    check_sizes(str(path), hidden_size, vocab_size, target)
    kept = values.get("truncated_vocab_size")
    if "token_map" in stored or kept not in (None, vocab_size):
        told = "token_map" if "token_map" in stored else f"truncated_vocab_size {kept}"
        raise SpecjaxError(
            f"{path.parent}: these Medusa heads know a part of the vocabulary only ({told}), which "
            "is not supported; give heads of the whole vocabulary"
        )
    if values.get("logit_scale") not in (None, 1):
        raise SpecjaxError(
            f"{path}: logit_scale {values['logit_scale']} is not supported; scale the LM heads of "
            "the file by it and set it to 1"
        )


def _without_defaults(
    values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """vLLM's tensors as if its config said nothing: no shared LM head, and biases for all blocks.

    With `original_lm_head` the first LM head is a copy of the target's and serves all heads.
    """
    found = dict(stored)
    if values.get("original_lm_head") is True:
        copies = {name for name in found if OF_VLLM.lm_head_in(name)} | {"lm_head.weight"}
        found = {name: tensor for name, tensor in found.items() if name not in copies}
    has_biases = any(name.endswith(".bias") for name in found)
    if not has_biases and values.get("medusa_fc_bias") is not True:
        for name in filter(OF_VLLM.block_in, stored):
            bias = name.removesuffix("weight") + "bias"
            found[bias] = zeros(bias, stored[name].shape[:1])
    return found


def _read_config(
    folder: Path,
    values: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    names: Names,
    target: TransformerConfig,
) -> MedusaConfig:
    blocks = [match for name in stored if (match := names.block_in(name))]
    has_lm_heads = any(map(names.lm_head_in, stored))
    if not blocks:
        raise SpecjaxError(
            f"{folder} holds no Medusa head: there is no tensor such as "
            f"{names.block.format(head=0, layer=0, part='weight')}; give the folder of one"
        )
    for name, tensor in stored.items():  # configs need not say for which target they are
        rows = tensor.shape[0] if tensor.shape else 0
        if names.block_in(name):
            check_sizes(str(folder), rows, target.vocab_size, target)
        elif names.lm_head_in(name):
            check_sizes(str(folder), target.hidden_size, rows, target)
    version = values.get("version")
    if version is not None and (str(version) == "2") == has_lm_heads:
        what = "hold LM heads" if has_lm_heads else "hold no LM heads"
        raise SpecjaxError(
            f"{folder / CONFIG}: version {version!r} (2 is without LM heads), but the weights "
            f"{what}; correct it there, or download the heads again"
        )
    heads, layers = (1 + max(int(match[each]) for match in blocks) for each in ("head", "layer"))
    return MedusaConfig.for_target(target, heads, layers, has_lm_heads)


# ---- Writing -----------------------------------------------------------------------------------


def save_medusa(
    folder: Path,
    head: MedusaHeads,
    params: Mapping[str, Any],
    dtype: DTypeLike,
    *,
    target: TransformerConfig,
    target_params: Mapping[str, Any] | None = None,
    layout: str = LAYOUTS[0],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes heads into a new `folder`, wholly or not at all.

    Args:
        folder: does not exist yet, or is empty.
        head: the module.
        params: of the heads.
        dtype: of the stored tensors.
        target: whose tokens the heads predict.
        target_params: of which the LM head is written along in the layout `vllm`, for heads that
            have none of their own.
        layout: who is to read it. `specjax` has the published names in safetensors. `medusa` is the
            authors' code, which reads LM heads from torch's files and five heads only; it finds the
            target by `base_model_name_or_path`, which is to be added to the config by hand. `vllm`
            is a server.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, the params are not
            those of the heads, the heads are not for this target, torch is needed and not
            installed, or `vllm` needs `target_params`.
    """
    check_layout(layout, LAYOUTS)
    config = head.config
    check_sizes(f"cannot save {folder}", config.hidden_size, config.vocab_size, target)
    leaves = leaves_to_save(folder, head, params)
    names = OF_VLLM if layout == "vllm" else OF_AUTHORS
    tensors = {name: leaves[path] for name, path in names.paths(config).items()}
    if layout == "vllm":
        values, file = _vllm_config(config), WEIGHTS
        if not config.has_lm_heads:
            table = lm_head_to_save(folder, "vLLM", target, target_params)
            tensors[names.lm_head.format(head=0)] = table
    else:
        values = _config(config)
        file = TORCH if layout == "medusa" and config.has_lm_heads else SAFETENSORS
    write_head(folder, values, tensors, dtype, about, file)


def _config(config: MedusaConfig) -> dict[str, Any]:
    return {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "version": "1" if config.has_lm_heads else "2",
    }


def _vllm_config(config: MedusaConfig) -> dict[str, Any]:
    return {  # vLLM takes any key with "num" and "heads" in it for `num_heads`
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": not config.has_lm_heads,  # one for all heads
    }
