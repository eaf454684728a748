"""EAGLE, EAGLE-2 and HASS heads as files: the authors', vLLM's and SGLang's.

The config is that of a Llama and describes the layers of the head. Embedding and LM head are the
target's; copies of them in a file are ignored. Biases of the attention have none at the output.
`draft_tokens` is our own: the draft vocabulary, which other readers do without.
"""

import jax.numpy as jnp

from specjax.core.errors import SpecjaxError
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.layered import DRAFT_TOKENS
from specjax.models.io.head_format import (
    TORCH_WEIGHTS,
    HeadFile,
    HeadFormat,
    Layout,
    Names,
    Signs,
    has,
    rows,
)

FC_BIAS = "fc.bias"


def _for_authors(file: HeadFile) -> None:
    """RoPE scaling has two fields, not one more; `rope_parameters` beside it says the rest."""
    rope = file.config.layers.rope
    if rope.rope_type in ("linear", "dynamic"):
        file.values["rope_scaling"] = {"type": rope.rope_type, "factor": rope.factor}
    if file.name == TORCH_WEIGHTS:  # which only their own code reads
        file.tensors.pop(DRAFT_TOKENS, None)


def _for_servers(file: HeadFile) -> None:
    """A draft that is shorter than the target would bound the text; all tokens are drafted."""
    file.tensors.pop(DRAFT_TOKENS, None)
    own = file.config.layers
    if own.rope.rope_type != "dynamic":  # which depends on the length
        longest = max(own.max_position_embeddings, file.target.max_position_embeddings)
        file.values["max_position_embeddings"] = longest


def _for_vllm(file: HeadFile) -> None:
    _for_servers(file)
    bias = file.tensors.pop(FC_BIAS, None)
    if bias is not None and jnp.any(bias != 0):
        raise SpecjaxError(
            f"cannot save {file.folder}: {FC_BIAS} is not zero, and vLLM reads no bias of fc; "
            "train a head without fc bias, or choose another layout"
        )
    file.values["bias"] = False


def _for_sglang(file: HeadFile) -> None:
    """Its `fc` always has a bias, and `bias` in its config is one of the attention.

    It replaces the embedding and the LM head, and fails where they are one.
    """
    _for_servers(file)
    file.values["tie_word_embeddings"] = False
    weight = file.tensors["fc.weight"]
    file.tensors.setdefault(FC_BIAS, jnp.zeros(weight.shape[:1], weight.dtype))


EAGLE = HeadFormat(
    kind="eagle",
    signs=Signs("an EAGLE, EAGLE-2 or HASS head", tensors=r"fc\..+"),
    module=EagleHead,
    config=EagleConfig,
    fields={"fc_bias": has(r"fc\.bias"), "draft_vocab_size": rows(DRAFT_TOKENS, 0)},
    keys={"bias": "fc_bias"},
    names=((Names("layers_{}.", "layers.{}."), Names("", "")),),
    layouts={
        "eagle": Layout(edit=_for_authors),
        # It puts "Eagle" before the architecture by itself. An embedding in the file keeps some
        # versions from sharing the target's, and is not loaded either.
        "vllm": Layout(edit=_for_vllm, has_embedding=False),
        "sglang": Layout(
            keys={}, constants={"architectures": ["LlamaForCausalLMEagle"]}, edit=_for_sglang
        ),
    },
    layer_keys={"attention_bias": "qkv_bias"},
    prefix=r"model\.",  # of servers
    ignored=r"embed_tokens\.weight|lm_head\.weight",
    embedding="embed_tokens.weight",  # which only servers read
    optional=r".+\.o_proj\.bias",
)
