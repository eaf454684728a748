"""Llama 1 to 3, Vicuna, TinyLlama, and other models with their architecture."""

from specjax.models.families.family import Family, read_common

MODEL_TYPE = "llama"
FAMILY = Family(
    MODEL_TYPE,
    "LlamaForCausalLM",
    read_common,
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
)
