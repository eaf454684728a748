"""Loads the models and data that drafters read: heads, draft models, datastores, classifiers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike
from safetensors import SafetensorError
from safetensors.flax import load_file
from safetensors.numpy import save

from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import cache_folder, write_whole
from specjax.data import datastore
from specjax.decoding.drafters.recycling import Successors, successors_of
from specjax.loading.hub import POCKET, find_head, pocket_part
from specjax.loading.targets import LoadedTarget, load
from specjax.models.fingerprint import fingerprint
from specjax.models.io import head_files
from specjax.models.io.classifier import TrainedClassifier, load_classifier
from specjax.models.io.head_files import check_owner
from specjax.models.io.head_format import HeadFormat


def source_or_pocket(
    target: LoadedTarget, source: str | Path | None, part: str, needs: str
) -> str | Path:
    """Returns `source`, or by default the folder of `part` that ships with pocket.

    Only pocket has a default; `needs`, which says what is missing, begins the error of others.
    """
    if source is None and target.name != POCKET:
        raise SpecjaxError(f"{needs}; name a folder or a hub id")
    return pocket_part(part) if source in (None, POCKET) else source


def load_head(
    source: str | Path,
    target: LoadedTarget,
    formats: Sequence[HeadFormat],
    format: HeadFormat,
    dtype: DTypeLike | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Loads a head for `target`, such as `EagleHead`, and its params.

    `source` is as in `find_head`; an error names which of `formats` it holds instead of `format`.
    By default the params get the dtype of the target's.
    """
    folder = find_head(source, formats, format)
    dtype = target.dtype if dtype is None else dtype
    head, params = head_files.load_head(
        folder, format, target.config, dtype, progress=True, others=formats
    )
    check_owner(folder, fingerprint(target.config, target.params))
    return head, target.place(params)


def load_draft(target: LoadedTarget, source: str | Path | None = None) -> LoadedTarget:
    """Loads a draft model for `target`, in the dtype of its params; by default pocket's."""
    needs = "method 'draft-model' needs a draft model"
    source = source_or_pocket(target, source, "draft", needs)
    return load(source, dtype=target.dtype, mesh=target.mesh)


def classifier_of(
    target: LoadedTarget, draft: LoadedTarget, folder: str | Path
) -> tuple[TrainedClassifier, Any]:
    """Loads the classifier of the rule `disco` for this target and draft, and its params."""
    trained = load_classifier(folder)
    trained.check_owner(*(fingerprint(model.config, model.params) for model in (target, draft)))
    return trained, target.place(trained.params)


def load_datastore(target: LoadedTarget, folder: str | Path) -> Any:
    """Loads the params of a datastore that was built with the target's tokenizer."""
    loaded = datastore.load_datastore(folder)
    if target.tokenizer is not None:
        loaded.check_tokenizer(datastore.tokenizer_fingerprint(target.tokenizer))
    return target.place(datastore.params(loaded))


def load_successors(target: LoadedTarget, count: int) -> Successors:
    """Loads the successors of each token alone, or computes them and keeps them in the cache."""
    owner, shape = fingerprint(target.config, target.params), (target.config.vocab_size, count)
    file = Path("successors", f"{owner}.safetensors")
    try:
        stored = Successors(**load_file(cache_folder() / file))
        if {leaf.shape for leaf in jax.tree.leaves(stored)} == {shape}:
            return target.place(stored)
    except (SpecjaxError, OSError, SafetensorError, TypeError):  # none is stored, or it is damaged
        pass
    computed = successors_of(target.model, target.params, count)
    arrays = {name: np.asarray(leaf) for name, leaf in vars(computed).items()}
    try:
        write_whole(cache_folder() / file, save(arrays))
    except SpecjaxError as error:
        warn(f"the successors of tokens cannot be kept and are computed again next time: {error}")
    return target.place(computed)
