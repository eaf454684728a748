"""Reads GGUF files: config, weights and tokenizer.

Every size is checked against that of the file, which is memory-mapped. The package `gguf`
dequantises, and transformers builds the tokenizer; both are imported only when a file is read.
"""

import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.core.errors import SpecjaxError
from specjax.core.files import readable
from specjax.models.config import TransformerConfig
from specjax.models.io.gguf_architectures import AGAIN, OTHER, architecture_of, read_config
from specjax.models.io.huggingface import by_param, dtype_for, expected_weights, read_params
from specjax.models.io.weights import FLOATS, Index, StoredTensor, without_advice
from specjax.models.shapes import mismatches

SCALARS: dict[int, str] = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9  # types of values, as the keys above
MAX_AXES = 4
CHUNK = 2**17  # bytes dequantised at once: what they become stays in a CPU's cache
MAX_HEADER, MAX_ITEMS, MAX_TENSORS = 2**26, 2**22, 2**17  # bytes; of one array; in a file
NO_TOKENIZER = "no_vocab"  # the model of a tokenizer that a file leaves out

# Pre-tokenizers by their names in llama.cpp. transformers' reader splits no digits for DIGITS, and
# applies merges within whole words for WHOLE_WORDS, where llama.cpp does not; by default llama.cpp
# puts a BOS token in front of those.
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken")
OTHER_SPLITS = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "dbrx", "smaug-bpe", "qwen2")
OTHER_SPLITS += ("deepseek-r1-qwen", "gpt-4o")


class PackedTensor(NamedTuple):
    """A tensor as the file stores it."""

    shape: tuple[int, ...]
    kind: Any  # a `gguf.GGMLQuantizationType`
    rows: np.ndarray  # of bytes

    def read(
        self, dtype: Any = np.float32, num_heads: int = 0, shift: int = 0, index: Index = ()
    ) -> np.ndarray:
        """Dequantises the rows, or those within `index`, a few at a time, and adds `shift`.

        With `num_heads` it is a query or key projection that has the two rows of a rotary pair side
        by side; Hugging Face's format has them half a head apart.
        """
        from gguf import dequantize

        part = index[0] if index and len(self.shape) > 1 else slice(None)
        stored, *_, width = self.rows[part], *self.shape
        values = np.empty((len(stored), width), dtype)
        step, largest = 1 + CHUNK // stored.shape[1], float(jnp.finfo(dtype).max)
        for at in range(0, len(stored), step):
            with np.errstate(all="ignore"):
                row = stored[at : at + step].reshape(1, -1)  # gguf takes many short rows apart
                floats = dequantize(row, self.kind).reshape(-1, width) + shift
            if not np.abs(floats).max() <= largest:  # faster than on bfloat16
                if np.isfinite(floats).all():
                    raise SpecjaxError(f"a weight is too large for {values.dtype}; use bfloat16")
                raise ValueError("a weight is NaN or infinite")
            values[at : at + step] = floats
        if len(self.shape) == 1:
            values = values[0][index]
        if num_heads:
            pairs = np.arange(len(values)).reshape(num_heads, -1, 2)
            values = values[pairs.swapaxes(1, 2).ravel()]
        return values


def is_gguf(path: Path) -> bool:
    """Whether `path` names a GGUF file; it need not exist."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def load_gguf(
    path: Path,
    dtype: Any,
    progress: bool = False,
    quantize: str | None = None,
    packed: bool = False,
) -> tuple[TransformerConfig, dict[str, Any], Any]:
    """Reads a model's config, params and `transformers` tokenizer (None if it has none).

    Without `dtype` it is that of `default_dtype`.
    """
    with _reading(path) as (metadata, tensors), ThreadPoolExecutor(1) as pool:
        config = read_config(metadata, tensors)
        tokenizer = pool.submit(_tokenizer, metadata)  # takes as long as the weights
        title, dtype = f"Loading {path.name}", dtype or dtype_for(config, packed)
        weights = _weights(config, metadata, tensors, dtype)
        params = read_params(weights, dtype, title, progress, quantize, packed=packed)
        return config, params, tokenizer.result()


def load_gguf_tokenizer(path: Path) -> Any:
    """Reads the tokenizer alone; see `load_gguf`."""
    with _reading(path) as (metadata, _):
        return _tokenizer(metadata)


Metadata = Mapping[str, Any]
Tensors = Mapping[str, PackedTensor]


@contextmanager
def _reading(path: Path) -> Iterator[tuple[Metadata, Tensors]]:
    """Yields what the header describes; errors in the block become ones that name the file."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise SpecjaxError(
            f"{path} needs the package gguf to be read; run `pip install 'specjax[gguf]'`"
        ) from None
    with readable(path), path.open("rb") as file:
        has_magic = file.read(4) == b"GGUF"
        data = mmap(file.fileno(), 0, access=ACCESS_READ) if has_magic else None
    try:
        if data is None:
            raise SpecjaxError(f"this is not a GGUF file; give one, or {OTHER}")
        yield _header(_Cursor(data))
    except SpecjaxError as error:
        raise SpecjaxError(f"{path}: {' '.join(str(error).split())}") from None
    except (ValueError, LookupError, TypeError, ArithmeticError, struct.error) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise SpecjaxError(f"{path} is damaged or cut short ({reason}); {AGAIN}") from error


class _Cursor:
    """Reads one value after the other; raises ValueError at the end of the file or header."""

    def __init__(self, data: mmap):
        self.data, self.at = data, 0
        self.end = min(len(data), MAX_HEADER)

    def numbers(self, form: str) -> tuple:
        num_bytes = struct.calcsize(f"<{form}")
        if num_bytes > self.end - self.at:
            raise ValueError(f"{num_bytes} bytes are expected after byte {self.at}")
        self.at += num_bytes
        return struct.unpack_from(f"<{form}", self.data, self.at - num_bytes)

    def string(self) -> str:
        (length,) = self.numbers("Q")
        return self.numbers(f"{length}s")[0].decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(SCALARS[kind])[0]
        kind, count = self.numbers("IQ")
        if count > MAX_ITEMS:
            raise ValueError(f"an array of {count} values")
        if kind == STRING:
            return [self.string() for _ in range(count)]
        return list(self.numbers(f"{count}{SCALARS[kind]}"))


def _header(cursor: _Cursor) -> tuple[Metadata, Tensors]:
    _, version, num_tensors, num_values = cursor.numbers("4sIQQ")
    if version not in (2, 3):
        raise SpecjaxError(f"GGUF version {version} is not supported; {OTHER}")
    if num_tensors > MAX_TENSORS:
        raise ValueError(f"{num_tensors} tensors")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        name = cursor.string()
        if name in metadata:
            raise ValueError(f"{name!r} is given twice")
        metadata[name] = cursor.value(*cursor.numbers("I"))
    architecture_of(metadata)
    if metadata.get("split.count", 1) > 1:
        raise SpecjaxError("this is one part of a model; join all: `llama-gguf-split --merge`")
    entries = {}
    for _ in range(num_tensors):
        name, (num_axes,) = cursor.string(), cursor.numbers("I")
        if name in entries or num_axes > MAX_AXES:
            raise ValueError(f"{name!r} is given twice or has {num_axes} axes")
        entries[name] = cursor.numbers(f"{num_axes}QIQ")
    alignment = metadata.get("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"an alignment of {alignment} bytes")
    start = at = cursor.at + -cursor.at % alignment
    tensors: dict[str, PackedTensor] = {}
    for name, (*sizes, number, offset) in entries.items():
        if start + offset != at:  # they overlap, leave a gap, or one is of another size or type
            raise ValueError(f"{name} begins at byte {start + offset}, not {at}")
        tensors[name] = _packed(cursor.data, at, name, tuple(sizes), number)
        at += tensors[name].rows.size
        at += -at % alignment
    if len(cursor.data) > at:
        raise ValueError(f"{len(cursor.data) - at} bytes follow the tensors")
    return metadata, tensors


def _packed(data: mmap, at: int, name: str, sizes: tuple[int, ...], number: int) -> PackedTensor:
    """Returns the tensor that begins at byte `at`; `sizes` begins with the length of a row."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except (ValueError, NotImplementedError):
        raise SpecjaxError(
            f"{name} is quantised in an unknown way (type {number}); use a file in F16, Q8_0 or "
            "Q4_K_M, or upgrade the package gguf"
        ) from None
    row_bytes = sizes[0] // per_block * block_bytes
    if not prod(sizes) or sizes[0] % per_block:
        raise ValueError(f"{name} has the shape {sizes[::-1]}")
    num_bytes = prod(sizes[1:]) * row_bytes
    if (excess := at + num_bytes - len(data)) > 0:
        raise ValueError(f"{name} ends {excess} bytes after the file")
    rows = np.frombuffer(data, np.uint8, num_bytes, at).reshape(-1, row_bytes)
    return PackedTensor(sizes[::-1], kind, rows)


def _weights(
    config: TransformerConfig, metadata: Metadata, tensors: Tensors, dtype: Any
) -> dict[str, StoredTensor]:
    """Returns the tensors, to be read as `dtype`, by the paths of their params."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture, kind = architecture_of(metadata), metadata["general.architecture"]
    kinds = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    table = get_tensor_name_map(kinds[kind], config.num_hidden_layers)
    expected = expected_weights(config)
    names = {table.get_name(name, (".weight", ".bias")): name for name in expected}
    used = {name: tensor for name, tensor in tensors.items() if not name.startswith("rope_")}
    shapes = {names.get(name, name): tensor.shape for name, tensor in used.items()}
    if wrong := mismatches(shapes, expected):
        raise SpecjaxError(f"the weights do not fit the metadata; {wrong}; {AGAIN}, or {OTHER}")
    code = next(code for code, kind in FLOATS.items() if kind == jnp.dtype(dtype))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    stored = {}
    for name, tensor in used.items():
        num_heads = heads.get(name.split(".")[-2], 0) if architecture.has_pairs else 0
        is_shifted = architecture.adds_one_to_norms and name.endswith("norm.weight")
        read = partial(tensor.read, jnp.dtype(dtype), num_heads, -1 if is_shifted else 0)
        stored[names[name]] = StoredTensor(name, tensor.shape, code, read)
    return by_param(config, stored)


def _tokenizer(metadata: Metadata) -> Any:
    """Builds a `transformers` tokenizer; returns None if the file describes none."""
    kind, split = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind in (None, NO_TOKENIZER):
        return None
    is_known = split in (*DIGITS, *WHOLE_WORDS, *OTHER_SPLITS)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    architecture = metadata["general.architecture"]
    is_gemma = architecture.startswith("gemma")  # whose texts get no space in front
    if not (is_known if kind == "gpt2" else kind == "llama" and has_prefix != is_gemma):
        raise SpecjaxError(
            f"tokenizer {kind!r} with pre-tokenizer {split!r} and add_space_prefix {has_prefix} is "
            f"not supported; {OTHER}"
        )
    start = "tokenizer."
    fields = {name[len(start) :]: metadata[name] for name in metadata if name.startswith(start)}
    try:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        with without_advice():
            from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf import gguf_tokenizer_mapping as converter

        names = converter.GGUF_TOKENIZER_MAPPING["tokenizer"]
        values = {names[name]: value for name, value in fields.items() if name in names}
        backend, _ = converter.convert_gguf_tokenizer(architecture, values)
        if split in DIGITS:
            words = ByteLevel(add_prefix_space=False)
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), words])
        if split in WHOLE_WORDS:
            backend.model.ignore_merges = True
        roles = (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad"))
        ids = {f"{ours}_token": fields.get(f"ggml.{theirs}_token_id") for theirs, ours in roles}
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            chat_template=fields.get("chat_template"),
            add_bos_token=fields.get("ggml.add_bos_token", kind == "llama" or split in WHOLE_WORDS),
            add_eos_token=fields.get("ggml.add_eos_token", False),
            **{name: None if id is None else fields["ggml.tokens"][id] for name, id in ids.items()},
        )
    except Exception as error:  # `tokenizers` raises plain Exception for a damaged vocabulary
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(
            f"its tokenizer cannot be read ({reason}); upgrade transformers, or {OTHER}"
        ) from error
