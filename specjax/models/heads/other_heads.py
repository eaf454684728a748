"""What is offered as an EAGLE head and is none: EAGLE-3, Medusa and Hydra heads, whole models."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.errors import SpecjaxError
from specjax.models.weights import StoredTensor

WANTED = "give an EAGLE, EAGLE-2 or HASS head"
EAGLE_3 = "an EAGLE-3 head, which has another architecture and is not supported"
EAGLE_3_TENSORS = re.compile(r"midlayer\..+|d2t|t2d|layers\.0\.hidden_norm\.weight")
WHOLE_MODEL_TENSORS = {"norm.weight", "layers.0.input_layernorm.weight"}


def refuse_other_configs(path: Path, values: Mapping[str, Any]) -> None:
    """Raises SpecjaxError, which names `path`, for the `config.json` of another kind of head."""
    if kind := _kind_of_config(values):
        raise SpecjaxError(f"{path} describes {kind}; {WANTED}")


def refuse_other_weights(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Raises SpecjaxError, which names `folder`, for the tensors of something else."""
    if kind := _kind_of_weights(stored):
        raise SpecjaxError(f"{folder} holds {kind}; {WANTED}")


def _kind_of_config(values: Mapping[str, Any]) -> str | None:
    speculators, architectures = values.get("speculators_model_type"), values.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    told = " ".join(str(name).lower() for name in (speculators, values.get("model_type"), *names))
    if values.get("draft_vocab_size") is not None or "eagle3" in told:
        return EAGLE_3
    for kind in ("medusa", "hydra"):
        if f"{kind}_num_heads" in values or kind in told:
            return f"a {kind.capitalize()} head"
    if speculators is not None:
        return f"a head of speculators ({speculators}), whose format is not supported"
    return None


def _kind_of_weights(stored: Mapping[str, StoredTensor]) -> str | None:
    if any(map(EAGLE_3_TENSORS.fullmatch, stored)):
        return EAGLE_3
    if "fc.weight" not in stored:
        return "a whole model" if WHOLE_MODEL_TENSORS & stored.keys() else None
    rows, *columns = stored["fc.weight"].shape
    return EAGLE_3 if columns == [3 * rows] else None
