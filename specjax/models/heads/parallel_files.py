"""ParallelSpec heads as files. Nobody has published one, so the format is ours.

It is that of an EAGLE head, `config.json` and flat tensors, with `num_masks` and `reads_features`
in the config, and `mask_embeddings.weight` and, where features are read, `mask_hidden` among the
tensors. A head that reads none has `norm.weight` and `layers.0.input_layernorm.weight`, and no
`fc`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, readable
from specjax.models.config import CHECK, TransformerConfig
from specjax.models.families import config_values
from specjax.models.heads.eagle_files import (
    FC_BIAS,
    check_bias,
    read_bias,
    read_head,
    read_layers,
    stored_head,
    tensors_of,
)
from specjax.models.heads.files import check_layout, check_sizes, read_values, write_head
from specjax.models.heads.other_heads import TITLES, refuse_other_configs, refuse_other_weights
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.io.checkpoint import CONFIG
from specjax.models.io.weights import StoredTensor

LAYOUTS = ("specjax",)
ARCHITECTURE = "ParallelSpecHead"


def load_parallel(
    folder: Path, target: TransformerConfig, dtype: DTypeLike, progress: bool = False
) -> tuple[ParallelHead, dict[str, Any]]:
    """Reads a ParallelSpec head of either kind: the module and its params.

    A target of the same shape passes: see `check_owner`.

    Args:
        folder: as `save_parallel` wrote it.
        target: whose tokens the head is to predict.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, does not fit the others or the target, is
            quantised, or holds something else than such a head.
    """
    folder = expand_user(folder)
    with readable(folder):
        path, values = folder / CONFIG, read_values(folder, TITLES["parallel"])
        refuse_other_configs(path, values, "parallel")
        stored = stored_head(folder)
        refuse_other_weights(folder, stored, "parallel")
        head = ParallelHead(_read_config(path, values, stored))
        check_sizes(str(path), head.config.hidden_size, head.config.vocab_size, target)
        params = read_head(folder, head, stored, dtype, progress)
    return head, params


def _read_config(
    path: Path, values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> ParallelConfig:
    layers, stated_bias = read_layers(path, values), read_bias(path, values)
    num_masks, reads_features = values.get("num_masks"), values.get("reads_features")
    if isinstance(num_masks, bool) or not isinstance(num_masks, int) or num_masks < 1:
        raise SpecjaxError(f"{path}: num_masks {num_masks!r} is not a number from 1 on; {CHECK}")
    if not isinstance(reads_features, bool):
        raise SpecjaxError(
            f"{path}: reads_features {reads_features!r} is not true or false; {CHECK}"
        )
    fc_bias = reads_features and FC_BIAS in stored
    if reads_features:
        check_bias(path, stated_bias, fc_bias)
    return ParallelConfig(layers, num_masks, reads_features, fc_bias)


def save_parallel(
    folder: Path,
    head: ParallelHead,
    params: Mapping[str, Any],
    dtype: DTypeLike,
    *,
    target: TransformerConfig,
    target_params: Mapping[str, Any] | None = None,
    layout: str = LAYOUTS[0],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a head into a new `folder`, wholly or not at all.

    Args:
        folder: does not exist yet, or is empty.
        head: the module.
        params: of the head.
        dtype: of the stored tensors.
        target: whose tokens the head predicts.
        target_params: not needed: whoever reads this format has the target's embedding.
        layout: `specjax`, the only one.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, the params are not
            those of the head, the head is not one for this target, or the layout is unknown.
    """
    del target_params
    check_layout(layout, LAYOUTS, ", as no server reads these heads")
    config = head.config
    check_sizes(f"cannot save {folder}", config.hidden_size, config.vocab_size, target)
    tensors = tensors_of(folder, head, params)
    layers = replace(config.layers, model_type="llama")  # which a Mistral layer without window is
    values = config_values(layers) | {
        "architectures": [ARCHITECTURE],
        "num_masks": config.num_masks,
        "reads_features": config.reads_features,
    }
    if config.reads_features:
        values["bias"] = config.fc_bias
    write_head(folder, values, tensors, dtype, about)
