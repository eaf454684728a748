"""Curves of a sweep as PNG files, and beside them as JSON for `specjax report`."""

from importlib.util import find_spec
from pathlib import Path

from specjax.bench.curves import Curve, keep_curve
from specjax.bench.pages.plots import save_curve
from specjax.core.errors import SpecjaxError
from specjax.core.files import writable_folder


def prepare(folder: Path) -> None:
    """Raises SpecjaxError if there is no matplotlib, or no such folder can be written."""
    if find_spec("matplotlib") is None:
        raise SpecjaxError("--plots needs matplotlib; run `pip install matplotlib`")
    writable_folder(folder)


def plot(curve: Curve, folder: Path) -> Path:
    """Draws the curve, and keeps its points.

    Returns:
        The picture.

    Raises:
        SpecjaxError: if a file cannot be written.
    """
    path = save_curve(curve, folder)
    keep_curve(folder, curve)
    return path
