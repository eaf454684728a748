"""Random heads of every kind for one tiny target, and their files as others make them."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from specjax.loading.methods import METHODS
from specjax.models.config import TransformerConfig
from specjax.models.families import config_from
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.io.head_files import load_head, save_head
from specjax.models.io.head_format import HeadFormat
from specjax.models.transformer import Transformer
from tests.models import checkpoints

TARGET = config_from({"model_type": "llama"} | checkpoints.TINY | {"num_key_value_heads": 2})
FORMATS = METHODS.head_formats
HEADS: dict[str, Any] = {  # by kind and variant
    "eagle": EagleHead(EagleConfig.for_target(TARGET)),
    "eagle, fc bias": EagleHead(EagleConfig.for_target(TARGET, fc_bias=True)),
    "medusa": MedusaHeads(MedusaConfig.for_target(TARGET, 4, 2)),
    "medusa, no LM heads": MedusaHeads(MedusaConfig.for_target(TARGET, 4, 2, False)),
    "hydra": HydraHeads(HydraConfig.for_target(TARGET, False, 4, 3)),
    "hydra, no LM heads": HydraHeads(HydraConfig.for_target(TARGET, False, 4, 3, False)),
    "hydra, prefix": HydraHeads(HydraConfig.for_target(TARGET, True, 4, 3)),
    "hydra, prefix, no LM heads": HydraHeads(HydraConfig.for_target(TARGET, True, 4, 3, False)),
    "parallel": ParallelHead(ParallelConfig.for_target(TARGET, 3, fc_bias=True)),
    "eagle, draft vocabulary": EagleHead(
        replace(EagleConfig.for_target(TARGET), draft_vocab_size=8)
    ),
    "eagle3": Eagle3Head(Eagle3Config.for_target(TARGET, 8)),
    "eagle3, all tokens": Eagle3Head(Eagle3Config.for_target(TARGET)),
    "eagle3, a norm per tap": Eagle3Head(Eagle3Config.for_target(TARGET, tap_norm="each")),
    "eagle3, joined and output norms": Eagle3Head(
        Eagle3Config.for_target(TARGET, 8, tap_norm="joined", norm_output=True)
    ),
    "parallel, draft vocabulary": ParallelHead(
        replace(ParallelConfig.for_target(TARGET, 3), draft_vocab_size=8)
    ),
    "parallel, tokens": ParallelHead(ParallelConfig.for_target(TARGET, 3, reads_features=False)),
}
Tensors = dict[str, Any]


def with_layers(name: str, **changes: Any) -> Any:
    """The head with other settings of its layers."""
    config = HEADS[name].config
    return type(HEADS[name])(replace(config, layers=replace(config.layers, **changes)))


def format_of(name: str) -> HeadFormat:
    (found,) = (each for each in FORMATS if each.kind == name.split(",")[0])
    return found


def drawn(module: Any, dtype: str = "float32") -> dict[str, Any]:
    """Wide params, biases and norms included, so that nothing is without effect."""
    numbers = np.random.default_rng(0)

    def draw(leaf):
        if leaf.dtype != jnp.float32:  # draft tokens
            return jnp.arange(3, 3 + leaf.size, dtype=leaf.dtype)
        return jnp.asarray((leaf.ndim == 1) + 0.2 * numbers.normal(size=leaf.shape), dtype)

    return jax.tree.map(draw, jax.eval_shape(module.initialise, jax.random.key(0)))


TARGET_PARAMS = drawn(Transformer(TARGET))
TIED = {  # a target without a separate LM head
    "target": replace(TARGET, tie_word_embeddings=True),
    "target_params": {name: each for name, each in TARGET_PARAMS.items() if name != "lm_head"},
}


@cache
def params_of(name: str) -> dict[str, Any]:
    return drawn(HEADS[name])


def save(folder: Path, name: str, layout: str | None = None, **given: Any) -> Path:
    given = {"head": HEADS[name], "dtype": "float32", "target": TARGET} | given
    given = {"params": params_of(name), "target_params": TARGET_PARAMS} | given
    save_head(folder, format_of(name), layout=layout, **given)
    return folder


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str) -> Path:
    """A folder as others make it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch = pytest.importorskip("torch")
        torch.save({name: torch.from_numpy(t.copy()) for name, t in tensors.items()}, folder / file)
    return folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Sets tensors of the file; `...` removes one."""
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path) | changes
    save_file({name: each for name, each in tensors.items() if each is not ...}, path)


def stored(folder: Path) -> Tensors:
    (path,) = folder.glob("*.safetensors")
    return load_file(path)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def load(folder: Path, kind: str, target: TransformerConfig = TARGET) -> tuple[Any, Any]:
    return load_head(folder, format_of(kind), target, "float32", others=FORMATS)


def assert_loads(folder: Path, name: str, target: TransformerConfig = TARGET) -> None:
    """That the folder holds this head."""
    head, params = load(folder, name, target)
    assert head.config == HEADS[name].config
    assert_same(params, params_of(name))


def assert_same(actual: Any, expected: Any) -> None:
    actual, expected = flatten_dict(actual, sep="."), flatten_dict(expected, sep=".")
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        assert actual[path].dtype == leaf.dtype
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def failure(folder: Path, kind: str, target: TransformerConfig = TARGET) -> str:
    """The one-line message of a load that must fail."""
    message = checkpoints.failure(lambda folder: load(folder, kind, target), folder)
    assert message.startswith(str(folder))
    return message


# ---- Literal readings, in float64 ---------------------------------------------------------------


def literal_layer(config: TransformerConfig, params, x, visible) -> np.ndarray:
    """One decoder layer over the rows `x [T, D]` of one text, of which row t sees `visible[t]`."""
    own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    width, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    frequencies = config.rope.rope_theta ** (-np.arange(0, width, 2) / width)
    angles = np.tile(np.arange(len(x))[:, None] * frequencies, 2)

    def rotated(x):
        halves = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return x * np.cos(angles)[:, None] + halves * np.sin(angles)[:, None]

    inner = literal_norm(config, own["input_layernorm"], x) if "input_layernorm" in own else x
    query, key, value = (
        (inner @ own["self_attn"][f"{kind}_proj"]["weight"].T).reshape(len(x), -1, width)
        for kind in "qkv"
    )
    query, key = rotated(query), np.repeat(rotated(key), group, 1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(width)
    scores = np.where(visible, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hqk,khd->qhd", shares, np.repeat(value, group, 1))
    x = x + mixed.reshape(len(x), -1) @ own["self_attn"]["o_proj"]["weight"].T
    inner = literal_norm(config, own["post_attention_layernorm"], x)
    gate, up = (inner @ own["mlp"][f"{kind}_proj"]["weight"].T for kind in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ own["mlp"]["down_proj"]["weight"].T


def literal_norm(config: TransformerConfig, params, x: np.ndarray) -> np.ndarray:
    scale = np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    return np.asarray(params["weight"], np.float64) * x / scale


# ---- As published ------------------------------------------------------------------------------


def published(name: str) -> Tensors:
    """The tensors of a head by the authors' names; ParallelSpec's are EAGLE's and the masks."""
    own, named = params_of(name), {}
    if name.startswith("medusa"):
        for head in range(4):
            for layer in range(2):  # copies
                named[f"{head}.{layer}.linear"] = own[f"blocks_{head}"]
            if f"lm_heads_{head}" in own:
                named[f"{head}.2"] = own[f"lm_heads_{head}"]
    elif name.startswith("hydra"):
        first, *later = (1, 3, 5) if "layers_0" in own else (0, 1, 2)  # Hydra++ has dropout between
        lm_head = "hydra_lm_head.{}.1" if "layers_0" in own else "hydra_lm_head.{}"
        for head in range(4):
            named[f"hydra_mlp.{head}.{first}"] = own[f"first_blocks_{head}"]
            for slot in later:  # copies
                named[f"hydra_mlp.{head}.{slot}.linear"] = own[f"later_blocks_{head}"]
            if f"lm_heads_{head}" in own:
                named[lm_head.format(head)] = own[f"lm_heads_{head}"]
        if "layers_0" in own:
            named["prefix_embeding_layer.layers.0"] = own["layers_0"]
            named["prefix_embeding_layer.norm"] = own["norm"]
    else:
        named = {path.replace("layers_", "layers."): each for path, each in own.items()}
    flat = flatten_dict(named, sep=".")
    return {path: np.asarray(leaf) for path, leaf in flat.items()}


def vllm_names(tensors: Tensors) -> Tensors:
    """The tensors of Medusa heads by vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        renamed[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return renamed
