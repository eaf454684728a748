"""Gemma 2, and the text models of Gemma 3."""

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.models.config import FULL, SLIDING, Rope, TransformerConfig, json_object
from specjax.models.families.family import LLAMA_NAMES, Family, read_common, windows

NAMES = (  # Gemma has a norm after attention where Llama's `post_attention_layernorm` is the next
    ("layers_{}.post_attention_layernorm.", "model.layers.{}.pre_feedforward_layernorm."),
    ("layers_{}.attention_output_norm.", "model.layers.{}.post_attention_layernorm."),
    ("layers_{}.mlp_output_norm.", "model.layers.{}.post_feedforward_layernorm."),
    *LLAMA_NAMES,
)
KEYS = {"hidden_act": "hidden_activation"}
SCORES = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
DEFAULTS_2 = {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
DEFAULTS_3 = {
    "max_position_embeddings": 131072,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def _variant(values: Mapping[str, Any]) -> dict[str, Any]:
    if values.get("use_bidirectional_attention"):
        raise SpecjaxError(
            "use_bidirectional_attention is not supported; use a model that generates text"
        )
    return {
        "norm": "rms_plus_one",
        "has_post_norms": True,
        "has_scaled_embeddings": True,
        **{name: values[name] for name in SCORES},
    }


def read_gemma2(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    layers = windows(values, lambda layer: layer % 2 == 0, values["sliding_window"])
    return read_common(values, _variant(values), **layers)


def read_gemma3(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; RoPE is under two new keys, or in several old ones."""
    period = values.get("sliding_window_pattern") or 6
    layers = windows(values, lambda layer: (layer + 1) % period != 0, values["sliding_window"])
    parameters = json_object(values, "rope_parameters")
    ropes = {
        FULL: {"rope_theta": values["rope_theta"], **json_object(values, "rope_scaling")},
        SLIDING: {"rope_theta": values["rope_local_base_freq"]},
    }
    rope, sliding_rope = (
        Rope.from_huggingface(
            {**values, "rope_scaling": old, "rope_parameters": parameters.get(kind)}
        )
        for kind, old in ropes.items()
    )
    variant = _variant(values) | {"has_qk_norm": True, "sliding_rope": sliding_rope}
    variant["attn_logit_softcapping"] = None  # the key has no effect in transformers
    return read_common(values, variant, rope=rope, **layers)


def _written_2(config: TransformerConfig) -> dict[str, Any]:
    values = {name: getattr(config.variant, name) for name in SCORES}
    return values | {SCORES[0]: round(values[SCORES[0]])}  # a whole number to transformers


def _written_3(config: TransformerConfig) -> dict[str, Any]:
    ropes = {FULL: config.rope, SLIDING: config.variant.sliding_rope or config.rope}
    parameters = {kind: rope.to_huggingface()["rope_parameters"] for kind, rope in ropes.items()}
    local = {"rope_local_base_freq": ropes[SLIDING].rope_theta, "rope_parameters": parameters}
    return _written_2(config) | local


GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", read_gemma2, NAMES, DEFAULTS | DEFAULTS_2, KEYS, _written_2
)
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", read_gemma3, NAMES, DEFAULTS | DEFAULTS_3, KEYS, _written_3
)
