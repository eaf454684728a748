"""Reports how fast a device decodes: python -m benchmarks.gpu --out DIR

Random targets of known sizes, methods at their papers' settings with random weights, and accepted
lengths set by construction (see `Scripted`), so that nothing has to be fetched. Made for ten
minutes on a borrowed GPU: the most wanted groups come first, rows are written group by group, and
what no time is left for is listed. DIR gets gpu.json and gpu.md; a second call with the same DIR
measures what is missing.
"""

import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.gpu.measure import GpuBench, Group
from benchmarks.gpu.methods import PAPER_METHODS
from benchmarks.gpu.record import ROWS, TABLES, Record
from benchmarks.harness import SIZES, at_least_1, check_known, main
from specjax import SpecjaxError
from specjax.core.files import expand_user
from specjax.core.folder import RunFolder
from specjax.core.provenance import command_line, revision, versions

PARTS = ("bandwidth", "plain", "rounds", "batch", "context")
PRESETS: dict[str, dict[str, Any]] = {  # the defaults of a device
    "cpu": {
        "sizes": ("tiny", "160m"),
        "size": "160m",
        "context": 256,
        "contexts": (512,),
        "batches": (4,),
        "new_tokens": 32,
    },
    "other": {
        "sizes": ("1b", "13b", "7b"),  # the last is the target of the other parts
        "size": "7b",
        "context": 1024,
        "contexts": (4096, 16384),
        "batches": (8, 32, 4, 16),
        "new_tokens": 256,
    },
}


@dataclass(frozen=True)
class GpuOptions:
    """The options; zeros and empty tuples become the device's defaults (`PRESETS`)."""

    out: Path = Path("gpu-report")  # folder of the report
    minutes: float = 9.0  # start nothing that will not fit in this time; 9 suit a slot of 10
    parts: tuple[str, ...] = PARTS  # parts to measure
    methods: tuple[str, ...] = tuple(PAPER_METHODS)  # methods of the rounds
    sizes: tuple[str, ...] = ()  # targets of plain decoding, of the shapes of benchmarks.harness
    size: str = ""  # target of all other parts
    context: int = 0  # tokens of the prompt
    contexts: tuple[int, ...] = ()  # other prompt lengths, with two methods
    batches: tuple[int, ...] = ()  # rows at once, with two methods
    new_tokens: int = 0  # tokens that are generated
    repeats: int = 5  # timed runs of each, in turn
    num_threads: int = 0  # programs that are compiled at once

    def for_device(self) -> "GpuOptions":
        """Returns the options with the device's defaults for those that are unset."""
        preset = PRESETS["cpu" if jax.default_backend() == "cpu" else "other"]
        chosen = {name: getattr(self, name) or value for name, value in preset.items()}
        at_once = self.num_threads or max(1, min(4, (os.cpu_count() or 1) // 4))
        whole = replace(self, **chosen, num_threads=at_once)
        check_known("part", self.parts, PARTS)
        check_known("method", self.methods, PAPER_METHODS)
        check_known("size", (*whole.sizes, whole.size), SIZES)
        if SIZES[whole.size].tie_word_embeddings:
            raise SpecjaxError(f"size {whole.size!r} ties its LM head; it is for --sizes")
        at_least_1(whole, "new_tokens", "repeats", "num_threads")
        if min(whole.context, *whole.contexts) < 2 or min(whole.batches) < 1:
            raise SpecjaxError("contexts must be at least 2, and batches at least 1")
        if not 0 <= self.minutes < math.inf:
            raise SpecjaxError(f"minutes {self.minutes} is not a time; give a number from 0 on")
        return whole

    def groups(self) -> list[Group]:
        """Returns the groups to measure, the most important first."""
        two = tuple(name for name in ("eagle2", "pld") if name in self.methods)
        several = self.num_threads  # methods that are compiled together
        groups = {
            "bandwidth": [Group("bandwidth")],
            "plain": [Group("plain", each, self.context) for each in self.sizes],
            "rounds": [
                Group("rounds", self.size, self.context, 1, self.methods[at : at + several])
                for at in range(0, len(self.methods), several)
            ],
            "batch": [Group("batch", self.size, self.context, each, two) for each in self.batches],
            "context": [Group("context", self.size, each, 1, two) for each in self.contexts],
        }
        return [group for part in PARTS if part in self.parts for group in groups[part]]


class Budget:
    """The time that is left."""

    def __init__(self, minutes: float):
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line on stderr, with the minutes that are left."""
        print(f"[{self.left / 60:.1f} min left] {text}", file=sys.stderr, flush=True)


def report(options: GpuOptions) -> None:
    """Measures the missing groups of the folder while there is time."""
    budget, options = Budget(options.minutes), options.for_device()
    device = jax.devices()[0]
    about = {
        "command": command_line(),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": versions(),
        "revision": revision(),
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
    }
    record = Record(RunFolder(expand_user(options.out), ROWS), about, options.groups())
    record.open()
    longest = max((options.context, *options.contexts)) + options.new_tokens
    bench = GpuBench(options.new_tokens, options.repeats, options.num_threads, longest)
    longest_seconds = defaultdict(float)  # of a group, by part; another might take as long
    for group in record.missing():
        title = f"{' '.join(map(str, group.place))}: {', '.join(group.names)}"
        left = budget.left
        if left <= longest_seconds[group.part]:
            budget.say(f"left out: {title}")
            continue
        budget.say(title)
        record.add(bench.measure(group, lambda: budget.left > 0))
        longest_seconds[group.part] = max(longest_seconds[group.part], left - budget.left)
    budget.say(f"{len(record.rows)} rows and tables are in {record.folder.path}")
    if failed := [row for row in record.rows if "failed" in row and not row["is_memory"]]:
        raise SpecjaxError(
            f"{len(failed)} measurements failed, the first with {failed[0]['failed']!r}; all are "
            f"listed in {record.folder.path / TABLES}"
        )


if __name__ == "__main__":
    main(report, GpuOptions, __doc__)
