"""EAGLE-3 heads as files: the authors', which SpecForge, vLLM and SGLang read and write too.

The config is that of a Llama and describes the head's layer; without `rope_theta` RoPE's base is
10000. `d2t` holds, for each token of the draft vocabulary, its id less its place; `t2d` marks these
tokens and follows from it. Both are absent if all tokens are drafted. vLLM numbers tapped layers as
`Taps` does; SpecForge and SGLang, which look in `eagle_config`, count from 0. The norms of
EAGLE-3.1 before `fc` are `fc_norm.0` and so on, or `input_norm`; `norm_output` in the config is
that of the output.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.core.errors import SpecjaxError, warn
from specjax.core.settings import declared_fields
from specjax.models.config import TransformerConfig, json_object
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head, default_taps
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_format import (
    ABOUT,
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Shapes,
    Signature,
    Values,
    has,
    rows,
)

TAPS = "eagle_aux_hidden_state_layer_ids"
NORM_OUTPUT = "norm_output"


def _config(
    shapes: Shapes, layers: TransformerConfig, values: Values, target: TransformerConfig
) -> Eagle3Config:
    """Takes the tapped layers from config.json, or as published from the target's depth."""
    nested = json_object(values, "eagle_config")
    stored = values.get(TAPS) or (), nested.get(TAPS) or ()
    listed, counted = (declared_fields(Eagle3Config, {"taps": taps})["taps"] for taps in stored)
    taps = listed or tuple(layer + 1 for layer in counted) or default_taps(target)
    tap_norm = "joined" if has(shapes, r"input_norm\.weight") else "none"
    tap_norm = "each" if has(shapes, r"fc_norm\.0\.weight") else tap_norm
    if values.get("norm_before_residual"):  # which no tensor shows
        raise SpecjaxError("norm_before_residual is not supported; use a head without it")
    norm_output = bool(values.get(NORM_OUTPUT, nested.get(NORM_OUTPUT)))
    if norm_output and ABOUT not in values:
        warn(
            f"the head's config has {NORM_OUTPUT}, so it drafts from normed outputs; SpecForge "
            f"trained some such heads without: if almost nothing is accepted, set {NORM_OUTPUT} to "
            "false there"
        )
    return Eagle3Config(layers, taps, tap_norm, norm_output, draft_vocab_size=rows(shapes, "d2t"))


def _decode(params: dict[str, Any]) -> dict[str, Any]:
    if DRAFT_TOKENS not in params:
        return params
    offsets = params[DRAFT_TOKENS]
    return params | {DRAFT_TOKENS: offsets + jnp.arange(len(offsets), dtype=offsets.dtype)}


def _encode(file: HeadFile) -> None:
    config = file.config
    file.values["draft_vocab_size"] = config.num_drafted
    if config.norm_output:
        file.values[NORM_OUTPUT] = True
    if config.taps != default_taps(file.target):
        file.values[TAPS] = list(config.taps)
        file.values["eagle_config"] = {TAPS: [tap - 1 for tap in config.taps]}
    if "d2t" in file.tensors:
        tokens = np.asarray(file.tensors["d2t"], np.int64)
        file.tensors["d2t"] = tokens - np.arange(len(tokens))
        file.tensors["t2d"] = np.isin(np.arange(config.vocab_size), tokens)


NAMES = (
    Names("layer.", "midlayer."),
    Names("fc_norm_{}.", "fc_norm.{}."),
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
