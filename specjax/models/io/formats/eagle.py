"""EAGLE, EAGLE-2 and HASS heads as files: the authors', vLLM's and SGLang's.

The config is that of a Llama and describes the layers of the head. Embedding and LM head are the
target's; copies of them in a file are ignored. Attention with biases has none at the output. The
draft vocabulary is in `draft_tokens`, which only specjax reads.
"""

import jax.numpy as jnp

from specjax.core.errors import SpecjaxError
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_format import HeadFile, HeadFormat, Layout, Names, Signature, has, rows

FC_BIAS = "fc.bias"


def _for_authors(file: HeadFile) -> None:
    """Writes RoPE scaling with two fields; `rope_parameters` beside it holds all."""
    rope = file.config.layers.rope
    if rope.rope_type in ("linear", "dynamic"):
        file.values["rope_scaling"] = {"type": rope.rope_type, "factor": rope.factor}


def _for_servers(file: HeadFile) -> None:
    """Drops the draft vocabulary, and keeps a shorter head from bounding the length of texts."""
    file.tensors.pop(DRAFT_TOKENS, None)
    layers = file.config.layers
    if layers.rope.rope_type != "dynamic":  # which depends on the length
        longest = max(layers.max_position_embeddings, file.target.max_position_embeddings)
        file.values["max_position_embeddings"] = longest


def _for_vllm(file: HeadFile) -> None:
    _for_servers(file)
    bias = file.tensors.pop(FC_BIAS, None)
    if bias is not None and jnp.any(bias != 0):
        raise SpecjaxError(
            f"cannot save {file.folder}: {FC_BIAS} is not zero, and vLLM reads no bias of fc; "
            "train a head without fc bias, or choose another layout"
        )


def _for_sglang(file: HeadFile) -> None:
    """Adds the bias that SGLang's `fc` always has, and unties the LM head.

    SGLang replaces the embedding and the LM head, and fails where they are one.
    """
    _for_servers(file)
    file.values["tie_word_embeddings"] = False
    weight = file.tensors["fc.weight"]
    file.tensors.setdefault(FC_BIAS, jnp.zeros(weight.shape[:1], weight.dtype))


EAGLE = HeadFormat(
    kind="eagle",
    signature=Signature("an EAGLE, EAGLE-2 or HASS head", tensors=r"fc\..+"),
    module=EagleHead,
    config=lambda shapes, layers, *_: EagleConfig(
        layers, has(shapes, r"fc\.bias"), draft_vocab_size=rows(shapes, DRAFT_TOKENS)
    ),
    claims=lambda config: {"bias": config.fc_bias},
    names=((Names("layers_{}.", "layers.{}."), Names("", "")),),
    layouts={
        "eagle": Layout(edit=_for_authors),
        # It puts "Eagle" before the architecture by itself. An embedding in the file keeps some
        # versions from sharing the target's, and is not loaded either.
        "vllm": Layout(values=lambda config: {"bias": False}, edit=_for_vllm, has_embedding=False),
        "sglang": Layout(  # which takes `bias` for one of the attention
            values=lambda config: {"architectures": ["LlamaForCausalLMEagle"]}, edit=_for_sglang
        ),
    },
    layer_keys={"attention_bias": "qkv_bias"},
    prefix=r"model\.",  # of servers
    ignored=lambda values: r"embed_tokens\.weight|lm_head\.weight",
    optional=lambda values: r".+\.o_proj\.bias",
    embedding="embed_tokens.weight",  # which only servers read
)
