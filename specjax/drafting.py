"""Load a drafter for a target: its settings, tuned ones included, and the arrays that it reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.datastore import load_datastore, tokenizer_fingerprint
from specjax.datastore import params as datastore_params
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters import METHODS, check_settings, make_drafter
from specjax.errors import SpecjaxError
from specjax.files import cache_folder, expand_user
from specjax.hub import HUB_ID, POCKET, Target, pocket_folder
from specjax.tuned import FILE, fingerprint, read_tuned


def load_drafter(
    method: str,
    target: Target,
    source: str | Path | None = None,
    tuned: str | Path | None = None,
    **settings: Any,
) -> tuple[Drafter, Any]:
    """A drafter for `target` and its params (None for the methods that read none).

    Args:
        method: a name from `specjax methods`.
        target: the model whose tokens it will draft.
        source: what the method reads, where it reads something: for `rest` the folder of a
            datastore; by default pocket's own, if the target is pocket.
        tuned: a file that `specjax tune` wrote; by default the one beside the target, if any.
        settings: fields of the drafter in place of its tuned and its default ones.

    Raises:
        SpecjaxError: for an unknown method or setting, one that does not fit the target, or a
            source or file that is missing, damaged or made for another target.
    """
    check_settings(method, settings)
    known = _tuned_settings(method, target, tuned)
    drafter = make_drafter(method, target.config, {**known, **settings})
    params = _read_source(method, target, source)
    drafter.check(target.config, params)
    drafter.taps.check(target.config)
    return drafter, params


def tuned_file(name: str) -> Path:
    """Where the tuned settings of a target are kept: beside its weights, or for a hub id in the
    user's cache.

    Raises:
        SpecjaxError: for a hub id, if the user has no home folder.
    """
    if name == POCKET:
        return pocket_folder() / FILE
    folder = expand_user(name)
    if HUB_ID.fullmatch(name) and not folder.exists():
        folder = cache_folder() / "targets" / name.replace("/", "--")
    return folder / FILE


def _tuned_settings(method: str, target: Target, tuned: str | Path | None) -> Mapping[str, Any]:
    path = _known_file(target.name) if tuned is None else expand_user(tuned)
    if path is None or not METHODS[method].tuned:
        return {}
    owner = fingerprint(target.config, target.params)
    return read_tuned(path, owner).settings.get(method, {})


def _known_file(name: str) -> Path | None:
    try:
        path = tuned_file(name)
        return path if path.is_file() else None
    except (SpecjaxError, OSError):  # no home, or one that must not be read: nothing was tuned
        return None


def _read_source(method: str, target: Target, source: str | Path | None) -> Any:
    if not METHODS[method].has_params:
        if source is not None:
            raise SpecjaxError(f"method {method!r} reads nothing; leave out {str(source)!r}")
        return None
    if source is None and target.name != POCKET:
        raise SpecjaxError(
            f"method {method!r} needs {METHODS[method].needs}; give its folder, such as one that "
            "`specjax datastore build` made"
        )
    folder = pocket_folder().parent / "datastore" if source is None else source
    datastore = load_datastore(folder)
    if target.tokenizer is not None:
        datastore.check_tokenizer(tokenizer_fingerprint(target.tokenizer))
    return datastore_params(datastore)
