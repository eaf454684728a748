"""Model families: each reads its `config.json` and names its weights.

To add one, write a `Family` in a new file and list it in `FAMILIES`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.core.errors import SpecjaxError, errors_at
from specjax.core.files import read_json, readable
from specjax.models.config import TransformerConfig, check_sizes
from specjax.models.families import (
    gemma,
    gpt_bigcode,
    llama,
    mistral,
    phi3,
    qwen,
    smollm3,
    starcoder2,
)

FAMILIES = {
    family.model_type: family
    for family in (
        *(llama.FAMILY, mistral.FAMILY, qwen.QWEN2, qwen.QWEN3, gemma.GEMMA2, gemma.GEMMA3),
        *(gpt_bigcode.FAMILY, starcoder2.FAMILY, phi3.FAMILY, smollm3.FAMILY),
    )
}
CONFIG = "config.json"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def config_from(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`."""
    kind = values.get("model_type")
    for name in EXPERTS:
        if values.get(name):
            raise SpecjaxError(
                f"{name} {values[name]}: experts are not supported; use a dense model"
            )
    if quantized := values.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        raise SpecjaxError(
            f"weights quantised by {method or 'another program'} are not supported; use the "
            "original model, with quantize int8 or int4 if it should be small"
        )
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = " (its text model alone may be)" if "text_config" in values else ""
        raise SpecjaxError(
            f"model_type {kind!r} is not supported{hint}; specjax supports {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    renamed = {ours: values[theirs] for ours, theirs in family.keys.items() if theirs in values}
    values = {**family.defaults, **values, **renamed}
    check_sizes(values)
    if values.get("num_hidden_layers") == 0:  # only a part of a head may have none
        raise SpecjaxError("num_hidden_layers is 0; check the config")
    try:
        return family.read(values)
    except KeyError as missing:
        name = family.keys.get(missing.args[0], missing.args[0])
        raise SpecjaxError(
            f"there is no {name!r}, which a {kind} model needs; check the config"
        ) from None
    except SpecjaxError:
        raise
    except (TypeError, ValueError, ArithmeticError, IndexError, AttributeError) as error:
        reason = " ".join(f"{error}".split())[:80]
        raise SpecjaxError(f"a value is of a wrong kind ({reason}); check the config") from error


def read_values(folder: Path, advice: str) -> dict[str, Any]:
    """Reads the content of `folder/config.json`; raises SpecjaxError with `advice` without one."""
    path = folder / CONFIG
    with readable(path):
        exists = path.is_file()
    if not exists:
        raise SpecjaxError(f"{folder} holds no {CONFIG}; {advice}")
    return read_json(path)


def read_config(folder: Path) -> TransformerConfig:
    """Reads `folder/config.json`, as `config_from` does; errors name the file."""
    values = read_values(folder, "give a folder that has one or a GGUF file")
    with errors_at(folder / CONFIG):
        return config_from(values)


def config_values(config: TransformerConfig) -> dict[str, Any]:
    """Returns the content of a `config.json` that `transformers` reads as the same model."""
    family, values = FAMILIES[config.model_type], dataclasses.asdict(config)
    del values["rope"], values["variant"]
    if config.sliding_window is None and config.model_type == llama.MODEL_TYPE:
        del values["sliding_window"]
    types = list(values.pop("layer_types"))
    if types:
        values["layer_types"] = types
    eos = list(config.eos_token_id)
    values["eos_token_id"] = (eos if len(eos) > 1 else eos[0]) if eos else None
    if not config.variant.has_learned_positions:
        values |= config.rope.to_huggingface()
    values |= {
        "architectures": [family.architecture],
        "hidden_act": config.variant.hidden_act,
        **family.written(config),
    }
    return {family.keys.get(name, name): value for name, value in values.items()}
