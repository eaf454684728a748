"""Reports how fast a device decodes: python -m benchmarks.gpu --out DIR

Random targets of known sizes, methods at their papers' settings with random weights, and accepted
lengths set by construction (see `Scripted`), so that nothing has to be fetched. Made for ten
minutes on a borrowed GPU: the most wanted groups come first, rows are written group by group, and
what no time is left for is listed. DIR gets gpu.json and gpu.md; a second call with the same DIR
measures what is missing. On a CPU choose less: --sizes tiny --size 160m --context 256
--contexts 512 --batches 4 --new-tokens 32.
"""

import math
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.gpu.measure import GpuBench, Group
from benchmarks.gpu.methods import PAPER_METHODS
from benchmarks.gpu.record import ROWS, TABLES, Record
from benchmarks.harness import SIZES, at_least_1, check_known, main
from specjax import SpecjaxError
from specjax.core.files import expand_user
from specjax.core.folder import RunFolder
from specjax.core.provenance import command_line, num_cores, revision, versions

PARTS = ("bandwidth", "plain", "rounds", "batch", "context")


@dataclass(frozen=True)
class GpuOptions:
    """The options; their defaults suit a GPU."""

    out: Path = Path("gpu-report")  # folder of the report
    minutes: float = 9.0  # start nothing that will not fit in this time; 9 suit a slot of 10
    parts: tuple[str, ...] = PARTS  # parts to measure
    methods: tuple[str, ...] = tuple(PAPER_METHODS)  # methods of the rounds
    sizes: tuple[str, ...] = ("1b", "13b", "7b")  # of plain decoding; the last stays loaded
    size: str = "7b"  # target of all other parts, of the shapes of benchmarks.harness
    context: int = 1024  # tokens of the prompt
    contexts: tuple[int, ...] = (4096, 16384)  # other prompt lengths, with two methods
    batches: tuple[int, ...] = (8, 32, 4, 16)  # rows at once, with two methods
    new_tokens: int = 256  # tokens that are generated
    repeats: int = 5  # timed runs of each, in turn
    num_threads: int = max(1, min(4, num_cores() // 4))  # programs that are compiled at once

    def check(self) -> None:
        """Raises SpecjaxError for unknown names, or sizes that cannot be measured."""
        check_known("part", self.parts, PARTS)
        check_known("method", self.methods, PAPER_METHODS)
        check_known("size", (*self.sizes, self.size), SIZES)
        if SIZES[self.size].tie_word_embeddings:
            raise SpecjaxError(f"size {self.size!r} ties its LM head; it is for --sizes")
        at_least_1(self, "new_tokens", "repeats", "num_threads")
        if min((self.context, *self.contexts)) < 2 or min(self.batches, default=1) < 1:
            raise SpecjaxError("contexts must be at least 2, and batches at least 1")
        if not 0 <= self.minutes < math.inf:
            raise SpecjaxError(f"minutes {self.minutes} is not a time; give a number from 0 on")

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
    options.check()
    budget = Budget(options.minutes)
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
