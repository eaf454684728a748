"""Loads a drafter for a target: its settings, tuned ones included, and the arrays that it reads."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user
from specjax.data.datastore import load_datastore, tokenizer_fingerprint
from specjax.data.datastore import params as datastore_params
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.hybrid import PARTS
from specjax.loading.methods import (
    HEAD_FORMATS,
    HYBRID,
    METHODS,
    check_settings,
    make_drafter,
    split_parts,
)
from specjax.loading.targets import POCKET, LoadedTarget, head_folder, load, pocket_folder
from specjax.loading.tuned import AUTO, auto_choice, tuned_for
from specjax.models.fingerprint import fingerprint, params_fingerprint
from specjax.models.io import head_files
from specjax.models.io.classifier import load_classifier
from specjax.models.io.head_files import HEAD, check_owner, detect_format, made_by_run
from specjax.models.io.head_format import HeadFormat
from specjax.models.sharding import Placement, place

# Beside tuned settings: the fingerprint of the draft, or of the head, that they were found for.
TUNED_DRAFT, TUNED_HEAD = "draft", "head"
OTHER_RULES = "other_rules"  # beside those of the rule tuned last: what was tuned for the others


def load_drafter(
    method: str,
    target: LoadedTarget,
    source: str | Path | None = None,
    tuned: str | Path | None = None,
    **settings: Any,
) -> tuple[Drafter, Any]:
    """Returns a drafter for `target` and its params (None for the methods that read none).

    Args:
        method: a name from `specjax methods`.
        target: the model whose tokens it will draft.
        source: the folder or hub id that the method reads, if it reads anything: for `rest` a
            datastore, for `draft-model` the draft, for the methods with a head that head. By
            default pocket's own, if the target is pocket.
        tuned: a file that `specjax tune` wrote; by default what is tuned for the target.
        settings: fields of the drafter in place of its tuned and its default ones.

    Raises:
        SpecjaxError: for an unknown method or setting, one that does not fit the target, or a
            source or file that is missing, damaged or made for another target.
    """
    check_settings(method, settings, are_all=False)
    if method == AUTO:
        return _auto(target, source, tuned)
    if method == HYBRID:
        return _hybrid(target, source, tuned, settings)
    part = part_of(method, target, source)
    known = _tuned_settings(method, target, part, tuned, settings)
    return _build(method, target, source, part, {**known, **settings})


def _hybrid(
    target: LoadedTarget, source: str | Path | None, tuned: str | Path | None, settings: Any
) -> tuple[Drafter, Any]:
    own, of_parts = split_parts(HYBRID, METHODS[HYBRID].settings | settings)
    if AUTO in (own[name] for name in PARTS):
        raise SpecjaxError("auto cannot be a part of hybrid, where it cannot learn; choose another")
    sources = {"copy": own["copy_source"] or None, "head": source}
    parts = {
        name: load_drafter(own[name], target, sources[name], tuned, **of_parts[name])
        for name in PARTS
    }
    drafters = {name: drafter for name, (drafter, _) in parts.items()}
    params = {name: params for name, (_, params) in parts.items()}
    drafter = make_drafter(HYBRID, target.config, own | drafters)
    drafter.check(target.model, params)
    return drafter, params


# Of prompt lookup where nothing was measured: wide layers on two cores; elsewhere rows cost little.
ASSUMED_BREAK_EVEN = {"cpu": 1.5, "other": 0.1}


def gated(drafter: Drafter, params: Any, target: LoadedTarget, break_even: float) -> Auto:
    """Puts a drafter behind the gate of `auto`.

    Raises:
        SpecjaxError: if it cannot be gated.
    """
    gate = Auto(drafter, break_even)
    gate.check(target.model, params)
    return gate


def _auto(
    target: LoadedTarget, source: str | Path | None, tuned: str | Path | None
) -> tuple[Drafter, Any]:
    if source is not None:
        raise SpecjaxError(
            f"method 'auto' reads what `specjax tune machine` chose; leave out {str(source)!r}, or "
            "name a method that reads it"
        )
    choice = auto_choice(target, tuned)
    method = choice.method
    try:
        settings = dict(choice.settings)
        check_settings(method, settings)
        part = part_of(method, target, choice.source)
        drafter, params = _build(method, target, choice.source, part, settings)
        if not choice.widths:
            platform = jax.default_backend()
            assumed = ASSUMED_BREAK_EVEN.get(platform, ASSUMED_BREAK_EVEN["other"])
            return gated(drafter, params, target, assumed), params
        if choice.widths[-1] != drafter.num_nodes:
            raise SpecjaxError(
                f"its passes have {drafter.num_nodes} rows now, and {choice.widths[-1]} were timed"
            )
        if drafter.num_nodes == 1:
            return drafter, params
        return gated(drafter, params, target, choice.break_even), params
    except (SpecjaxError, TypeError) as error:
        raise SpecjaxError(
            f"auto cannot load {method}, which was chosen for it: {error}; run `specjax tune "
            "machine` again"
        ) from None


def settings_of(drafter: Drafter, method: str, target: LoadedTarget) -> dict[str, Any]:
    """Returns the settings of a drafter that are not the method's defaults for the target."""
    row = METHODS[method]
    defaults = row.settings | row.settings_for(target.config)
    return {
        name: getattr(drafter, name)
        for name, default in defaults.items()
        if getattr(drafter, name) != default
    }


def _tuned_settings(
    method: str, target: LoadedTarget, part: Any, tuned: str | Path | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what was tuned, if it was for this draft and the wanted rule, or for this head."""
    if not METHODS[method].tuned:
        return {}
    known = dict(tuned_for(target, tuned).settings.get(method, {}))
    if method == "draft-model":
        is_same_draft = known.pop(TUNED_DRAFT, "") == fingerprint(part.config, part.params)
        others, rule = known.pop(OTHER_RULES, {}), known.get("rule")
        known = known if given.get("rule", rule) == rule else others.get(given["rule"], {})
        return known if is_same_draft else {}
    if not (known and METHODS[method].head):
        return known
    if known.pop(TUNED_HEAD, None) == params_fingerprint(part[1]):
        return known
    if tuned is not None:
        raise SpecjaxError(
            f"{tuned} holds settings of {method!r} for another head; tune this one, or leave the "
            "file out"
        )
    return {}


def _build(
    method: str,
    target: LoadedTarget,
    source: str | Path | None,
    part: Any,
    settings: dict[str, Any],
) -> tuple[Drafter, Any]:
    """Returns the drafter, and the params that it reads."""
    if METHODS[method].head:
        head, params = part
        drafter = make_drafter(method, target.config, settings, head)
    elif method == "draft-model":
        drafter, params = _draft_model(target, source, part, settings)
    else:
        drafter, params = make_drafter(method, target.config, settings), part
    drafter.check(target.model, params)
    drafter.taps.check(target.config)
    return drafter, params


def _draft_model(
    target: LoadedTarget,
    source: str | Path | None,
    draft: LoadedTarget,
    settings: Mapping[str, Any],
) -> tuple[Drafter, Any]:
    rule_params = None
    if settings.get("rule") == "disco":
        folder = settings.get("classifier")
        if not folder and source not in (None, POCKET):
            raise SpecjaxError(
                "rule 'disco' needs a classifier of this target and draft; make one with `specjax "
                "train disco` and give its folder: classifier=FOLDER"
            )
        trained = load_classifier(folder or pocket_part("classifier"))
        trained.check_owner(*(fingerprint(each.config, each.params) for each in (target, draft)))
        given = {name: value for name, value in settings.items() if value is not None}
        settings = {"threshold": trained.threshold, **given, "position": trained.position}
        rule_params = target.place(jax.tree.map(jnp.asarray, trained.params))
    drafter = make_drafter("draft-model", target.config, dict(settings), draft.model)
    return drafter, {"draft": draft.params, "rule": rule_params}


MAX_OTHER_TOKENS = 0.005  # share of the vocabulary: padding and the like that one side added


def part_of(method: str, target: LoadedTarget, source: str | Path | None) -> Any:
    """Returns what the method reads: the draft, the head and its params, the datastore, or None.

    Raises:
        SpecjaxError: for a source that is missing, damaged, made for another target or not wanted.
    """
    if method == "draft-model":
        return load_draft(target, source)
    if format := METHODS[method].head:
        return load_head(_source_of(method, target, source), target, format=format)
    if method == "rest":
        return _datastore(target, source)
    if source is not None:
        raise SpecjaxError(
            f"method {method!r} reads nothing; leave out {str(source)!r}, or name another method"
        )
    return None


def load_draft(target: LoadedTarget, source: str | Path | None = None) -> LoadedTarget:
    """Loads a draft model for `target`, in the dtype of its params.

    Raises:
        SpecjaxError: if there is no such model, or its tokens are not the target's.
    """
    draft = load(_source_of("draft-model", target, source), dtype=target.dtype)
    _check_same_tokens(target, draft)
    if target.mesh is None:
        return draft
    placed = place(draft.params, Placement(target.mesh, draft.config.head_dim))
    return replace(draft, model=draft.model.clone(mesh=target.mesh), params=placed)


def find_head(source: str | Path, format: HeadFormat | None = None) -> Path:
    """Returns the folder of a head: `source`, the one within a finished run, or a hub download.

    Args:
        source: the folder of a head, that of a run of `specjax train`, or a hub id.
        format: of the head that is wanted; if None, any.

    Raises:
        SpecjaxError: if there is no such head, or the run has not finished.
    """
    folder = expand_user(source)
    if (found := made_by_run(folder, HEAD)) != folder:
        source = found
    detect = partial(detect_format, formats=HEAD_FORMATS, wanted=format)
    return head_folder(source, detect, files=tuple(file for f in HEAD_FORMATS for file in f.files))


def load_head(
    source: str | Path,
    target: LoadedTarget,
    dtype: DTypeLike | None = None,
    format: HeadFormat | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Loads a head for `target`, such as `EagleHead`, and its params.

    Args:
        source: the folder of a head, that of a run of `specjax train`, or a hub id.
        target: that the head was trained for.
        dtype: of the params; by default that of the target's.
        format: of the head; if None, the folder decides.

    Raises:
        SpecjaxError: if there is no such head, it is of another kind, damaged, or was trained for
            another target.
    """
    folder = find_head(source, format)
    loaded = head_files.load_head(
        folder,
        format or detect_format(folder, HEAD_FORMATS),
        target.config,
        target.dtype if dtype is None else dtype,
        progress=True,
        others=HEAD_FORMATS,
    )
    check_owner(folder, fingerprint(target.config, target.params))
    return loaded[0], target.place(loaded[1])


def _datastore(target: LoadedTarget, source: str | Path | None) -> Any:
    folder = _source_of("rest", target, source)
    datastore = load_datastore(folder)
    if target.tokenizer is not None:
        datastore.check_tokenizer(tokenizer_fingerprint(target.tokenizer))
    return target.place(datastore_params(datastore))


def _source_of(method: str, target: LoadedTarget, source: str | Path | None) -> str | Path:
    """Returns where the method reads: `source`, or what ships with pocket."""
    row = METHODS[method]
    if source is None and target.name != POCKET:
        raise SpecjaxError(
            f"method {method!r} needs {row.needs}; name a folder"
            + (" that `specjax datastore build` made" if method == "rest" else " or a hub id")
        )
    return pocket_part(row.part) if source in (None, POCKET) else source


def pocket_part(name: str) -> Path:
    """Returns the folder of a part that ships with pocket."""
    return pocket_folder().parent / name


def _check_same_tokens(target: LoadedTarget, draft: LoadedTarget) -> None:
    """Raises SpecjaxError if the draft has other tokens than the target; a few added ones may."""
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
    if len(others) > MAX_OTHER_TOKENS * len(known):
        raise SpecjaxError(
            f"draft {draft.name} has another tokenizer: {len(others)} of its tokens, such as "
            f"{others[0]!r}, are not the target's; use a draft with the target's tokenizer"
        )
