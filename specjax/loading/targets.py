"""Loads targets by name: "pocket", a folder, a GGUF file, or a hub id.

transformers is imported only to read a tokenizer, torch only to read old `.bin` weights.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError, check_whole, errors_at, warn
from specjax.core.files import check_size, read_json, readable
from specjax.core.settings import SettingError
from specjax.loading.hub import POCKET, SMALL_FILES, target_folder
from specjax.models import native
from specjax.models.config import TransformerConfig, eos_tokens
from specjax.models.families import CONFIG, read_config
from specjax.models.io.gguf import is_gguf, load_gguf, load_gguf_tokenizer
from specjax.models.io.huggingface import load_transformer
from specjax.models.io.weights import without_advice
from specjax.models.precision import cache_dtype
from specjax.models.quantize import check_kind, dtype_name
from specjax.models.sharding import Placement, as_mesh, place
from specjax.models.target import Target
from specjax.models.transformer import Transformer

DTYPES = ("float32", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of these is enough
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that read a tokenizer.json
GENERIC_MODELS = ("llama", "smollm3")  # whose tokenizer_class AutoTokenizer takes as it is


@dataclass(frozen=True, eq=False)
class LoadedTarget:
    """A model that is ready to decode, with its weights and its tokenizer."""

    model: Target
    params: Mapping[str, Any] = field(repr=False)
    tokenizer: Any  # from transformers; None if the folder has none
    config: TransformerConfig
    name: str

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end generation, those of `generation_config.json` included."""
        return self.config.eos_token_id

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights, or of their scales: that of matrix products."""
        return jnp.dtype(self.model.dtype(self.params))

    @property
    def dtype_name(self) -> str:
        """The dtype of weights and compute, such as "bfloat16" or "int8 (bfloat16)"."""
        return dtype_name(self.dtype, self.params)

    @property
    def has_native_layers(self) -> bool:
        """Whether native kernels run its layers on a CPU, so that 16 bits are exact."""
        return native.has_native_layers(self.params, self.model.config.head_dim)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that the weights are split over; None: they are on one."""
        return self.model.mesh

    def place(self, params: Any) -> Any:
        """Moves params of a drafter to the devices of the target."""
        return place(params, self.mesh and Placement(self.mesh, self.config.head_dim))

    def require_tokenizer(self) -> Any:
        """Returns the tokenizer; raises SpecjaxError if there is none."""
        if self.tokenizer is None:
            raise SpecjaxError(f"{self.name} has no tokenizer; use a target that has one")
        return self.tokenizer


def load(
    name: str | Path,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    progress: bool = True,
    quantize: str | None = None,
    mesh: Mesh | str | None = None,
    fsdp: bool = False,
    padded_width: int = 0,
    packed: bool = True,
) -> LoadedTarget:
    """Loads a target and its tokenizer.

    Args:
        name: "pocket" (the small model inside specjax), a folder in Hugging Face format, a GGUF
            file, or a hub id such as "TinyLlama/TinyLlama-1.1B-Chat-v1.0". Write "./pocket" for a
            folder of that name.
        dtype: of the params, "float32", "bfloat16" or "float16"; by default the one in which the
            model decodes fastest on this machine.
        revision: branch, tag or commit of a hub id.
        progress: show progress bars on stderr, if that is a terminal.
        quantize: "int8" (a scale per output channel) or "int4" (one for each group of up to 32
            inputs) for quantised weights; products are still computed in `dtype`, in which norms
            and biases stay.
        mesh: the devices to split the weights over, such as "data=2,model=4": each part is read
            straight to its device, those of a GGUF file through the first. By default all weights
            are on the first device.
        fsdp: split the weights over `data` too: less memory for training, more communication.
        padded_width: pad every verification pass to this many tokens per sequence, so that a GPU
            or TPU multiplies the same shapes whichever method drafts. 72 are enough for default
            settings; tuned ones may need more. Useful in 16 bits; a CPU does not need it. 0: no
            padding.
        packed: on a CPU without a mesh, pack the weights for native products, if specjax was built
            with them: faster, but without gradients.

    Raises:
        SpecjaxError: if there is no such target, it cannot be downloaded, its architecture is not
            supported, its files are damaged or inconsistent, the mesh has other axes or another
            size, or `padded_width` is negative.
    """
    check_whole("padded_width", padded_width, 0)
    mesh = None if mesh is None else as_mesh(mesh)
    dtype = _checked_dtype(dtype)
    check_kind(quantize)
    name = f"./{name}" if name == Path(POCKET) else str(name)
    folder = target_folder(name, revision, progress)
    packed = packed and mesh is None and native.is_available()
    if is_gguf(folder):
        config, params, tokenizer = load_gguf(folder, dtype, progress, quantize, packed)
        params = place(params, mesh and Placement(mesh, config.head_dim, fsdp))
    else:
        with readable(folder):
            config = _with_generation_eos(read_config(folder), folder)
            placement = mesh and Placement(mesh, config.head_dim, fsdp)
            params = load_transformer(folder, config, dtype, progress, quantize, placement, packed)
            tokenizer = _read_tokenizer(folder)
    config = _with_reachable_eos(config, name)
    kept_in = cache_dtype(native.has_native_layers(params, config.head_dim))
    model = Transformer(config, kept_in, mesh, padded_width)
    return LoadedTarget(model, params, tokenizer, config, name)


def load_tokenizer(name: str | Path) -> Any:
    """Loads the tokenizer of a target, without its weights."""
    folder = target_folder(str(name), with_weights=False)
    tokenizer = load_gguf_tokenizer(folder) if is_gguf(folder) else _read_tokenizer(folder)
    if tokenizer is None:
        raise SpecjaxError(f"{name} has no tokenizer; use a target that has one")
    return tokenizer


def _checked_dtype(dtype: DTypeLike | None) -> jnp.dtype | None:
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = ""
    if name not in DTYPES:
        raise SettingError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return jnp.dtype(name)


def _with_generation_eos(config: TransformerConfig, folder: Path) -> TransformerConfig:
    """Adds the EOS tokens of `generation_config.json`, where chat models list more of them."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return config
    values = read_json(path)
    with errors_at(path):
        tokens = eos_tokens(values)
    distinct = tuple(dict.fromkeys(config.eos_token_id + tokens))
    return replace(config, eos_token_id=distinct)


def _with_reachable_eos(config: TransformerConfig, name: str | Path) -> TransformerConfig:
    """Drops EOS tokens outside the vocabulary, which cannot be generated, with a warning."""
    kept = tuple(token for token in config.eos_token_id if token < config.vocab_size)
    if dropped := set(config.eos_token_id) - set(kept):
        warn(
            f"{name}: eos {min(dropped)} is outside the vocabulary of {config.vocab_size}, so it "
            "is ignored"
        )
    return replace(config, eos_token_id=kept)


def copy_tokenizer(target: LoadedTarget, folder: Path) -> None:
    """Copies a target's tokenizer and generation config, in forms that transformers 4 reads too.

    Version 5 writes the name of a class, and a list of tokens, that make version 4 fail.
    """
    source = target_folder(target.name, with_weights=False)
    if is_gguf(source) and target.tokenizer is not None:
        target.tokenizer.save_pretrained(folder)
    for pattern in SMALL_FILES[1:]:
        for path in filter(Path.is_file, source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return
    values = read_json(path)
    if values.get("tokenizer_class") == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    for pattern in SMALL_FILES:
        for path in folder.glob(pattern):
            check_size(path)
    with without_advice():
        if _is_generic(folder):  # AutoTokenizer takes seconds more: it imports torch too
            from transformers import PreTrainedTokenizerFast as Reader
        else:
            from transformers import AutoTokenizer as Reader

    try:
        return Reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises plain Exception for a damaged file
        if "trust_remote_code" in str(error):
            raise SpecjaxError(
                f"the tokenizer in {folder} requires custom code, which specjax does not run; give "
                "a folder with a tokenizer.json, and without auto_map in tokenizer_config.json"
            ) from None
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(
            f"the tokenizer in {folder} cannot be read ({reason}); "
            "install the missing package, or download it again"
        ) from error


def _is_generic(folder: Path) -> bool:
    """Whether AutoTokenizer would choose PreTrainedTokenizerFast too."""
    paths = [folder / name for name in ("tokenizer.json", "tokenizer_config.json", CONFIG)]
    if not all(path.is_file() for path in paths):
        return False
    values, config = map(read_json, paths[1:])
    is_named = values.get("tokenizer_class") in GENERIC and "auto_map" not in values
    return is_named and config.get("model_type") in GENERIC_MODELS
