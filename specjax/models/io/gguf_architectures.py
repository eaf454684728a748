"""The architectures of GGUF files: the fields of their configs, and how they store weights.

llama.cpp infers facts that a file leaves out, such as the layers with a sliding window. They are
inferred here in the same way.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope, TransformerConfig
from specjax.models.families import config_from

AGAIN = "download it again"
OTHER = "use the model's folder in Hugging Face format"
FIELDS = {  # of "llama.", as config.json calls them
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
MORE_FIELDS = {  # of other architectures
    "attention.layer_norm_epsilon": "rms_norm_eps",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
WITHOUT_EFFECT = ("rope.scaling.finetuned", "tensor_data_layout")
# The ends of a text, which many files do not declare and llama.cpp knows by name.
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
ROPE_DIVISORS = "rope_freqs.weight"  # Llama 3.1's scaling: one divisor per rotary frequency
LONG_ROPE = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
# Layers of the largest models, whose heads are scaled differently.
LARGEST_GEMMAS = {"gemma2": 46, "gemma3_text": 62}

Values = dict[str, Any]
# From the metadata that is left (read keys are popped), the tensors and the values so far to more.
Read = Callable[[Values, Mapping[str, Any], Values], Values]


class Architecture(NamedTuple):
    """One value of `general.architecture`."""

    model_type: str  # of our family
    has_pairs: bool = False  # the two rows of a rotary pair of q and k lie side by side
    adds_one_to_norms: bool = False
    read: Read = lambda unread, tensors, values: {}


def _llama(unread: Values, tensors: Mapping[str, Any], values: Values) -> Values:
    return {"model_type": "mistral"} if values.get("sliding_window") else {}


def _gemma(unread: Values, tensors: Mapping[str, Any], values: Values) -> Values:
    is_largest = values["num_hidden_layers"] == LARGEST_GEMMAS[values["model_type"]]
    by_heads = values["hidden_size"] // values["num_attention_heads"]
    return {"query_pre_attn_scalar": by_heads if is_largest else values["head_dim"]}


def _phi3(unread: Values, tensors: Mapping[str, Any], values: Values) -> Values:
    original = unread.pop("rope.scaling.original_context_length", values["max_position_embeddings"])
    head_dim = values["hidden_size"] // values["num_attention_heads"]
    more = {
        "sliding_window": values.get("sliding_window") or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": unread.pop("rope.dimension_count", head_dim) / head_dim,
    }
    attention_factor = unread.pop("rope.scaling.attn_factor", None)
    divisors = {ours: tensors[name].read() for name, ours in LONG_ROPE.items() if name in tensors}
    if divisors:
        lists = {name: factors.tolist() for name, factors in divisors.items()}
        more["rope_scaling"] = {"type": "longrope", "attention_factor": attention_factor} | lists
    return more


ARCHITECTURES = {
    "llama": Architecture("llama", has_pairs=True, read=_llama),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma2": Architecture("gemma2", adds_one_to_norms=True, read=_gemma),
    "gemma3": Architecture("gemma3_text", adds_one_to_norms=True, read=_gemma),
    "phi3": Architecture("phi3", read=_phi3),
    "smollm3": Architecture("smollm3", has_pairs=True),
    "starcoder": Architecture("gpt_bigcode"),
    "starcoder2": Architecture("starcoder2"),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Returns the architecture of a file; raises SpecjaxError if it is not supported."""
    name = metadata["general.architecture"]
    if name not in ARCHITECTURES:
        raise SpecjaxError(
            f"GGUF files of architecture {name!r} are not supported, only of "
            f"{', '.join(ARCHITECTURES)}; use another model"
        )
    return ARCHITECTURES[name]


def read_config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> TransformerConfig:
    """Returns the config of the model in a file; raises SpecjaxError for unsupported values."""
    name, architecture = metadata["general.architecture"], architecture_of(metadata)
    start = f"{name}."
    unread = {key[len(start) :]: metadata[key] for key in metadata if key.startswith(start)}
    fields = FIELDS | MORE_FIELDS
    values = {ours: unread.pop(theirs) for theirs, ours in fields.items() if theirs in unread}
    scaling = unread.pop("rope.scaling.type", "linear")
    factor = unread.pop("rope.scaling.factor", None)
    if scaling == "none" or (scaling == "linear" and not factor):
        scaling = "default"
    if not unread.pop("attention.causal", True):
        raise SpecjaxError(f"{name}.attention.causal = False is not supported; use another model")
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    ends = [metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    ends += [token for token, text in enumerate(tokens) if text in ENDS]
    values = {
        "vocab_size": len(tokens),
        "model_type": architecture.model_type,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(end for end in ends if end is not None)),
        "rope_scaling": {"rope_type": scaling, "factor": factor},
        **values,
    }
    config = config_from(values | architecture.read(unread, tensors, values))
    if config.num_hidden_layers > len(tensors):  # before that many are named
        raise SpecjaxError(f"the metadata describes a larger model than the tensors; {AGAIN}")
    length = unread.pop("rope.scaling.original_context_length", 8192)
    if ROPE_DIVISORS in tensors:
        config = replace(config, rope=_llama3(config, tensors[ROPE_DIVISORS], length))
    for key in ("rope.dimension_count", "attention.value_length"):
        if unread.get(key) == config.head_dim:
            del unread[key]
    if others := [key for key in unread if unread[key] and key not in WITHOUT_EFFECT]:
        value = f"{unread[others[0]]}"[:40]
        raise SpecjaxError(f"{name}.{others[0]} = {value} is not supported; use another model")
    return config


def _llama3(config: TransformerConfig, tensor: Any, original_length: int) -> Rope:
    """Returns the scaling of Llama 3.1 that has these divisors."""
    if config.rope.rope_type == "default" and tensor.shape == (config.head_dim // 2,):
        divisors = tensor.read()
        scaled = replace(
            config.rope,
            rope_type="llama3",
            factor=float(divisors.max()),
            original_max_position_embeddings=original_length,
        )
        if np.allclose(rope_divisors(scaled, config.head_dim), divisors, rtol=1e-3):
            return scaled
    raise SpecjaxError(f"{ROPE_DIVISORS} is not Llama 3.1's scaling of RoPE; {OTHER}")


def rope_divisors(rope: Rope, head_dim: int) -> np.ndarray:
    """Returns what Llama 3.1's scaling divides each rotary frequency by, float32."""
    plain, slowed = (
        scaling.inverse_frequencies(head_dim, 0, jnp.zeros((1, 1), int))[0, 0]
        for scaling in (replace(rope, rope_type="default"), rope)
    )
    return np.asarray(plain / slowed)
