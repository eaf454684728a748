"""GGUF files of each architecture give the models and tokens of transformers and llama.cpp."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.loading.targets import load_tokenizer
from specjax.models.config import TransformerConfig
from specjax.models.io.gguf import PackedTensor
from specjax.models.target import causal_rows
from tests.models import checkpoints
from tests.models.test_gguf import byte_level_but, sentencepiece, write

gguf = pytest.importorskip("gguf")

GROUPS = {"num_key_value_heads": 2}
GEMMA = GROUPS | {"sliding_window": 6, "query_pre_attn_scalar": 8, "head_dim": 8}
MODELS = {  # of each architecture: our family, and settings that a file can hold
    "llama": ("llama", GROUPS | {"attention_bias": True}),
    "qwen2": ("qwen2", GROUPS),
    "qwen3": ("qwen3", GROUPS | {"head_dim": 12}),
    "gemma2": ("gemma2", GEMMA | {"final_logit_softcapping": 3.0}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 6}),
    "phi3": ("phi3", GROUPS | {"pad_token_id": 0}),
    "phi3-long": (
        "phi3",
        GROUPS
        | {
            "pad_token_id": 0,
            "rope_scaling": {"type": "longrope"} | checkpoints.LONG,
            "original_max_position_embeddings": 300,  # more slots than llama.cpp makes
            "max_position_embeddings": 600,
        },
    ),
    "smollm3": ("smollm3", GROUPS | {"num_hidden_layers": 4, "pad_token_id": 0}),
    "starcoder": ("gpt_bigcode", checkpoints.GPT_BIGCODE),
    "starcoder2": ("starcoder2", GROUPS),
}
KEYS = {  # of the metadata, with the names that transformers' configs have for them
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "block_count": ("num_hidden_layers",),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "head_count": ("num_attention_heads",),
    "head_count_kv": ("num_key_value_heads",),
    "key_length": ("head_dim",),
    "value_length": ("head_dim",),
    "layer_norm_rms_eps": ("rms_norm_eps",),
    "layer_norm_eps": ("norm_epsilon", "layer_norm_epsilon"),
    "vocab_size": ("vocab_size",),
    "sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope_scaling_orig_ctx_len": ("original_max_position_embeddings",),
}


def write_model(path: Path, name: str) -> tuple[Path, Any]:
    """Writes a random model of transformers in float32, and returns it too."""
    kind, settings = MODELS[name]
    architecture, model = name.split("-")[0], checkpoints.build(kind, **settings)
    config, metadata, rope = model.config, {}, {}
    for key, names in KEYS.items():
        value = next((v for name in names if (v := getattr(config, name, None)) is not None), None)
        if value is not None:
            metadata[key] = value
    if architecture == "starcoder":
        metadata["head_count_kv"] = 1
    else:
        rope = config.rope_parameters.get("full_attention", config.rope_parameters)
        metadata["rope_freq_base"] = rope["rope_theta"]
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name in weights if architecture.startswith("gemma") else ():
        weights[name] = weights[name] + name.endswith("norm.weight")
    if "long_factor" in rope:  # as LongRoPE derives it from the lengths
        length = config.original_max_position_embeddings
        stretch = config.max_position_embeddings / length
        factor = (1 + np.log(stretch) / np.log(length)) ** 0.5
        metadata["rope_scaling_attn_factors"] = float(factor)
        for name in ("long", "short"):
            weights[f"rope_factors_{name}.weight"] = np.asarray(rope[f"{name}_factor"], np.float32)
    no_vocab = lambda writer: writer.add_tokenizer_model("no_vocab")  # noqa: E731
    return write(path, "F32", no_vocab, weights, architecture, metadata), model


def in_float32(config: TransformerConfig) -> dict[str, Any]:
    """The settings of a config but for special tokens, with numbers as GGUF files store them."""
    settings = asdict(replace(config, bos_token_id=None, eos_token_id=()))
    return jax.tree.map(lambda each: np.float32(each) if type(each) is float else each, settings)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_each_architecture_is_the_checkpoint_that_transformers_saves(tmp_path, name):
    """Which computes what transformers does, by test_transformer.py."""
    pytest.importorskip("torch")
    path, model = write_model(tmp_path / "m.gguf", name)
    folder = checkpoints.save(tmp_path / "saved", model)
    found, saved = (specjax.load(each, dtype="float32", packed=False) for each in (path, folder))
    assert in_float32(found.config) == in_float32(saved.config)
    jax.tree.map(partial(np.testing.assert_allclose, atol=2e-7), found.params, saved.params)


def logits_of(target: Any, tokens: np.ndarray) -> np.ndarray:
    rows = causal_rows(jnp.asarray(tokens, jnp.int32), jnp.zeros(1, jnp.int32))
    cache = target.model.new_cache(target.params, 1, tokens.shape[1])
    return np.asarray(jax.jit(target.model.run)(target.params, rows, cache)[0].logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_are_those_of_llama_cpp(tmp_path, name):
    pytest.importorskip("torch")
    llama_cpp = pytest.importorskip("llama_cpp")
    path, _ = write_model(tmp_path / "m.gguf", name)
    peer = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, type_k=0, type_v=0, verbose=False)
    prompt = np.random.default_rng(0).integers(3, 60, 16).tolist()
    texts = peer.generate(prompt, temp=0.0, repeat_penalty=1.0)
    theirs = [token for token, _ in zip(texts, range(8), strict=False)]
    target, ours = specjax.load(path, dtype="float32", packed=False), list(prompt)
    for _ in range(8):
        ours.append(int(logits_of(target, np.asarray([ours]))[0, -1].argmax()))
    assert ours[len(prompt) :] == theirs


@pytest.mark.parametrize("kind", sorted(gguf.GGML_QUANT_SIZES))
def test_every_type_that_the_package_decodes_is_read_in_parts(kind):
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(0).integers(0, 100, (4, 2 * block_bytes)).astype(np.uint8)
    try:
        whole = gguf.dequantize(rows, kind)
    except NotImplementedError:
        pytest.skip("the package has no decoder")
    tensor = PackedTensor((4, 2 * per_block), kind, rows)
    np.testing.assert_array_equal(tensor.read(), whole)
    np.testing.assert_array_equal(tensor.read(shift=-1, index=(slice(1, 3),)), whole[1:3] - 1)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", *"abcd12", "ab", "▁a", "▁ab"]


def gemma(writer: Any) -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "  ", "   ", "    ", *BYTES, *PIECES]
    types = [3, 3, 3, 2, 4, 4, 4, *[6] * 256, *[1] * (len(PIECES) + 2)]
    sentencepiece(writer, [*tokens, "cd", "▁▁a"], types, ("pad", "eos", "bos", "unk"))
    writer.add_sliding_window(8)
    writer.add_add_space_prefix(False)


def phi3(writer: Any) -> None:
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "▁▁", "▁b", "<|user|>"]
    sentencepiece(writer, tokens, [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) + 2), 3])


TEXTS = ["", "a b  cab\n", "ab 12 + 3", "it's É\n\n  7", "a   b    c", "  ab", "abcd 1234 ef!"]
TEXTS += ["cab"]  # a token that only Llama 3 takes whole


@pytest.mark.parametrize(
    ("architecture", "tokenizer"),
    [("gemma3", gemma), ("phi3", phi3)]
    + [
        ("llama", byte_level_but("pre", split))
        for split in ("qwen2", "smollm", "gpt-2", "gpt-4o", "dbrx", "llama-bpe")
    ],
)
def test_tokens_are_those_of_llama_cpp(tmp_path, architecture, tokenizer):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = write(tmp_path / "m.gguf", tokenizer=tokenizer, given={}, architecture=architecture)
    ours, peer = load_tokenizer(path), llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    for text in TEXTS:
        assert ours(text)["input_ids"] == peer.tokenize(text.encode(), add_bos=True, special=True)
