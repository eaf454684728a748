"""GGUF files, written by the package `gguf`: supported contents are read, all else is rejected."""

import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import specjax
from specjax.core.chat import chat_ids
from specjax.core.errors import SpecjaxError
from specjax.loading.targets import load_tokenizer
from specjax.models.config import Rope
from specjax.models.families import config_from
from specjax.models.io.huggingface import expected_weights, huggingface_name
from tests.models import checkpoints

gguf = pytest.importorskip("gguf")

SIZES = checkpoints.TINY | {
    "model_type": "llama",
    "intermediate_size": 64,  # a multiple of the blocks of quantisation
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 264,
}
METADATA = {
    "context_length": SIZES["max_position_embeddings"],
    "embedding_length": SIZES["hidden_size"],
    "block_count": SIZES["num_hidden_layers"],
    "feed_forward_length": SIZES["intermediate_size"],
    "head_count": SIZES["num_attention_heads"],
    "head_count_kv": SIZES["num_key_value_heads"],
    "layer_norm_rms_eps": 1e-5,
    "rope_dimension_count": 8,
    "vocab_size": SIZES["vocab_size"],
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
PIECES = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "1", "2", "<0x0A>"]
TEXTS = ["", "a b  cab\n", "x =  12 + 3", "it's É\n\n  7", "<|im_start|>ab<|im_end|> a"]


def weights(**changes: Any) -> dict[str, np.ndarray]:
    """Random weights by their names in Hugging Face format."""
    draw = np.random.default_rng(0)
    shapes = expected_weights(config_from(SIZES | changes))
    return {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def side_by_side(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleaves the halves of each head, as llama.cpp's converter does."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def byte_level(writer: Any) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merges = ["Ġ Ġ", "1 2", "a b"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merged = [each.replace(" ", "") for each in merges]
    tokens = [*special, *bytes_to_unicode().values(), *merged, "cab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def byte_level_but(key: str, value: Any) -> Any:
    """The tokenizer `byte_level` with another value of one key."""

    def tokenizer(writer: Any) -> None:
        byte_level(writer)
        writer.kv_data[0][f"tokenizer.ggml.{key}"].value = value

    return tokenizer


def sentencepiece(
    writer: Any,
    tokens: Sequence[str] = ("<unk>", "<s>", "</s>", *PIECES),
    types: Sequence[int] = (2, 3, 3, *[1] * (len(PIECES) - 1), 6),
    special: Sequence[str] = ("unk", "bos", "eos"),
) -> None:
    """A tokenizer whose first tokens are the `special` ones."""
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_token_types(types)
    for token, name in enumerate(special):
        getattr(writer, f"add_{name}_token_id")(token)


def write(
    path: Path,
    kind: str = "F32",
    tokenizer: Any = None,
    given: dict[str, np.ndarray] | None = None,
    architecture: str = "llama",
    metadata: dict[str, Any] = METADATA,
) -> Path:
    """Writes a file as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    (tokenizer or (lambda writer: writer.add_eos_token_id(2)))(writer)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], metadata["block_count"])
    heads = {"q_proj": metadata["head_count"], "k_proj": metadata.get("head_count_kv")}
    for name, weight in (weights() if given is None else given).items():
        if architecture in ("llama", "smollm3") and (count := heads.get(name.split(".")[-2])):
            weight = side_by_side(weight, count)
        stored = gguf.GGMLQuantizationType[kind if weight.ndim == 2 else "F32"]
        theirs = names.get_name(name, (".weight", ".bias")) or name
        writer.add_tensor(theirs, gguf.quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def failure(path: Path) -> str:
    """The one-line message of a load that must fail."""
    return checkpoints.failure(specjax.load, path).replace(str(path), "FILE")


def by_name(params: Any) -> dict[str, np.ndarray]:
    return {huggingface_name(path): leaf for path, leaf in flatten_dict(params, sep=".").items()}


# ---- Weights -----------------------------------------------------------------------------------


def test_weights_and_config_are_read(tmp_path):
    changes = {"tie_word_embeddings": False, "attention_bias": True}
    given = weights(**changes)
    target = specjax.load(path := write(tmp_path / "m.gguf", given=given), packed=False)
    jax.tree.map(np.testing.assert_array_equal, by_name(target.params), given)
    params = specjax.load(path, dtype="bfloat16", packed=False).params
    rounded = {name: each.astype(jnp.bfloat16) for name, each in given.items()}
    jax.tree.map(np.testing.assert_array_equal, by_name(params), rounded)
    rms_norm_eps = float(np.float32(1e-5))
    wanted = config_from(SIZES | changes | {"bos_token_id": None, "rms_norm_eps": rms_norm_eps})
    assert (target.config, target.eos, target.tokenizer) == (wanted, (2,), None)


# ---- Tokenizer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_tokens_are_those_of_transformers(tmp_path, kind):
    pytest.importorskip("torch")  # which its own reading of GGUF files needs
    from transformers import AutoTokenizer

    ours = load_tokenizer(write(tmp_path / "m.gguf", tokenizer=kind))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    splits_digits = kind is byte_level  # as llama.cpp does and transformers does not
    for text in TEXTS:
        ids = ours(text)["input_ids"]
        if not (splits_digits and ("12" in text or "  7" in text)):
            assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.get_vocab() == theirs.get_vocab()


def test_digits_and_special_tokens_are_tokens_of_their_own(tmp_path):
    target = specjax.load(write(tmp_path / "m.gguf", tokenizer=byte_level))
    tokenizer, eos = target.tokenizer, target.eos
    assert tokenizer.tokenize("ab  12") == ["ab", "ĠĠ", "1", "2"]
    ids = chat_ids(tokenizer, "ab")
    assert (ids[0], ids[-1], eos) == (1, 2, (2, 0))
    assert tokenizer.decode(ids) == "<|im_start|>ab<|im_end|>"
    undeclared = byte_level_but("eos_token_id", 0)  # the end of an answer is known by its name
    assert specjax.load(write(tmp_path / "n.gguf", tokenizer=undeclared)).eos == (0, 2)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("pre", "other", "tokenizer 'gpt2' with pre-tokenizer 'other' and add_space_prefix True"),
        ("model", "bert", "tokenizer 'bert' with pre-tokenizer 'smollm'"),
        ("tokens", ["a", "b"], "its tokenizer cannot be read"),
    ],
)
def test_other_tokenizers_are_refused(tmp_path, key, value, message):
    path = write(tmp_path / "m.gguf", tokenizer=byte_level_but(key, value))
    assert f"FILE: {message}" in failure(path)


# ---- Config ------------------------------------------------------------------------------------


def llama3_divisors() -> np.ndarray:
    plain = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    smooth = np.clip((8192 * plain / (2 * np.pi) - 1) / (4 - 1), 0, 1)
    return (1 / ((1 - smooth) / 32 + smooth)).astype(np.float32)


LINEAR = {"rope_scaling_type": gguf.RopeScalingType.LINEAR}


@pytest.mark.parametrize(
    ("stated", "tensors", "change"),
    [
        (
            {"rope_freq_base": 500000.0},
            {"rope_freqs.weight": llama3_divisors()},
            {"rope": Rope("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)},
        ),
        (LINEAR | {"rope_scaling_factor": 2.0}, {}, {"rope": Rope("linear", 1e4, 2.0)}),
        # llama.cpp takes a factor without type for linear, and a type without factor for none
        ({"rope_scaling_factor": 2.0}, {}, {"rope": Rope("linear", 1e4, 2.0)}),
        (LINEAR, {}, {"rope": Rope()}),
        ({"causal_attention": True}, {}, {"model_type": "llama"}),
        ({"sliding_window": 16}, {}, {"model_type": "mistral", "sliding_window": 16}),
        ({"eot_token_id": 7}, {}, {"eos_token_id": (2, 7)}),
    ],
)
def test_stated_variants_are_read(tmp_path, stated, tensors, change):
    path = write(tmp_path / "m.gguf", given=weights() | tensors, metadata=METADATA | stated)
    config = specjax.load(path).config
    assert {name: getattr(config, name) for name in change} == change


RANKS, NORM = np.arange(1, 5, dtype=np.float32), np.ones(8, np.float32)


@pytest.mark.parametrize(
    ("stated", "tensors", "message"),
    [
        ({"rope_scaling_type": gguf.RopeScalingType.YARN}, {}, "RoPE type 'yarn'"),
        ({"causal_attention": False}, {}, "llama.attention.causal = False is not"),
        ({"value_length": 4}, {}, "llama.attention.value_length = 4 is not supported"),
        ({}, {"rope_freqs.weight": RANKS}, "rope_freqs.weight is not Llama 3.1's scaling"),
        (
            {},
            {"blk.0.attn_q_norm.weight": NORM},
            "the weights do not fit the metadata; unexpected: blk.0.attn_q_norm.weight",
        ),
    ],
)
def test_other_variants_are_refused(tmp_path, stated, tensors, message):
    path = write(tmp_path / "m.gguf", given=weights() | tensors, metadata=METADATA | stated)
    assert failure(path).startswith(f"FILE: {message}")


# ---- Files -------------------------------------------------------------------------------------


def test_a_file_of_another_kind_or_architecture_or_cut_short_is_refused(tmp_path):
    path = write(tmp_path / "m.gguf", architecture="bert")
    assert "architecture 'bert' are not supported" in failure(path)
    write(path, tokenizer=lambda writer: writer.add_uint16("split.count", 2))
    assert failure(path).startswith("FILE: this is one part of a model")
    path.write_bytes(b"GGU")
    assert failure(path).startswith("FILE: this is not a GGUF file; give one, or ")
    path = write(tmp_path / "m.gguf", "Q8_0", byte_level)
    content = path.read_bytes()
    for length in [*range(4, len(content) - 100, 2501), len(content) - 1]:
        path.write_bytes(content[:length])
        assert "damaged or cut short" in failure(path)


def patched(path: Path, after: bytes, form: str, value: int, skip: int = 0) -> Path:
    """Overwrites the number that follows `after`, and `skip` bytes."""
    content = bytearray(path.read_bytes())
    struct.pack_into(f"<{form}", content, content.index(after) + len(after) + skip, value)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("after", "form", "skip", "message"),
    [
        (b"GGUF", "I", 0, "GGUF version"),
        (b"GGUF", "Q", 4, "damaged or cut short"),  # tensors
        (b"general.architecture", "Q", 4, "damaged or cut short"),  # bytes of a string
        (b"llama.block_count", "I", 4, "`num_hidden_layers` must be at least"),
        (b"token_embd.weight", "I", 0, "axes"),
        (b"token_embd.weight", "I", 20, "token_embd.weight is quantised in an unknown way"),
    ],
)
def test_absurd_numbers_are_refused(tmp_path, after, form, skip, message):
    path = write(tmp_path / "m.gguf", tokenizer=byte_level)
    most = 2 ** (8 * struct.calcsize(form)) - 1
    assert message in failure(patched(path, after, form, most, skip))


def test_a_table_that_contradicts_itself_is_rejected(tmp_path):
    """Tensors that overlap, are misaligned or of a smaller type, and bytes that none has."""
    path = write(tmp_path / "m.gguf")
    whole, norm = path.read_bytes(), b"output_norm.weight" + struct.pack("<IQ", 1, 32)
    at = whole.index(norm) + len(norm)  # of the type and the offset
    number, offset = struct.unpack_from("<IQ", whole, at)
    for changed in ((number, 0), (number, offset + 4), (number, offset - 32), (1, offset)):
        content = bytearray(whole)
        struct.pack_into("<IQ", content, at, *changed)
        path.write_bytes(content)
        assert "damaged or cut short" in failure(path), changed
    path.write_bytes(whole + bytes(64))
    assert "64 bytes follow the tensors" in failure(path)


def test_numbers_that_contradict_the_tensors_are_refused(tmp_path):
    """The layers of a larger model, and alignments that are not powers of two."""
    path = write(tmp_path / "m.gguf", tokenizer=byte_level)
    larger = patched(path, b"llama.block_count", "I", 9999, skip=4)
    assert "a larger model than the tensors" in failure(larger)
    path = write(tmp_path / "m.gguf", metadata=METADATA | {"custom_alignment": 64})
    assert specjax.load(path).config.vocab_size == SIZES["vocab_size"]
    for alignment in (0, 3):
        wrong = patched(path, b"general.alignment", "I", alignment, skip=4)
        assert f"an alignment of {alignment} bytes" in failure(wrong)


def test_weights_that_are_not_finite_are_rejected(tmp_path):
    given = weights()
    given["model.norm.weight"][3] = np.nan
    path = write(tmp_path / "m.gguf", given=given)
    assert "a weight is NaN or infinite" in failure(path)
    large = weights() | {"model.norm.weight": np.full(32, 1e30, np.float32)}
    with pytest.raises(SpecjaxError, match="gguf: a weight is too large for float16"):
        specjax.load(write(tmp_path / "m.gguf", given=large), dtype="float16")


def test_a_missing_file_package_or_revision_is_named(tmp_path, monkeypatch):
    assert "FILE cannot be read (No such file" in failure(tmp_path / "m.gguf")
    path = write(tmp_path / "m.gguf")
    with pytest.raises(SpecjaxError, match="only hub ids have revisions"):
        specjax.load(path, revision="main")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert failure(path).endswith("run `pip install 'specjax[gguf]'`")
