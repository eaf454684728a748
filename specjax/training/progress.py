"""Shows the progress of a run: a bar on a terminal, and every measurement."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Column

from specjax.core.errors import throttled


class Progress(Bar):
    """A progress bar that also measures the speed between two lines of the log."""

    def __init__(self, title: str, first: int, num_steps: int):
        is_quiet = jax.process_index() > 0  # only the first process prints
        console = Console(stderr=True, quiet=is_quiet)
        whole, cut = Column(no_wrap=True), Column(overflow="ellipsis")  # on a narrow terminal
        columns = (
            TextColumn("{task.description}", table_column=whole),
            BarColumn(bar_width=20, table_column=whole),
            MofNCompleteColumn(table_column=whole),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.fields[metrics]}", markup=False, table_column=cut),
        )
        hidden = not console.is_terminal
        super().__init__(*columns, console=console, disable=hidden, transient=True)
        self.task = self.add_task(title, total=num_steps, completed=first, metrics="")
        self.tokens, self.started = 0, time.perf_counter()
        self.title, self.num_steps = title, num_steps
        self.note = (lambda text: None) if is_quiet else throttled()

    def count(self, batch: PyTree) -> None:
        """Adds a batch to those since the last line."""
        if isinstance(batch, dict) and "segments" in batch:
            self.tokens += int(np.count_nonzero(batch["segments"]))  # 0 in the padding

    def show(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Moves the bar; returns the speed since the last line, if tokens were counted."""
        seconds = time.perf_counter() - self.started
        speed = {"tokens_per_second": round(self.tokens / seconds, 1)} if self.tokens else {}
        text = _as_text({**metrics, **speed})
        self.update(self.task, completed=step, metrics=text)
        if not self.console.is_terminal:
            self.note(f"{self.title}: step {step} of {self.num_steps}, {text}")
        self.tokens, self.started = 0, time.perf_counter()
        return speed

    def measure(
        self, step: int, measure: Callable[[PyTree], Mapping[str, Any]], params: PyTree
    ) -> dict[str, Any]:
        """Takes and prints a measurement; its time is excluded from the speed."""
        began = time.perf_counter()
        measured = dict(measure(params))
        jax.block_until_ready(params)
        self.started += time.perf_counter() - began
        self.console.print(f"step {step}: {_as_text(measured)}", highlight=False)
        return measured


def _as_text(metrics: Mapping[str, Any]) -> str:
    numbers = {name.replace("_", " "): _number(value) for name, value in metrics.items()}
    return "  ".join(f"{name} {number}" for name, number in numbers.items())


def _number(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_number, value))
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
