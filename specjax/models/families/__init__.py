"""Model families, one file each: each reads its `config.json` and names its weights.

A family's module has `MODEL_TYPE`, `ARCHITECTURE`, `DEFAULTS` (for absent keys), `NAMES` (of
weights) and `read`. To add a family, write such a module and list it in `FAMILIES`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.core.files import read_json, readable
from specjax.models.config import TransformerConfig
from specjax.models.families import llama, mistral

FAMILIES = {family.MODEL_TYPE: family for family in (llama, mistral)}


def config_from(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`.

    Raises:
        SpecjaxError: if the architecture, activation or RoPE type is not supported, or a field is
            missing or malformed.
    """
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise SpecjaxError(
            f"model_type {kind!r} is not supported; specjax supports {', '.join(FAMILIES)} "
            "(Llama 1 to 3, Vicuna, TinyLlama, Mistral)"
        )
    try:
        return FAMILIES[kind].read(FAMILIES[kind].DEFAULTS | dict(values))
    except KeyError as missing:
        raise SpecjaxError(
            f"there is no {missing}, which a {kind} model needs; check the config"
        ) from None


def read_config(folder: Path) -> TransformerConfig:
    """Reads `folder/config.json`, as `config_from` does; errors name the file."""
    path = folder / "config.json"
    with readable(path):
        exists = path.is_file()
    if not exists:
        raise SpecjaxError(
            f"{folder} has no config.json; give a folder that has one or a GGUF file"
        )
    values = read_json(path)
    try:
        return config_from(values)
    except SpecjaxError as error:
        raise SpecjaxError(f"{path}: {error}") from None


def config_values(config: TransformerConfig) -> dict[str, Any]:
    """Returns the content of a `config.json` that `transformers` reads as the same model."""
    values = dataclasses.asdict(config)
    del values["rope"]
    if config.sliding_window is None and config.model_type == llama.MODEL_TYPE:
        del values["sliding_window"]
    types = list(values.pop("layer_types"))
    if types:
        values["layer_types"] = types
    eos = list(config.eos_token_id)
    values["eos_token_id"] = (eos if len(eos) > 1 else eos[0]) if eos else None
    return values | {
        "architectures": [FAMILIES[config.model_type].ARCHITECTURE],
        "hidden_act": "silu",
        **config.rope.to_huggingface(),
    }
