"""Finds the folders of targets and heads: inside specjax, on this machine, or on the hub."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import errors, snapshot_download, utils

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, readable
from specjax.data.records import HUB_ID
from specjax.models.families import read_config
from specjax.models.io.gguf import is_gguf
from specjax.models.io.head_files import HEAD, detect_format, made_by_run
from specjax.models.io.head_format import HeadFormat
from specjax.models.io.weights import import_torch

POCKET = "pocket"
SMALL_FILES = [  # the config first
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template*"),
]
# Leaves out "consolidated" copies.
SAFETENSORS = ["model*.safetensors", "model.safetensors.index.json"]
TORCH_WEIGHTS = ["pytorch_model*.bin", "pytorch_model.bin.index.json"]


def pocket_folder() -> Path:
    """Returns the folder of the small model inside specjax."""
    folder = Path(str(resources.files("specjax") / "pocket" / "weights" / "target"))
    if not (folder / "config.json").is_file():
        raise SpecjaxError(
            f"the pocket weights are missing from {folder}; reinstall specjax, "
            "or give a folder or a hub id"
        )
    return folder


def pocket_part(name: str) -> Path:
    """Returns the folder of a head, draft model, datastore or classifier that ships with pocket."""
    return pocket_folder().parent / name


def target_folder(
    name: str, revision: str | None = None, progress: bool = True, with_weights: bool = True
) -> Path:
    """Returns the folder or GGUF file of a target, downloading it if needed."""
    path = pocket_folder() if name == POCKET else expand_user(name)
    if name == POCKET or is_gguf(path):
        _reject_revision(name, revision)
        return path
    folder = _find(name, revision, progress, read_config, with_weights)
    if folder is None:
        raise SpecjaxError(
            f"{name!r} is not a target: give 'pocket', an existing folder in Hugging Face format, "
            "a .gguf file, or a hub id such as 'TinyLlama/TinyLlama-1.1B-Chat-v1.0'"
        )
    if (folder / HEAD).is_dir():
        raise SpecjaxError(
            f"{name} contains a trained head, not a model; give it as --drafter to the method "
            "that it was trained for, or convert it with --head-of TARGET"
        )
    return folder


def find_head(
    source: str | Path, formats: Sequence[HeadFormat], expected: HeadFormat | None = None
) -> Path:
    """Returns the folder of a head, downloading it if needed.

    `source` is the folder of a head, that of a finished run of `specjax train`, or a hub id. The
    config decides the format, which must be `expected` if given, before weights are downloaded.
    """
    folder = made_by_run(expand_user(source), HEAD)
    name = str(source) if folder == expand_user(source) else str(folder)
    weights = [file for format in formats for file in format.files]
    head_folder = _find(
        name, check=partial(detect_format, formats=formats, expected=expected), files=weights
    )
    if head_folder is None:
        raise SpecjaxError(
            f"{name!r} is not a head: give an existing folder with config.json and weights, "
            "or a hub id such as 'yuhuili/EAGLE-Vicuna-7B-v1.3'"
        )
    return head_folder


def _find(
    name: str,
    revision: str | None = None,
    progress: bool = True,
    check: Callable[[Path], Any] = read_config,
    with_weights: bool = True,
    files: Sequence[str] = (),
) -> Path | None:
    """Returns the local folder of a name or hub id; None if it is neither.

    `check` reads the config of a download and rejects it before its weights are fetched; `files`
    are weights that it may have besides those of a model.
    """
    folder = expand_user(name)
    with readable(folder):
        is_local = name != "" and folder.is_dir()
        is_free = not folder.exists()  # a file is neither a model nor a hub id
    if is_local:
        _reject_revision(name, revision)
        return folder
    if not (HUB_ID.fullmatch(name) and is_free):
        return None
    with _download_bars(progress), _hub_errors(name, revision):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=SMALL_FILES))
        check(folder)
        if not with_weights:
            return folder
        commit = folder.name  # in case the branch moves meanwhile
        safetensors = [*SAFETENSORS, *(file for file in files if file.endswith(".safetensors"))]
        snapshot_download(name, revision=commit, allow_patterns=safetensors)
        if not any(path for pattern in safetensors for path in folder.glob(pattern)):
            import_torch(name)
            snapshot_download(name, revision=commit, allow_patterns=[*TORCH_WEIGHTS, *files])
    return folder


def _reject_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise SpecjaxError(
            f"{name} has no revision {revision!r}: only hub ids have revisions; leave it out"
        )


@contextmanager
def _download_bars(are_on: bool) -> Iterator[None]:
    were_off = utils.are_progress_bars_disabled()
    if not are_on:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        if not are_on and not were_off:
            utils.enable_progress_bars()


@contextmanager
def _hub_errors(name: str, revision: str | None) -> Iterator[None]:
    page = f"https://huggingface.co/{name}"
    problems = {
        errors.GatedRepoError: f"is gated; request access at {page}, then run `hf auth login`",
        errors.RepositoryNotFoundError: "is neither a folder nor a public repository on the hub; "
        "check the spelling, or run `hf auth login` if it is private",
        errors.RevisionNotFoundError: f"has no revision {revision!r}; see {page}/tree/main",
        errors.LocalEntryNotFoundError: "is not a folder, and the hub cannot be reached; "
        "check the network, or give a folder",
    }
    try:
        yield
    except SpecjaxError:
        raise
    except Exception as error:  # the hub's network stack raises many types
        if isinstance(error.__cause__, errors.HfHubHTTPError):  # reached, but it rejects or fails
            error = error.__cause__
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        other = f"could not be downloaded ({reason}); try again"
        problem = next((problems[kind] for kind in problems if isinstance(error, kind)), other)
        raise SpecjaxError(f"{name} {problem}") from error
