"""How fast a device decodes: `python -m specjax.bench.gpu --out DIR`.

Random targets of known sizes, methods at their papers' settings with random weights, and accepted
lengths set by construction (see `Scripted`), so that nothing has to be fetched. Made for ten
minutes on a GPU that is not one's own: what is most wanted comes first, every row is written when
it is known, and what no time is left for is told. DIR gets gpu.jsonl (rows as they come), gpu.json,
gpu.md and gpu.png; a second call with the same DIR measures what is missing.

Needs nothing beyond what decoding needs, and matplotlib: a borrowed machine may have little else.
"""

import argparse
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from specjax.bench.gpu.methods import METHODS
from specjax.bench.gpu.parts import PARTS, Bench, Group, plan
from specjax.bench.gpu.record import Budget, Record
from specjax.bench.shapes import SIZES, check_size
from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
PRESETS: dict[str, dict[str, Any]] = {  # where nothing else is asked for
    "cpu": {
        "sizes": ("tiny", "160m"),
        "size": "160m",
        "context": 256,
        "contexts": (512,),
        "batches": (4,),
        "new_tokens": 32,
    },
    "other": {
        "sizes": ("1b", "13b", "7b"),  # the last is the target of the rest
        "size": "7b",
        "context": 1024,
        "contexts": (4096, 16384),
        "batches": (8, 32, 4, 16),
        "new_tokens": 256,
    },
}


def _asked(default: Any, told: str) -> Any:
    return field(default=default, metadata={"help": told})


@dataclass(frozen=True)
class Options:
    """What is measured. Zeros and empty tuples stand for what suits the device (`PRESETS`)."""

    out: Path
    minutes: float = _asked(9.0, "start nothing when this time will not do; 9 suit a slot of 10")
    parts: tuple[str, ...] = _asked(PARTS, f"of {', '.join(PARTS)}")
    methods: tuple[str, ...] = _asked(tuple(METHODS), f"of {', '.join(METHODS)}")
    sizes: tuple[str, ...] = _asked((), f"targets of plain decoding, of {', '.join(SIZES)}")
    size: str = _asked("", "target of all other parts")
    context: int = _asked(0, "tokens of the prompt")
    contexts: tuple[int, ...] = _asked((), "other lengths of it, with two methods")
    batches: tuple[int, ...] = _asked((), "rows at once, with two methods")
    new_tokens: int = _asked(0, "tokens that are generated")
    repeats: int = _asked(5, "timed runs of each, in turn")
    num_threads: int = _asked(0, "programs that are compiled at once")

    def for_device(self) -> "Options":
        """With what suits the device where nothing was asked for.

        Raises:
            SpecjaxError: for an unknown part, method or size, or a number that is none.
        """
        preset = PRESETS["cpu" if jax.default_backend() == "cpu" else "other"]
        chosen = {name: getattr(self, name) or value for name, value in preset.items()}
        at_once = self.num_threads or max(1, min(4, (os.cpu_count() or 1) // 4))
        whole = replace(self, **chosen, num_threads=at_once)
        for told, names, known in (("part", self.parts, PARTS), ("method", self.methods, METHODS)):
            for name in names:
                if name not in known:
                    raise SpecjaxError(f"{told} {name!r} is unknown; choose of {', '.join(known)}")
        for size in (*whole.sizes, whole.size):
            check_size(size)
        if SIZES[whole.size].is_tied:
            raise SpecjaxError(f"size {whole.size!r} has no LM head of its own; it is for --sizes")
        for name in ("context", "contexts", "batches", "new_tokens", "repeats", "num_threads"):
            value = getattr(whole, name)
            least = 2 if name.startswith("context") else 1
            if min(value if isinstance(value, tuple) else (value,)) < least:
                raise SpecjaxError(f"{name} {value} must be at least {least}")
        if not (math.isfinite(self.minutes) and self.minutes >= 0):
            raise SpecjaxError(f"minutes {self.minutes} is no time; give a number from 0 on")
        return whole

    def groups(self) -> list[Group]:
        """What is to be measured, the most wanted first."""
        return plan(
            self.parts,
            self.sizes,
            self.size,
            self.methods,
            self.context,
            self.contexts,
            self.batches,
            self.num_threads,
        )


def report(options: Options) -> None:
    """Measures what is missing in the folder, as far as there is time, and says where it stands.

    Raises:
        SpecjaxError: before any work, for options that cannot be; at the end, if something failed.
    """
    if find_spec("matplotlib") is None:
        raise SpecjaxError("drawing needs matplotlib; run `pip install matplotlib`")
    budget, options = Budget(options.minutes), options.for_device()
    record = Record(expand_user(options.out), _about(options), options.groups())
    record.open()
    longest = max((options.context, *options.contexts)) + options.new_tokens
    bench = Bench(options.new_tokens, options.repeats, options.num_threads, longest)
    for group in record.missing():
        if not budget.allows(group.part):
            budget.say(f"left out: {group.title}")
            continue
        budget.say(group.title)
        left = budget.left
        record.add(bench.measure(group, lambda: budget.left > 0))
        budget.spent(group.part, left - budget.left)
    budget.say(f"{len(record.rows)} rows, tables and figure are in {record.folder}")
    if failed := [row for row in record.rows if "failed" in row and not row["is_memory"]]:
        raise SpecjaxError(
            f"{len(failed)} measurements failed, the first for {failed[0]['failed']!r}; all are "
            f"told in {record.folder / 'gpu.md'}"
        )


def _about(options: Options) -> dict[str, Any]:
    """What the figures depend on."""
    device = jax.devices()[0]
    return {
        "command": shlex.join(["python", "-m", "specjax.bench.gpu", *sys.argv[1:]]),
        "device": device.device_kind,
        "platform": device.platform,
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in LIBRARIES},
        "new_tokens": options.new_tokens,
        "repeats": options.repeats,
    }


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"


def parse(arguments: Sequence[str]) -> Options:
    """The options of a command line; ends the process, as argparse does, for one that has none.

    Not tyro, which reads the other scripts' options: a borrowed machine may lack it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m specjax.bench.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    for each in fields(Options)[1:]:
        many = isinstance(each.default, tuple)
        kind = int if each.name in ("contexts", "batches") else str if many else type(each.default)
        parser.add_argument(
            f"--{each.name.replace('_', '-')}",
            type=kind,
            nargs="+" if many else None,
            default=each.default,
            help=each.metadata["help"],
        )
    values: dict[str, Any] = vars(parser.parse_args(arguments))
    for name, value in values.items():
        values[name] = tuple(value) if isinstance(value, list) else value
    return Options(**values)
