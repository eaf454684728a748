"""Loads a drafter for a target: its settings, tuned ones included, and the arrays that it reads."""

from pathlib import Path
from typing import Any

from specjax.core.errors import check_type
from specjax.decoding.drafter import Drafter
from specjax.loading.method import Request
from specjax.loading.methods import METHODS
from specjax.loading.targets import LoadedTarget
from specjax.loading.tuned import tuned_for


def load_drafter(
    method: str,
    target: LoadedTarget,
    source: str | Path | None = None,
    tuned: str | Path | None = None,
    **settings: Any,
) -> tuple[Drafter, Any]:
    """Returns a drafter for `target` and its params; None for the methods that read none.

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
    check_type("target", target, LoadedTarget, "the target from specjax.load")
    METHODS.check(method, settings)
    if tuned is not None:
        tuned_for(target, tuned)  # a wrong file is an error even if the method reads none
    return Request(METHODS, method, target, source, tuned, settings).load()
