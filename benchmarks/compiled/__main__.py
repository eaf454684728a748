"""Compiles requests for GPUs and TPUs without having one: python -m benchmarks.compiled

Nothing runs, so nothing is noisy: of each program this tables the bytes that a round reads, copies
of the KV cache, kernels, the times that the host has to decide, and temporary memory. Needs wheels
only: `pip install libtpu` for TPUs, `pip install jax-cuda12-plugin[with-cuda]` for GPUs. Rows are
kept in compiled.json and the tables in compiled.md, where `git diff` shows what has changed.

Two depths are compiled and costs taken as linear in the layers; `--layers 32` compiles the whole
model. With several devices figures are those of one of them; --mesh sets how they share the work.
The method train-hass is a training step over --batch-size texts of --prompt-length tokens, with the
target's weights split over data too.
"""

import sys
import traceback
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import jax

from benchmarks.compiled.devices import DEVICES, Device
from benchmarks.compiled.measure import METHODS, NONE, TRAINING, Case, Row, at_depth, measure
from benchmarks.compiled.tables import key, markdown
from benchmarks.harness import SIZES, at_least_1, check_known, main
from specjax import SpecjaxError
from specjax.core.errors import check_whole
from specjax.core.files import read_json
from specjax.core.folder import RunFolder
from specjax.core.provenance import machine, revision, versions
from specjax.models import quantize

KINDS = (NONE, *quantize.KINDS)


@dataclass(frozen=True)
class CompiledOptions:
    """The options of this benchmark."""

    out: Path = Path("docs/results")  # folder of compiled.json and compiled.md
    devices: tuple[str, ...] = tuple(DEVICES)  # to compile for
    sizes: tuple[str, ...] = ("8b", "7b")  # of the target, of the shapes of benchmarks.harness
    methods: tuple[str, ...] = METHODS  # drafting methods
    temperatures: tuple[float, ...] = (0.0, 0.8)  # 0 is greedy
    quantize: tuple[str, ...] = (NONE,)  # of int8, int4
    layers: tuple[int, ...] = (2, 3)  # one or two depths to compile
    prompt_length: tuple[int, ...] = (1024,)  # tokens of the prompt
    max_new_tokens: int = 256  # new tokens
    batch_size: int = 1  # texts at a time
    mesh: str = "data=1,model=8"  # of several devices
    padded_width: int = 0  # rows that every verifying pass is filled up to; 0: no filling
    missing: bool = False  # skip rows that are in compiled.json

    def check(self) -> None:
        """Raises SpecjaxError for unknown names or sizes that make no request."""
        check_known("device", self.devices, DEVICES)
        check_known("size", self.sizes, SIZES)
        check_known("method", self.methods, (*METHODS, TRAINING))
        check_known("quantize", self.quantize, KINDS)
        at_least_1(self, "max_new_tokens", "batch_size")
        check_whole("padded_width", self.padded_width, 0)
        check_whole("prompt_length", min(self.prompt_length), 2)
        depths = set(self.layers)
        if len(self.layers) not in (1, 2) or len(depths) < len(self.layers) or min(depths) < 1:
            raise SpecjaxError(f"layers {self.layers} must be one or two different depths")


def run(options: CompiledOptions) -> None:
    """Compiles every selected program, and writes each row once it is known."""
    options.check()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # programs from it leave no dump
    path, source = options.out / "compiled.json", revision()
    done = {key(row) for row in _rows_in(path)} if options.missing else set()
    failed = 0
    for name in options.devices:
        device = DEVICES[name]
        try:
            on = device.find()
        except Exception as error:  # whatever a plugin raises that is not there
            reason = str(error).strip().splitlines() or [type(error).__name__]
            print(f"{name}: left out, no wheels for it ({reason[0]})", file=sys.stderr)
            continue
        for size, kind, temperature, method, prompt in product(
            options.sizes,
            options.quantize,
            options.temperatures,
            options.methods,
            options.prompt_length,
        ):
            mesh = options.mesh if len(on) > 1 else ""
            is_training = method == TRAINING
            if is_training and temperature != options.temperatures[0]:
                continue  # it has none
            new = 0 if is_training else options.max_new_tokens
            request = size, kind, temperature, method, prompt, new, options.batch_size
            case = Case(name, *request, mesh, 0 if is_training else options.padded_width)
            if key(case._asdict() | _depths(case, options)) in done:
                continue
            print(" ".join(map(str, case)), file=sys.stderr, flush=True)
            try:
                row = _row(case, options, device, on) | {"revision": source}
            except Exception:
                traceback.print_exc()
                failed += 1
                continue
            _keep(path, row)
    if path.exists():
        print(markdown(_rows_in(path)))
    if failed:
        raise SpecjaxError(f"{failed} programs failed; see above")


def _depths(case: Case, options: CompiledOptions) -> Row:
    """Returns the depth of the model, and those to compile."""
    depths = sorted(options.layers)
    return {
        "layers": SIZES[case.size].num_hidden_layers if len(depths) == 2 else depths[0],
        "compiled": depths,
    }


def _row(case: Case, options: CompiledOptions, device: Device, on: list[Any]) -> Row:
    """Compiles each depth and returns the row of the whole model."""
    rows, about = [], _depths(case, options)
    for depth in about["compiled"]:
        rows.append(measure(case, device, on, depth))
        jax.clear_caches()
    found = at_depth(rows, about["compiled"], about["layers"])
    return case._asdict() | about | {"versions": versions()["jax"], "machine": machine()} | found


def _rows_in(path: Path) -> list[Row]:
    return read_json(path)["rows"] if path.exists() else []


def _keep(path: Path, row: Row) -> None:
    """Puts a row in place of the one of the same request, and writes the tables anew."""
    rows = [each for each in _rows_in(path) if key(each) != key(row)] + [row]
    order = [*DEVICES, *SIZES, *KINDS, *METHODS, TRAINING]
    rows.sort(
        key=lambda each: (
            *(order.index(each[name]) for name in ("device", "size", "quantize")),
            each["padded_width"],
            each["temperature"],
            each["method"] == TRAINING,
            (len(each["compiled"]), each["compiled"]),
            order.index(each["method"]),
            *(each["prompt"], each["new"], each["batch"], each["mesh"]),
        )
    )
    folder = RunFolder(path.parent)
    folder.write_json(path.name, {"rows": rows})
    folder.write(path.with_suffix(".md").name, f"{markdown(rows)}\n")


if __name__ == "__main__":
    main(run, CompiledOptions, __doc__)
