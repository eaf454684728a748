"""Interrupts long commands at random: python -m benchmarks.faults WORK [--full-disk]

WORK is train, distill, bench, reproduce or tune, on pocket. The same command starts over and over,
and is killed with SIGKILL after a random part of the time that a whole run takes, until a start
comes to its end. With `--full-disk` each start instead finds a disk with random room, a tmpfs
(mounting it needs root); one that fills it must exit with code 2 and no traceback. Then the folder
must hold what one run without a fault leaves: the same weights to the bit and a line of metrics per
step, the same tokens of every method and one timed run of each, or the same settings. Then the next
folder begins.
"""

import os
import random
import subprocess
import time
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tyro.conf import Positional

from benchmarks.harness import at_least_1, check_known, main, table
from specjax import SpecjaxError, cli
from specjax.core.errors import throttled
from specjax.core.folder import RunFolder

CHATS = "chats.jsonl"  # within the folder of all runs, as are the questions of `reproduce`
QUESTIONS = "questions"
SETTINGS = "tuned.json"  # within the folder of a run that tunes
TRAIN = f"""train eagle --resume --data {CHATS} --num-steps 24 --save-every 1 --log-every 1
 --eval-every 24 --eval-prompts 2 --eval-tokens 4 --batch-size 2 --longest 96"""
BENCH = f"bench --methods pld --tasks {CHATS} --limit 4 --runs 12 --max-new-tokens 16"
DISTILL = f"{TRAIN} --distill --limit 12 --distill-tokens 24 --distill-batch 4"
REPRODUCE = "reproduce pld-plus-table-7 --target pocket --limit 1 --runs 1 --max-new-tokens 16"
TUNE = "tune induction-heads --limit 1 --max-new-tokens 32"
WORKS = {
    "train": TRAIN.split(),
    "distill": DISTILL.split(),
    "bench": BENCH.split(),
    "reproduce": [*REPRODUCE.split(), "--data", QUESTIONS],
    "tune": TUNE.split(),
}
WORDS = "total value best for in return count max if while".split()
IMPORTS = ("specjax.cli.train_heads", "specjax.bench.run", "transformers", "orbax.checkpoint")
TIMES = ("tokens_per_second", "seconds")  # of the metrics; the rest must be equal
SHOWN = 3  # lines about lost checkpoints
PAGE = 4096  # bytes
PLENTY = 2**30  # bytes
MOST_ROOM = 1.5  # times a whole run's bytes: old checkpoints go when the next one is complete


@dataclass(frozen=True)
class FaultOptions:
    """The options of this benchmark."""

    work: Positional[str]  # one of WORKS
    faults: int = 50  # kills, or starts that fill the disk
    full_disk: bool = False
    seed: int = 0  # seed of the moments or sizes


@dataclass
class Log:
    """The outcome of the faults."""

    whole_seconds: float
    faults: int = 0
    finished: int = 0  # folders
    different: list[Path] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # lines about checkpoints that were skipped


def inject(options: FaultOptions) -> None:
    """Runs, and prints a table."""
    at_least_1(options, "faults")
    check_known("work", [options.work], WORKS)
    for name in IMPORTS:  # once, for all the processes
        import_module(name)
    draw, note = random.Random(options.seed), throttled()
    with TemporaryDirectory() as place:
        folders = Path(place)
        _write_inputs(folders)
        start = partial(_start, options.work, folders)
        start(folders / "compiling")  # fills XLA's cache, if there is one
        started = time.perf_counter()
        start(folders / "whole")
        log = Log(time.perf_counter() - started)
        expected = contents(options.work, folders / "whole")
        num_bytes = _num_bytes(folders / "whole")
        try:
            while log.faults < options.faults:
                disk, is_cut = folders / f"disk{log.finished}", True
                folder = disk / "run" if options.full_disk else folders / f"{log.finished}"
                while is_cut:
                    share = draw.random() if log.faults < options.faults else None
                    seconds = None
                    if options.full_disk:
                        _mount(disk, num_bytes, share)
                    elif share is not None:
                        seconds = share * log.whole_seconds
                    is_cut, lines = start(folder, seconds, options.full_disk)
                    log.faults += is_cut
                    log.messages += lines
                    note(f"{log.faults} of {options.faults} faults")
                log.finished += 1
                if contents(options.work, folder) != expected:
                    log.different.append(folder)
        finally:
            for disk in filter(Path.is_mount, folders.iterdir()):
                subprocess.run(["umount", "--lazy", disk], check=True)
            print(report(log))
    if log.different:
        raise SpecjaxError(f"{len(log.different)} folders differ from that of a whole run")


def _write_inputs(folder: Path) -> None:
    draw, lengths = random.Random(0), {"prompt": 3, "response": 12}
    chats = [
        {name: " ".join(draw.choices(WORDS, k=length)) for name, length in lengths.items()}
        for _ in range(60)
    ]
    RunFolder(folder).write_records(CHATS, chats)
    question = {"category": "summarization", "turns": [" ".join(WORDS)]}
    RunFolder(folder / QUESTIONS).write_records("spec_bench.jsonl", [question])


def _mount(disk: Path, num_bytes: int, share: float | None) -> None:
    """Gives a disk room for a share of a whole run's bytes, or plenty."""
    is_mounted = disk.exists()
    used = _num_bytes(disk) if is_mounted else PAGE  # that of "taken": size 0 sets no limit
    free = PLENTY if share is None else int(share * MOST_ROOM * num_bytes)
    option = f"size={used + free // PAGE * PAGE}"
    disk.mkdir(exist_ok=True)
    option = f"remount,{option}" if is_mounted else option
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", disk], check=True)
    (disk / "taken").write_bytes(bytes(PAGE))


def _num_bytes(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(-(-path.stat().st_size // PAGE) * PAGE for path in files)


def _start(
    work: str, place: Path, folder: Path, limit: float | None = None, may_fill: bool = False
) -> tuple[bool, list[str]]:
    """Starts the work, in the place of its inputs, and kills it after `limit` seconds.

    Returns whether it was killed or its disk was full, and its messages about checkpoints.
    """
    log = place / "log.txt"
    process = get_context("fork").Process(target=_work, args=(work, place, folder, log))
    process.start()
    process.join(limit)
    is_cut = process.is_alive()
    process.kill()
    process.join()
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    if not is_cut and process.exitcode:
        is_cut = may_fill and process.exitcode == 2 and "No space left" in text
        if not is_cut or "Traceback" in text:
            raise SpecjaxError(f"{work} in {folder} failed: {text[-2000:]}")
    return is_cut, [line for line in text.splitlines() if "corrupt" in line]


def _work(work: str, place: Path, folder: Path, log: Path) -> None:
    os.chdir(place)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    out = folder / SETTINGS if work == "tune" else folder
    os._exit(cli.main([*WORKS[work], "--out", str(out)]))


def contents(work: str, folder: Path) -> Any:
    """Returns the results that must not depend on kills."""
    if work == "tune":
        return (folder / SETTINGS).read_text()
    if work in ("train", "distill"):
        weights = sha256((folder / "head" / "model.safetensors").read_bytes()).hexdigest()
        answers = folder / "distilled.jsonl"
        text = answers.read_text() if work == "distill" else ""
        return weights, text, list(RunFolder(folder).records("metrics.jsonl", _untimed))
    return [_trials(file) for file in sorted(folder.rglob("samples.jsonl"))]


def _trials(file: Path) -> dict[tuple[int, int], dict[str, list[list[int]]]]:
    trials = {}
    for turn in RunFolder(file.parent).records(file.name):
        place = turn["number"], turn["repeat"]
        if place in trials:
            raise SpecjaxError(f"{file}: turn {place} was measured twice")
        trials[place] = {
            run["method"]: [text["tokens"] for text in run["texts"]] for run in turn["runs"]
        }
    return trials


def _untimed(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in line if name not in TIMES}


def report(log: Log) -> str:
    """Returns a table of the outcome."""
    rows = [
        ("seconds of a whole run", f"{log.whole_seconds:.0f}"),
        ("faults", log.faults),
        ("folders that came to their end", log.finished),
        ("of these unlike a whole run's", len(log.different)),
        ("checkpoints skipped as corrupt, with a line", len(log.messages)),
        *(("", line) for line in log.messages[:SHOWN]),
    ]
    return table(("", "result"), rows)


if __name__ == "__main__":
    main(inject, FaultOptions, __doc__)
