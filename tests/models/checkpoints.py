"""Tiny random Hugging Face checkpoints, saved and run by transformers.

Weights are drawn wide (standard deviation 0.2), so that attention is far from uniform and a wrong
mask or rotation shows in the logits. torch is imported inside the functions: a test that needs them
asks for it with `pytest.importorskip("torch")`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.core.errors import SpecjaxError

TINY = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WIDTH = 0.2


WINDOW = {"num_key_value_heads": 2, "sliding_window": 6}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.0}}
LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
GPT_BIGCODE = {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
FAMILIES = {  # a tiny model of each, with all that is its own
    "qwen2": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3": {"head_dim": 12, "num_key_value_heads": 2},
    "gemma2": WINDOW | {"head_dim": 8, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOW
    | {"head_dim": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_bigcode": GPT_BIGCODE | {"activation_function": "gelu"},
    "starcoder2": WINDOW,
    "phi3": {
        "sliding_window": 12,
        "rope_scaling": {"type": "longrope"} | LONG,
        "original_max_position_embeddings": 90,
        "pad_token_id": 0,
    },
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
}


def build(kind: str = "llama", seed: int = 0, **settings: Any) -> Any:
    """A random transformers model (`kind` is its model_type) with eager attention, float32."""
    import torch
    import transformers

    given = {} if "n_embd" in settings else TINY
    common = {name: TINY[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = transformers.AutoConfig.for_model(kind, **(given | common | settings))
    model_class = transformers.AutoModelForCausalLM
    model = model_class.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * WIDTH
            is_norm = "norm" in name or ".ln_" in name
            weight.copy_(1 + noise if is_norm and name.endswith("weight") else noise)
    return model


def save(folder: Path, model: Any, dtype: str = "float32", shard_size: str = "1GB") -> Path:
    """Saves a copy of `model` stored as `dtype`, in safetensors shards of at most `shard_size`."""
    import torch

    stored = type(model)(model.config)
    stored.load_state_dict(model.state_dict())
    stored.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def forward(model: Any, tokens: np.ndarray) -> Any:
    """Runs transformers over whole texts `[B, Q]`: logits, hidden states, attentions."""
    import torch

    with torch.no_grad():
        return model(
            torch.from_numpy(np.asarray(tokens)).long(),
            output_hidden_states=True,
            output_attentions=True,
            use_cache=False,
        )


def edit_config(folder: Path, **changes: Any) -> None:
    """Rewrites `config.json` by hand; the value `...` removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    kept = {name: value for name, value in values.items() if value is not ...}
    path.write_text(json.dumps(kept))


def failure(read: Callable, path: Path) -> str:
    """The one-line message of a read that must fail, which names the path."""
    with pytest.raises(SpecjaxError) as caught:
        read(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)
