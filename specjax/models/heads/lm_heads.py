"""The target's LM head, for files of heads that have none of their own."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer
