"""GPTBigCode: StarCoder, SantaCoder and tiny_starcoder_py."""

from collections.abc import Mapping
from typing import Any

from specjax.core.errors import SpecjaxError
from specjax.models.config import Rope, TransformerConfig
from specjax.models.families.family import Family, read_common

NAMES = (
    ("embed_tokens.", "transformer.wte."),
    ("embed_positions.", "transformer.wpe."),
    ("layers_{}.input_layernorm.", "transformer.h.{}.ln_1."),
    ("layers_{}.self_attn.q_proj.", "transformer.h.{}.attn.c_attn."),
    ("layers_{}.self_attn.k_proj.", "transformer.h.{}.attn.c_attn."),
    ("layers_{}.self_attn.v_proj.", "transformer.h.{}.attn.c_attn."),
    ("layers_{}.self_attn.o_proj.", "transformer.h.{}.attn.c_proj."),
    ("layers_{}.post_attention_layernorm.", "transformer.h.{}.ln_2."),
    ("layers_{}.mlp.up_proj.", "transformer.h.{}.mlp.c_fc."),
    ("layers_{}.mlp.down_proj.", "transformer.h.{}.mlp.c_proj."),
    ("norm.", "transformer.ln_f."),
    ("lm_head.", "lm_head."),
)
VARIANT = {"norm": "layer", "has_gate": False, "has_learned_positions": True}


def read(values: Mapping[str, Any]) -> TransformerConfig:
    """Reads the content of a `config.json`; see `read_common`."""
    if not values["multi_query"]:
        raise SpecjaxError("multi_query false is not supported; use a model with multi_query true")
    variant = VARIANT | {"query_pre_attn_scalar": None if values["scale_attn_weights"] else 1.0}
    return read_common(
        values,
        variant,
        intermediate_size=values["intermediate_size"] or 4 * values["hidden_size"],
        num_key_value_heads=1,
        attention_bias=True,
        mlp_bias=True,
        rope=Rope(),
    )


def _written(config: TransformerConfig) -> dict[str, Any]:
    is_scaled = config.variant.query_pre_attn_scalar is None
    return {"multi_query": True, "scale_attn_weights": is_scaled}


FAMILY = Family(
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    read,
    NAMES,
    defaults={
        "max_position_embeddings": 1024,
        "intermediate_size": None,
        "rms_norm_eps": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "multi_query": True,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    written=_written,
)
