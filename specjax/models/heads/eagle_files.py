"""EAGLE heads as files: read what the authors and others have published, write what servers read.

A folder holds a Llama config for the layers of the head (`config.json`) and flat tensors: `fc`,
`layers.*`, and a copy of the target's embedding that no loader needs. Notable choices: whether `fc`
has a bias is decided by the file, because configs often do not say; what else is in the file but
not in the head is an error, because a head that is read in part drafts badly and nobody sees why.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, readable
from specjax.models.config import CHECK, TransformerConfig
from specjax.models.families import config_from, config_values
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.files import check_layout, check_sizes, read_values, write_head, zeros
from specjax.models.heads.other_heads import refuse_other_configs, refuse_other_weights
from specjax.models.heads.parallel import ParallelHead
from specjax.models.io.checkpoint import CONFIG, mismatches
from specjax.models.io.huggingface import ROTARY_BUFFER, check_weights, read_params
from specjax.models.io.weights import StoredTensor, stored_tensors

ARCHITECTURES = {  # by whose loader is to read it; vLLM puts "Eagle" in front by itself
    "eagle": "LlamaForCausalLM",
    "vllm": "LlamaForCausalLM",
    "sglang": "LlamaForCausalLMEagle",
}
LAYOUTS = tuple(ARCHITECTURES)  # the first is what training writes
EMBEDDING, FC_BIAS = "embed_tokens.weight", "fc.bias"
LayeredHead = EagleHead | ParallelHead  # whose files have the same names
OF_THE_TARGET = (EMBEDDING, "lm_head.weight")  # ignored: the target's own are used


# ---- Reading -----------------------------------------------------------------------------------


def load_eagle(
    folder: Path, target: TransformerConfig, dtype: DTypeLike, progress: bool = False
) -> tuple[EagleHead, dict[str, Any]]:
    """Reads an EAGLE, EAGLE-2 or HASS head: the module and its params.

    Embedding and LM head are the target's, copies of them in the file are ignored. A target of the
    same shape passes: see `check_owner`.

    Args:
        folder: as published, or as `save_eagle` wrote it, in any layout.
        target: whose features the head is to predict.
        dtype: of the params, whatever the files store.
        progress: show a bar on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if a file is missing or damaged, does not fit the others or the target, is
            quantised, or holds something else than such a head.
    """
    folder = expand_user(folder)
    with readable(folder):
        path, values = folder / CONFIG, read_values(folder, "an EAGLE head")
        refuse_other_configs(path, values, "eagle")
        layers, stated_bias = read_layers(path, values), read_bias(path, values)
        stored = stored_head(folder)
        refuse_other_weights(folder, stored, "eagle")
        check_sizes(str(path), layers.hidden_size, layers.vocab_size, target)
        fc_bias = FC_BIAS in stored
        check_bias(path, stated_bias, fc_bias)
        head = EagleHead(EagleConfig(layers, fc_bias))
        params = read_head(folder, head, stored, dtype, progress)
    return head, params


def read_layers(path: Path, values: Mapping[str, Any]) -> TransformerConfig:
    """The layers that the config `values` of a head describes; they look at all of the text.

    Raises:
        SpecjaxError: if it does not describe layers of a Llama; the message names `path`.
    """
    of_attention = "qkv_bias" if "qkv_bias" in values else "attention_bias"
    read = {"model_type": "llama", **values, "attention_bias": values.get(of_attention)}
    try:
        layers = config_from(read)
    except SpecjaxError as error:
        raise SpecjaxError(f"{path}: {error}") from None
    return replace(layers, sliding_window=None)


def read_bias(path: Path, values: Mapping[str, Any]) -> bool | None:
    """Whether the config of a head says that `fc` has a bias; None: it says nothing.

    Raises:
        SpecjaxError: if it is neither; the message names `path`.
    """
    bias = values.get("bias")
    if not (bias is None or isinstance(bias, bool)):
        raise SpecjaxError(f"{path}: bias {bias!r} is not true or false; {CHECK}")
    return bias


def check_bias(path: Path, stated: bool | None, found: bool) -> None:
    """Raises SpecjaxError if config and weights do not say the same of a bias of `fc`."""
    if stated in (None, found):
        return
    if found:
        told = f"says that fc has no bias, but the weights hold {FC_BIAS}; set it to true there"
    else:
        told = f"says that fc has a bias, but the weights hold no {FC_BIAS}; set it to false there"
    raise SpecjaxError(f"{path}: bias {told}, or download the head again")


def stored_head(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a head by their published names, without the prefix that servers add.

    Raises:
        SpecjaxError: as `stored_tensors`.
    """
    return {name.removeprefix("model."): tensor for name, tensor in stored_tensors(folder).items()}


def read_head(
    folder: Path,
    head: LayeredHead,
    stored: Mapping[str, StoredTensor],
    dtype: DTypeLike,
    progress: bool,
) -> dict[str, Any]:
    """The params of `head`; copies of what is the target's are left out.

    Raises:
        SpecjaxError: if the tensors are not those of the head, or quantised.
    """
    expected = _expected(head)
    found = {
        name: tensor
        for name, tensor in stored.items()
        if name not in OF_THE_TARGET and not ROTARY_BUFFER.fullmatch(name)
    }
    for name, shape in expected.items():
        if name.endswith("o_proj.bias") and name not in found:  # `qkv_bias` gives it none
            found[name] = zeros(name, shape)
    check_weights(folder, found, expected)
    wanted = {_path(name): tensor for name, tensor in found.items()}
    return read_params(wanted, dtype, f"Loading {folder.name}", progress)


# ---- Writing -----------------------------------------------------------------------------------


def save_eagle(
    folder: Path,
    head: EagleHead,
    params: Mapping[str, Any],
    dtype: DTypeLike,
    *,
    target: TransformerConfig,
    target_params: Mapping[str, Any] | None = None,
    layout: str = "eagle",
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes a head into a new `folder`, wholly or not at all.

    Args:
        folder: does not exist yet, or is empty.
        head: the module.
        params: of the head.
        dtype: of the stored tensors.
        target: whose features the head predicts.
        target_params: of which the embedding is written along; without it there is none, which
            specjax and the authors' code do not mind.
        layout: `eagle` (the authors' code), `vllm` or `sglang`: who is to read it.
        about: JSON for `read_about`: `target` is the fingerprint that `check_owner` compares.

    Raises:
        SpecjaxError: if `folder` already holds something or cannot be written, the params are not
            those of the head, the head is not one for this target, or the layout cannot hold it.
    """
    check_layout(layout, LAYOUTS)
    check_sizes(f"cannot save {folder}", head.config.hidden_size, head.config.vocab_size, target)
    tensors = tensors_of(folder, head, params, target_params)
    tensors = _with_bias_of(layout, tensors, folder)
    config = _config(head.config.layers, target, layout, FC_BIAS in tensors)
    write_head(folder, config, tensors, dtype, about)


def _with_bias_of(layout: str, tensors: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """vLLM knows no bias of `fc`; SGLang knows no `fc` without one."""
    tensors, bias = dict(tensors), tensors.get(FC_BIAS)
    if layout == "sglang" and bias is None:
        weight = tensors["fc.weight"]
        tensors[FC_BIAS] = jnp.zeros(weight.shape[:1], weight.dtype)
    if layout == "vllm" and bias is not None:
        if np.any(np.asarray(bias) != 0):
            raise SpecjaxError(
                f"cannot save {folder}: {FC_BIAS} is not zero, and vLLM reads no bias of fc; "
                "train a head without fc bias, or choose another layout"
            )
        del tensors[FC_BIAS]
    return tensors


def _config(
    layers: TransformerConfig, target: TransformerConfig, layout: str, fc_bias: bool
) -> dict[str, Any]:
    layers = replace(layers, model_type="llama")  # which a Mistral layer without window is
    is_dynamic = layers.rope.rope_type == "dynamic"  # which reads the length
    if layout != "eagle" and not is_dynamic:  # in servers a shorter draft bounds the text
        longest = max(layers.max_position_embeddings, target.max_position_embeddings)
        layers = replace(layers, max_position_embeddings=longest)
    values = config_values(layers)
    values |= {"architectures": [ARCHITECTURES[layout]], "qkv_bias": layers.attention_bias}
    if layout != "sglang":  # it takes `bias` for one of the attention; absent means true for fc
        values["bias"] = fc_bias
    if layout == "eagle" and layers.rope.rope_type in ("linear", "dynamic"):
        # Two fields, not one more; the new spelling beside it says the rest.
        values["rope_scaling"] = {"type": layers.rope.rope_type, "factor": layers.rope.factor}
    return values


# ---- What a head consists of -------------------------------------------------------------------


def tensors_of(
    folder: Path,
    head: LayeredHead,
    params: Mapping[str, Any],
    target_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the file of a head holds, by published name; with `target_params` also the embedding.

    Raises:
        SpecjaxError: if the params are not those of the head; the message names `folder`.
    """
    tensors, expected = _by_published_name(params), _expected(head)
    if target_params is not None:
        tensors[EMBEDDING] = target_params["embed_tokens"]["weight"]
        expected[EMBEDDING] = (head.config.vocab_size, head.config.hidden_size)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if complaints := mismatches(found, expected):
        raise SpecjaxError(f"cannot save {folder}: {complaints}; give the head of these params")
    return tensors


def _expected(head: LayeredHead) -> dict[str, tuple[int, ...]]:
    params = jax.eval_shape(head.initialise, jax.random.key(0))
    return {name: leaf.shape for name, leaf in _by_published_name(params).items()}


def _by_published_name(params: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict(flatten_dict(params, sep="."))
    return {re.sub(r"^layers_(\d+)\.", r"layers.\1.", path): leaf for path, leaf in flat.items()}


def _path(name: str) -> str:
    """Our path of a published name: `layers_0.mlp.up_proj.weight` of `layers.0.mlp...`."""
    return re.sub(r"^layers\.(\d+)\.", r"layers_\1.", name)
