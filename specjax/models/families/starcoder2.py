"""StarCoder2: layer norms, biases everywhere, and a feed-forward without gate."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import TransformerConfig
from specjax.models.families.family import LLAMA_NAMES, Family, read_common

NAMES = (
    ("layers_{}.mlp.up_proj.", "model.layers.{}.mlp.c_fc."),
    ("layers_{}.mlp.down_proj.", "model.layers.{}.mlp.c_proj."),
    *LLAMA_NAMES,
)


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    return read_common(
        values,
        {"norm": "layer", "has_gate": False},
        mlp_bias=values["attention_bias"],
        sliding_window=values["sliding_window"],
    )


FAMILY = Family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    read,
    NAMES,
    defaults={
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    keys={"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias"},
)
