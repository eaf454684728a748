"""What drafters read beside the target: a draft, a head, a datastore."""

from functools import partial
from pathlib import Path
from typing import Any

from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.datastore import load_datastore, tokenizer_fingerprint
from specjax.datastore import params as datastore_params
from specjax.hub import POCKET, LoadedTarget, head_folder, load, pocket_folder
from specjax.methods import METHODS
from specjax.models.heads.files import HEAD, check_owner
from specjax.models.heads.kinds import KINDS, kind_in, refuse_other_kind
from specjax.models.io.checkpoint import CHECKPOINTS
from specjax.tuned import fingerprint

MOST_OTHER_TOKENS = 0.005  # share of the vocabulary: padding and the like, added by one side


def part_of(method: str, target: LoadedTarget, source: str | Path | None) -> Any:
    """What the method reads: the draft, the head and its params, the datastore, or None.

    Raises:
        SpecjaxError: for a source that is missing, damaged, made for another target or not wanted.
    """
    if method == "draft-model":
        return load_draft(target, source)
    if kind := METHODS[method].head:
        return load_head(_source_of(method, target, source), target, kind=kind)
    if method == "rest":
        return _datastore(target, source)
    if source is not None:
        raise SpecjaxError(f"method {method!r} reads nothing; leave out {str(source)!r}")
    return None


def load_draft(target: LoadedTarget, source: str | Path | None = None) -> LoadedTarget:
    """A draft model for `target`, in the dtype of its params.

    Raises:
        SpecjaxError: if there is no such model, or its tokens are not the target's.
    """
    dtype = target.params["embed_tokens"]["weight"].dtype
    draft = load(_source_of("draft-model", target, source), dtype=dtype)
    _check_same_tokens(target, draft)
    return draft


def find_head(source: str | Path, kind: str | None = None) -> Path:
    """The folder of a head: this one, that within a finished run, or the copy of a hub id.

    Args:
        source: the folder of a head, that of a run of `specjax train`, or a hub id.
        kind: of `models.heads.kinds.KINDS`; if None, any of them.

    Raises:
        SpecjaxError: if there is no such head, or the run has not finished.
    """
    folder = expand_user(source)
    if (folder / HEAD).is_dir():
        source = folder / HEAD
    elif (folder / CHECKPOINTS).is_dir():
        raise SpecjaxError(
            f"{folder} is a run that has not finished and has no head yet; repeat its command with "
            "--resume"
        )
    return head_folder(source, kind_in if kind is None else partial(refuse_other_kind, kind=kind))


def load_head(
    source: str | Path,
    target: LoadedTarget,
    dtype: DTypeLike | None = None,
    kind: str | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A head for `target`, such as `EagleHead`, and its params.

    Args:
        source: the folder of a head, that of a run of `specjax train`, or a hub id.
        target: that the head was trained for.
        dtype: of the params; by default that of the target's.
        kind: of `models.heads.kinds.KINDS`; if None, what the folder says.

    Raises:
        SpecjaxError: if there is no such head, it is of another kind, damaged, or was trained for
            another target.
    """
    folder = find_head(source, kind)
    wanted = target.params["embed_tokens"]["weight"].dtype if dtype is None else dtype
    loaded = KINDS[kind or kind_in(folder)].load(folder, target.config, wanted, progress=True)
    check_owner(folder, fingerprint(target.config, target.params))
    return loaded


def _datastore(target: LoadedTarget, source: str | Path | None) -> Any:
    folder = _source_of("rest", target, source)
    datastore = load_datastore(folder)
    if target.tokenizer is not None:
        datastore.check_tokenizer(tokenizer_fingerprint(target.tokenizer))
    return datastore_params(datastore)


def _source_of(method: str, target: LoadedTarget, source: str | Path | None) -> str | Path:
    """Where the method reads: `source`, or by default and for pocket's name what ships with it."""
    row = METHODS[method]
    if source is None and target.name != POCKET:
        raise SpecjaxError(
            f"method {method!r} needs {row.needs}; name a folder"
            + (" that `specjax datastore build` made" if method == "rest" else " or a hub id")
        )
    return pocket_part(row.part) if source in (None, POCKET) else source


def pocket_part(name: str) -> Path:
    """The folder of what ships with pocket under this name."""
    return pocket_folder().parent / name


def _check_same_tokens(target: LoadedTarget, draft: LoadedTarget) -> None:
    """Raises SpecjaxError if the draft's tokens are others; a few added ones may differ."""
    if draft.config.vocab_size != target.config.vocab_size:
        raise SpecjaxError(
            f"draft {draft.name} has a vocabulary of {draft.config.vocab_size} tokens, the target "
            f"one of {target.config.vocab_size}; use a draft with the target's tokenizer"
        )
    if target.tokenizer is None or draft.tokenizer is None:
        return
    known = target.tokenizer.get_vocab()
    others = [
        text for text, token in draft.tokenizer.get_vocab().items() if known.get(text) != token
    ]
    if len(others) > MOST_OTHER_TOKENS * len(known):
        raise SpecjaxError(
            f"draft {draft.name} has another tokenizer: {len(others)} of its tokens, such as "
            f"{others[0]!r}, are not the target's; use a draft with the target's tokenizer"
        )
