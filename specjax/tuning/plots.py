"""Curves of a sweep as PNG files, and beside them as JSON for `specjax report`."""

import re
from importlib.util import find_spec
from pathlib import Path

from specjax.bench.curves import Curve, keep_curve
from specjax.errors import SpecjaxError
from specjax.files import writable, writable_folder


def prepare(folder: Path) -> None:
    """Raises SpecjaxError if there is no matplotlib, or no such folder can be written."""
    if find_spec("matplotlib") is None:
        raise SpecjaxError("--plots needs matplotlib; run `pip install matplotlib`")
    writable_folder(folder)


def plot(curve: Curve, folder: Path) -> Path:
    """Draws accepted length over the setting, one line per series, and keeps the points.

    Returns:
        The picture.

    Raises:
        SpecjaxError: if a file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curve.series.items():
        values = [str(point.value) for point in points]
        axes.plot(values, [point.accepted_length for point in points], marker="o", label=name)
    axes.set(title=curve.title, xlabel=curve.setting, ylabel="accepted length")
    axes.legend()
    path = folder / (re.sub(r"\W+", "-", curve.title.lower()).strip("-") + ".png")
    with writable(path):
        figure.savefig(path, dpi=120)
    keep_curve(folder, curve)
    return path
