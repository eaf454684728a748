"""The target model and the drafter heads, as Flax modules with pure methods."""

from specjax.models.cache import KVCache
from specjax.models.config import Rope, TransformerConfig
from specjax.models.target import ModelOutput, QueryRows, Taps, Target, causal_rows
from specjax.models.transformer import Transformer

__all__ = [
    "KVCache",
    "ModelOutput",
    "QueryRows",
    "Rope",
    "Taps",
    "Target",
    "Transformer",
    "TransformerConfig",
    "causal_rows",
]
