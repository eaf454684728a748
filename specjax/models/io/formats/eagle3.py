"""EAGLE-3 heads as files: the authors', which SpecForge, vLLM and SGLang read and write too.

The config is that of a Llama and describes the head's layer; without `rope_theta` RoPE's base is
10000. `d2t` holds, for each token of the draft vocabulary, its id less its place; `t2d` marks these
tokens and follows from it. Both are absent if all tokens are drafted.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_format import (
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Shapes,
    Signature,
    Values,
    rows,
)

TAPS = "eagle_aux_hidden_state_layer_ids"


def _config(
    shapes: Shapes, layers: TransformerConfig, values: Values, target: TransformerConfig
) -> Eagle3Config:
    """Takes the tapped layers from config.json, or as published from the target's depth."""
    named = values.get(TAPS) or (values.get("eagle_config") or {}).get(TAPS)
    tapped = tuple(named) if named else default_taps(target)
    return Eagle3Config(layers, tapped, draft_vocab_size=rows(shapes, "d2t"))


def _decode(params: dict[str, Any]) -> dict[str, Any]:
    if DRAFT_TOKENS not in params:
        return params
    offsets = params[DRAFT_TOKENS]
    return params | {DRAFT_TOKENS: offsets + jnp.arange(len(offsets), dtype=offsets.dtype)}


def _encode(file: HeadFile) -> None:
    config = file.config
    file.values["draft_vocab_size"] = config.num_drafted
    if config.tapped != default_taps(file.target):
        file.values[TAPS] = list(config.tapped)
    if "d2t" in file.tensors:
        tokens = np.asarray(file.tensors["d2t"], np.int64)
        file.tensors["d2t"] = tokens - np.arange(len(tokens))
        file.tensors["t2d"] = np.isin(np.arange(config.vocab_size), tokens)


NAMES = (
    Names("layer.", "midlayer."),
    Names(DRAFT_TOKENS, "d2t"),
    Names("", ""),
)
SERVED = (Names("layer.", "layers.0."), *NAMES[1:])

EAGLE3 = HeadFormat(
    kind="eagle3",
    signature=Signature(
        "an EAGLE-3 head",
        tensors=r"midlayer\..+|d2t|t2d|layers\.0\.hidden_norm\.weight",
        config=r"draft_vocab_size|eagle3",
    ),
    module=Eagle3Head,
    config=_config,
    claims=lambda config: {},
    names=(NAMES, SERVED),
    layouts={
        "eagle3": Layout(
            values=lambda config: {"architectures": ["LlamaForCausalLMEagle3"]}, edit=_encode
        )
    },
    layer_keys={"attention_bias": "qkv_bias"},
    prefix=r"model\.",
    ignored=lambda values: r"embed_tokens\.weight|t2d",
    decode=_decode,
)
