"""Load a target by name: "pocket", a folder in Hugging Face format, or a hub id; find a head.

transformers is imported only to read a tokenizer, torch only to read old `.bin` weights.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from huggingface_hub import errors, snapshot_download
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, read_json, readable
from specjax.models.config import TransformerConfig, eos_tokens
from specjax.models.families import read_config
from specjax.models.io.huggingface import load_llama
from specjax.models.io.weights import import_torch
from specjax.models.transformer import Transformer

POCKET = "pocket"
DTYPES = ("float32", "bfloat16", "float16")
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
]
# No "consolidated" twins; the third are Medusa's and Hydra's heads, which targets have no use for.
SAFETENSORS = ["model*.safetensors", "model.safetensors.index.json", "*_lm_head.safetensors"]
TORCH_WEIGHTS = ["pytorch_model*.bin", "pytorch_model.bin.index.json", "*_lm_head.pt"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any of these makes one


@dataclass(frozen=True, eq=False)
class LoadedTarget:
    """A model that is ready to decode: what it is, its weights and its tokenizer."""

    model: Transformer
    params: Mapping[str, Any] = field(repr=False)
    tokenizer: Any  # from transformers; None where the folder holds none
    config: TransformerConfig
    name: str

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a text, those of `generation_config.json` included."""
        return self.config.eos_token_id

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weights, which products are computed in."""
        return jnp.dtype(self.model.dtype(self.params))

    def require_tokenizer(self) -> Any:
        """The tokenizer; raises SpecjaxError if there is none."""
        if self.tokenizer is None:
            raise SpecjaxError(f"{self.name} has no tokenizer; take a target that has one")
        return self.tokenizer


def load(
    name: str | Path,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    progress: bool = True,
) -> LoadedTarget:
    """Loads a target and its tokenizer.

    Args:
        name: "pocket" (the small model inside specjax), a folder in Hugging Face format, or a hub
            id such as "TinyLlama/TinyLlama-1.1B-Chat-v1.0". A folder that is called pocket:
            "./pocket".
        dtype: of the params, "float32", "bfloat16" or "float16"; by default float32 on CPU and
            bfloat16 elsewhere.
        revision: branch, tag or commit of a hub id.
        progress: show progress bars on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if there is no such target, it cannot be fetched, its architecture is not
            supported, or its files are damaged or do not fit together.
    """
    kind = _dtype_of(dtype)
    folder = _folder_of(str(name), revision, progress)
    with readable(folder):
        config = _with_generation_eos(read_config(folder), folder)
        params = load_llama(folder, config, kind, progress)
        return LoadedTarget(Transformer(config), params, _read_tokenizer(folder), config, str(name))


def load_tokenizer(name: str | Path) -> Any:
    """The tokenizer of a target, without its weights.

    Raises:
        SpecjaxError: if there is no such target, or it has no tokenizer.
    """
    folder = _folder_of(str(name), None, progress=True, with_weights=False)
    tokenizer = _read_tokenizer(folder)
    if tokenizer is None:
        raise SpecjaxError(f"{name} has no tokenizer; name a target that has one")
    return tokenizer


# ---- Where a name leads ------------------------------------------------------------------------


def _folder_of(name: str, revision: str | None, progress: bool, with_weights: bool = True) -> Path:
    if name == POCKET:
        _refuse_revision(name, revision)
        return pocket_folder()
    folder = _found(name, revision, progress, read_config, with_weights)
    if folder is None:
        raise SpecjaxError(
            f"{name!r} is no target: give 'pocket', an existing folder in Hugging Face format, "
            "or a hub id such as 'TinyLlama/TinyLlama-1.1B-Chat-v1.0'"
        )
    return folder


def head_folder(
    name: str | Path,
    judge: Callable[[Path], Any],
    revision: str | None = None,
    progress: bool = True,
) -> Path:
    """The local folder of a drafter head: its config and weights, downloaded if need be.

    Args:
        name: a folder, or a hub id such as "yuhuili/EAGLE-Vicuna-7B-v1.3".
        judge: reads the config in a folder and raises SpecjaxError for another kind of head, so
            that weights of no use are not downloaded. A local folder is left to the loader.
        revision: branch, tag or commit of a hub id.
        progress: show progress bars on stderr, if that is a terminal.

    Raises:
        SpecjaxError: if there is no such head, it cannot be fetched, or `judge` refuses it.
    """
    folder = _found(str(name), revision, progress, judge, is_head=True)
    if folder is None:
        raise SpecjaxError(
            f"{str(name)!r} is no head: give an existing folder with config.json and weights, "
            "or a hub id such as 'yuhuili/EAGLE-Vicuna-7B-v1.3'"
        )
    return folder


def _found(
    name: str,
    revision: str | None,
    progress: bool,
    judge: Callable[[Path], Any],
    with_weights: bool = True,
    is_head: bool = False,
) -> Path | None:
    """The folder of this name, or the local copy of the hub id; None if it is neither."""
    folder = expand_user(name)
    with readable(folder):
        is_local = name != "" and folder.is_dir()
        is_free = not folder.exists()  # a file is no model, and no hub id either
    if is_local:
        _refuse_revision(name, revision)
        return folder
    if HUB_ID.fullmatch(name) and is_free:
        return _download(name, revision, progress, judge, with_weights, is_head)
    return None


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise SpecjaxError(
            f"revision {revision!r} has no meaning for {name}; only hub ids have one"
        )


def pocket_folder() -> Path:
    """Where the small model inside specjax lies."""
    folder = Path(str(resources.files("specjax") / "pocket" / "weights" / "target"))
    if not (folder / "config.json").is_file():
        raise SpecjaxError(
            f"the pocket weights are not in {folder}; install specjax again, "
            "or give a folder or a hub id"
        )
    return folder


def _download(
    name: str,
    revision: str | None,
    progress: bool,
    judge: Callable[[Path], Any],
    with_weights: bool,
    is_head: bool,
) -> Path:
    """The local copy of a hub repository: its config is judged before its weights are fetched."""
    with _download_bars(progress), _hub_errors(name, revision):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL_FILES))
        judge(folder)
        if not with_weights:
            return folder
        commit = folder.name  # should the branch move meanwhile
        snapshot_download(name, revision=commit, allow_patterns=SAFETENSORS[: 2 + is_head])
        if not any(path for each in SAFETENSORS[: 2 + is_head] for path in folder.glob(each)):
            import_torch(name)
            snapshot_download(name, revision=commit, allow_patterns=TORCH_WEIGHTS[: 2 + is_head])
    return folder


@contextmanager
def _download_bars(wanted: bool) -> Iterator[None]:
    were_off = are_progress_bars_disabled()
    if not wanted:
        disable_progress_bars()
    try:
        yield
    finally:
        if not wanted and not were_off:
            enable_progress_bars()


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except SpecjaxError:
        raise
    except errors.GatedRepoError:
        advice = f"is gated; ask for access at https://huggingface.co/{name}, then `hf auth login`"
        raise SpecjaxError(f"{name} {advice}") from None
    except errors.RepositoryNotFoundError:
        raise SpecjaxError(
            f"{name} is neither a folder nor a public hub id; check the spelling, "
            "or run `hf auth login` if it is private"
        ) from None
    except errors.RevisionNotFoundError:
        raise SpecjaxError(
            f"{name} has no revision {revision!r}; see https://huggingface.co/{name}/tree/main"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise SpecjaxError(
            f"{name} is not a folder, and the hub cannot be reached for it; "
            "check the network, or give a folder"
        ) from None
    except Exception as error:  # the network stack beneath the hub raises kinds of its own
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(f"{name} could not be downloaded ({reason}); try again") from error


# ---- What a folder holds ------------------------------------------------------------------------


def _dtype_of(dtype: DTypeLike | None) -> jnp.dtype:
    if dtype is None:
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    try:
        kind = jnp.dtype(dtype)
    except TypeError:
        kind = None
    if kind is None or kind.name not in DTYPES:
        raise SpecjaxError(f"dtype {dtype!r} is not supported; use {', '.join(DTYPES)}")
    return kind


def _with_generation_eos(config: TransformerConfig, folder: Path) -> TransformerConfig:
    """Adds the EOS tokens of `generation_config.json`: chat models name more of them there."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return config
    values = read_json(path)
    try:
        tokens = eos_tokens(values)
    except SpecjaxError as error:
        raise SpecjaxError(f"{path}: {error}") from None
    return dataclasses.replace(
        config, eos_token_id=tuple(dict.fromkeys(config.eos_token_id + tokens))
    )


def _read_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SpecjaxError(
            f"the tokenizer in {folder} cannot be read ({reason}); "
            "install what it lacks, or download it again"
        ) from error
