"""The target of these tests: tiny, random, with a real tokenizer."""

from pathlib import Path

import jax
import jax.numpy as jnp

from recipes.pocket import tokenizer
from specjax.cli.prompts import SOURCE
from specjax.models.config import TransformerConfig
from specjax.models.io.huggingface import save_transformer
from specjax.models.transformer import Transformer

VOCABULARY = 320
CONFIG = TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=320,
    bos_token_id=tokenizer.BEGIN_ID,
    eos_token_id=(tokenizer.END_ID,),
)
# One length, and one width of a pass, so that few programs are compiled.
SHORT = ("--max-new-tokens", "24", "--padded-width", "16")


def write_target(folder: Path, config: TransformerConfig = CONFIG) -> None:
    """Saves the target in Hugging Face format."""
    save_transformer(folder, config, Transformer(config).initialise(jax.random.key(3)), jnp.float32)
    made = tokenizer.train_tokenizer([SOURCE, "Rename `count` to `run_length`."], VOCABULARY)
    tokenizer.save(made, folder)
