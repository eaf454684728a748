"""What a folder of weights really holds, where it was offered as a head of some kind."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.models.io.weights import StoredTensor

TITLES = {
    "eagle": "an EAGLE, EAGLE-2 or HASS head",
    "medusa": "a Medusa head",
    "hydra": "a Hydra head",
    "parallel": "a ParallelSpec head",
    "eagle3": "an EAGLE-3 head, which has another architecture and is not supported",
    "model": "a whole model",
}
EAGLE_3_TENSORS = re.compile(r"midlayer\..+|d2t|t2d|layers\.0\.hidden_norm\.weight")
MEDUSA_TENSORS = re.compile(r"(medusa_heads?\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\..+)")
HYDRA_TENSORS = re.compile(r"(hydra_mlp|hydra_lm_head)\..+")
WHOLE_MODEL_TENSORS = {"norm.weight", "layers.0.input_layernorm.weight"}


def refuse_other_configs(path: Path, values: Mapping[str, Any], wanted: str) -> None:
    """Raises SpecjaxError, which names `path`, for the `config.json` of another kind of head.

    A config that says nothing of its kind passes. `wanted` is a key of `TITLES`.
    """
    speculators = values.get("speculators_model_type")
    kind = kind_of_config(values)
    if kind is None and speculators is not None:
        raise SpecjaxError(
            f"{path} describes a head of speculators ({speculators}), whose format is not "
            f"supported; give {TITLES[wanted]}"
        )
    if kind not in (None, wanted):
        raise SpecjaxError(f"{path} describes {TITLES[kind]}; give {TITLES[wanted]}")


def refuse_other_weights(folder: Path, stored: Mapping[str, StoredTensor], wanted: str) -> None:
    """Raises SpecjaxError, which names `folder`, for the tensors of something else."""
    kind = kind_of_weights(stored)
    if kind not in (None, wanted):
        raise SpecjaxError(f"{folder} holds {TITLES[kind]}; give {TITLES[wanted]}")


def kind_of_config(values: Mapping[str, Any]) -> str | None:
    """The key of `TITLES` that a head's config tells, if any: EAGLE's are plain Llama configs."""
    speculators, architectures = values.get("speculators_model_type"), values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    told = " ".join(str(name).lower() for name in (speculators, values.get("model_type"), *names))
    if values.get("draft_vocab_size") is not None or "eagle3" in told:
        return "eagle3"
    for kind in ("medusa", "hydra"):
        if f"{kind}_num_heads" in values or kind in told:
            return kind
    return "parallel" if "num_masks" in values or "parallelspec" in told else None


def kind_of_weights(stored: Mapping[str, StoredTensor]) -> str | None:
    """The key of `TITLES` that the tensors' names tell, if they do."""
    if any(map(EAGLE_3_TENSORS.fullmatch, stored)):
        return "eagle3"
    if any(map(MEDUSA_TENSORS.fullmatch, stored)):
        return "medusa"
    if any(map(HYDRA_TENSORS.fullmatch, stored)):
        return "hydra"
    if "mask_embeddings.weight" in stored:
        return "parallel"
    if "fc.weight" not in stored:
        return "model" if WHOLE_MODEL_TENSORS & stored.keys() else None
    rows, *columns = stored["fc.weight"].shape
    return "eagle3" if columns == [3 * rows] else "eagle"
