"""Hydra heads as files: read what the authors and others have published, and write it.

A folder holds a config of a few numbers and `hydra_lm_head.pt` or `.safetensors`, whose tensors are
called as in the authors' code. Notable choices: where the config is silent the tensors decide, but
what both say must agree; the blocks behind a head's first one are copies of one block and must be
equal; the embedding that the prefix layer of Hydra++ carries along is not used there, and not read
here; what else is in the file but in no head is an error, as for EAGLE heads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, readable
from specjax.models.config import CHECK, TransformerConfig
from specjax.models.heads.files import (
    check_layout,
    check_sizes,
    leaves_to_save,
    param_shapes,
    read_repeated,
    read_values,
    write_head,
)
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.hydra_names import (
    BLOCK,
    CONNECTION,
    LM_HEADS,
    PREFIX,
    UNUSED,
    blocks_in,
    lm_head_name,
    stored_names,
)
from specjax.models.heads.lm_heads import lm_head_to_save
from specjax.models.heads.other_heads import TITLES, refuse_other_configs, refuse_other_weights
from specjax.models.io.checkpoint import CONFIG
from specjax.models.io.huggingface import ROTARY_BUFFER
from specjax.models.io.weights import StoredTensor, stored_tensors

LAYOUTS = ("specjax", "hydra")  # by whose loader is to read it; training writes the first
SAFETENSORS, TORCH = "hydra_lm_head.safetensors", "hydra_lm_head.pt"
ARCHITECTURES = {"mlp": False, "prefix-mlp": True}  # published name: whether it has a prefix layer
REPEATED = "the blocks of a Hydra head behind its first"


# ---- Reading -----------------------------------------------------------------------------------


def load_hydra(
    folder: Path, target: TransformerConfig, dtype: DTypeLike, progress: bool = False
) -> tuple[HydraHeads, dict[str, Any]]:
    """Reads the heads of Hydra or Hydra++: the module and its params.

    A target of the same shape passes: see `check_owner`. The prefix layer of Hydra++ is shaped like
    one of the target's; the embedding beside it is ignored, because it reads no tokens.

    Args:
        folder: as published, or as `save_hydra` wrote it, in any layout.
        target: whose tokens the heads are to predict.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, does not fit the others or the target, is
            quantised, or holds something else than such heads.
    """
    folder = expand_user(folder)
    with readable(folder):
        values = read_values(folder, TITLES["hydra"])
        refuse_other_configs(folder / CONFIG, values, "hydra")
        stored = {
            name: tensor
            for name, tensor in stored_tensors(folder, (SAFETENSORS, TORCH)).items()
            if name != UNUSED and not ROTARY_BUFFER.fullmatch(name)
        }
        refuse_other_weights(folder, stored, "hydra")
        _refuse_variants(folder / CONFIG, values)
        has_dropout = _has_dropout(folder, stored)
        config = _read_config(folder / CONFIG, values, stored, target)
        _check_target(folder, values, stored, target)
        head = HydraHeads(config)
        paths = stored_names(config, has_dropout, param_shapes(head))
        params = read_repeated(folder, head, stored, paths, REPEATED, dtype, progress)
    return head, params


def _refuse_variants(path: Path, values: Mapping[str, Any]) -> None:
    """Refuses what the authors' code can train, but did not publish and is not made here."""
    arch = values.get("hydra_head_arch")
    if values.get("grounded_heads") not in (None, True):
        raise SpecjaxError(
            f"{path}: grounded_heads {values['grounded_heads']!r} is not supported: heads that do "
            "not see the drafted tokens are Medusa's; give heads with grounded_heads true"
        )
    if values.get("hidden_state_offset") not in (None, 0):
        raise SpecjaxError(
            f"{path}: hidden_state_offset {values['hidden_state_offset']!r} is not supported: only "
            "the target's last hidden state is read; give heads with hidden_state_offset 0"
        )
    if arch not in (None, *ARCHITECTURES):
        raise SpecjaxError(
            f"{path}: hydra_head_arch {arch!r} is not supported; give heads of "
            f"{' or '.join(ARCHITECTURES)}"
        )


def _has_dropout(folder: Path, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether places in the published lists are taken by dropout, which shifts all numbers."""
    slots = [slot for _, slot in blocks_in(stored)]
    if not slots:
        raise SpecjaxError(
            f"{folder} holds no Hydra head: there is no tensor such as hydra_mlp.0.0.linear.weight;"
            " give the folder of one"
        )
    if not any(CONNECTION in name for name in stored):
        raise SpecjaxError(
            f"{folder}: these heads do not see the drafted tokens (there is no res_connection, as "
            "with grounded_heads false), which is not supported; give grounded ones"
        )
    return min(slots) == 1


def _read_config(
    path: Path,
    values: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    target: TransformerConfig,
) -> HydraConfig:
    last, _ = max(blocks_in(stored))
    num_blocks = sum(head == last for head, _ in blocks_in(stored))
    num_heads = _number(path, values, "hydra_num_heads", 1 + last)
    num_layers = _number(path, values, "hydra_num_layers", num_blocks)
    has_lm_heads = values.get("has_lm_heads")
    if has_lm_heads is None:
        has_lm_heads = any(name.startswith(LM_HEADS) for name in stored)
    if not isinstance(has_lm_heads, bool):
        raise SpecjaxError(f"{path}: has_lm_heads {has_lm_heads!r} is not true or false; {CHECK}")
    has_prefix = any(name.startswith(PREFIX) for name in stored)
    if (arch := values.get("hydra_head_arch")) is not None:
        has_prefix = ARCHITECTURES[arch]
    return HydraConfig.for_target(target, has_prefix, num_heads, num_layers, has_lm_heads)


def _number(path: Path, values: Mapping[str, Any], name: str, default: int) -> int:
    value = default if values.get(name) is None else values[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecjaxError(f"{path}: {name} {value!r} is not a whole number from 1 on; {CHECK}")
    return value


def _check_target(
    folder: Path,
    values: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    target: TransformerConfig,
) -> None:
    """Refuses heads of another target; configs need not say for which one they are."""
    hidden_size = values.get("hidden_size") or target.hidden_size
    vocab_size = values.get("vocab_size") or target.vocab_size
    check_sizes(str(folder / CONFIG), hidden_size, vocab_size, target)
    for name, tensor in stored.items():
        rows = tensor.shape[0] if tensor.shape else 0
        if BLOCK.fullmatch(name):
            check_sizes(str(folder), rows, target.vocab_size, target)
        elif name.startswith(LM_HEADS):
            check_sizes(str(folder), target.hidden_size, rows, target)


# ---- Writing -----------------------------------------------------------------------------------


def save_hydra(
    folder: Path,
    head: HydraHeads,
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
        target_params: of which the LM head is written along in the layout `hydra`, for heads that
            have none of their own.
        layout: who is to read it. `specjax` has the published names in safetensors, and no LM heads
            where there are none. `hydra` is the authors' code, which reads torch's files; it finds
            the target by `base_model_name_or_path`, which is to be added to the config by hand.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, the params are not
            those of the heads, the heads are not for this target, or `hydra` needs torch or
            `target_params`, and they are not there.
    """
    check_layout(layout, LAYOUTS)
    config = head.config
    check_sizes(f"cannot save {folder}", config.hidden_size, config.vocab_size, target)
    if config.has_prefix and config.layers != HydraConfig.for_target(target, True).layers:
        raise SpecjaxError(
            f"cannot save {folder}: the prefix layer is not shaped like one of the target's, as it "
            "will be read; give the target that these heads were made for"
        )
    leaves = leaves_to_save(folder, head, params)
    paths = stored_names(config, config.has_prefix, leaves)
    tensors = {name: leaves[path] for name, path in paths.items()}
    values = _config(config)
    if layout == "hydra" and not config.has_lm_heads:
        table = lm_head_to_save(folder, "the authors' code", target, target_params)
        tensors |= _copies(config, table)
        del values["has_lm_heads"]
    file = TORCH if layout == "hydra" else SAFETENSORS
    write_head(folder, values, tensors, dtype, about, file)


def _config(config: HydraConfig) -> dict[str, Any]:
    values = {
        "hydra_num_heads": config.num_heads,
        "hydra_num_layers": config.num_layers,
        "hydra_head_arch": "prefix-mlp" if config.has_prefix else "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
    }
    return values if config.has_lm_heads else values | {"has_lm_heads": False}


def _copies(config: HydraConfig, table: Any) -> dict[str, Any]:
    """LM heads by their published names, all with this table."""
    parts = {"weight": table, "bias": jnp.zeros(table.shape[:1])}
    return {
        lm_head_name(head, config.has_prefix, part): value
        for head in range(config.num_heads)
        for part, value in parts.items()
    }
