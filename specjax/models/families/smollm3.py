"""SmolLM3: a Llama without rotary embedding in some layers."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import Family, read_common, windows


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    interval = values["no_rope_layer_interval"]
    count = values["num_hidden_layers"]
    has_rope = values.get("no_rope_layers") or [(at + 1) % interval for at in range(count)]
    without = tuple(at for at, has in enumerate(has_rope[:count]) if not has)
    window = values["sliding_window"] if values.get("use_sliding_window") else None
    return read_common(
        values,
        {"layers_without_rope": without},
        **windows(values, lambda layer: layer in without, window),
    )


def _written(config: TransformerConfig) -> dict[str, Any]:
    has_rope = [int(config.rope_of(layer) is not None) for layer in range(config.num_hidden_layers)]
    return {
        "no_rope_layers": has_rope,
        "use_sliding_window": config.sliding_window is not None,
        "pad_token_id": None,  # the default may be outside the vocabulary
    }


FAMILY = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    read,
    defaults={
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    written=_written,
)
