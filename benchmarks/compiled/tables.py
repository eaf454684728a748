"""The tables of compiled programs."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.measure import NONE, Case, Row
from benchmarks.harness import table

NOTES = """# Programs compiled without the device

These figures come from compiled programs; nothing ran. Each table names its command. A floor is
the least a pass can read: all weights except the embedding, and the KV cache.

Per round:

- *draft* and *pass GB*: bytes read by drafting and commit, and by the widest target pass.
- *x floor*: the bytes of that pass over the floor. *By XLA*: the seconds of XLA's own estimate,
  over the floor at the bandwidth in the data sheet.
- *cache copies*: whole KV caches that are copied.
- *host syncs*: loops and conditionals that the host decides.
- *tokens*: the width of each compiled pass.
- *held*: memory that the program holds, weights included, *of* the memory of the device.
- *collectives* and the bytes they *moved* (the size of their results). With several devices, all
  figures are those of one device.

Per training step:

- *TFLOP*: the fewest operations the step needs, without attention. *Least s*: their time at the
  data sheet's rate for dense 16-bit products.
- On TPUs, the memory of a training step is not linear in the number of layers. Programs of 2 and
  3 layers overestimate it by 5 to 6 GB, so those of the 70B are compiled whole.
"""
ROUND = {
    "method": "{method}",
    "prompt": "{prompt}",
    "tokens": "{widths}",
    "draft GB": "{draft_read:.2f}",
    "pass GB": "{pass_read:.2f}",
    "floor GB": "{floor:.2f}",
    "x floor": "{x_floor:.2f}",
    "x floor by XLA": "{pass_x:.2f}",
    "cache copies": "{cache_copies:.2f}",
    "kernels: draft": "{draft_kernels:.0f}",
    "pass": "{pass_kernels:.0f}",
    "host syncs": "{host_syncs}",
    "collectives: draft": "{draft_collectives:.0f}",
    " pass": "{pass_collectives:.0f}",
    "moved MB": "{moved:.1f}",
}
STEP = {
    "method": "{method}",
    "tokens": "{batch} x {prompt}",
    "read GB": "{step_read:.0f}",
    "TFLOP": "{floor:.1f}",
    "least s": "{floor_s:.3f}",
    "x least by XLA": "{step_x:.2f}",
    "kernels": "{step_kernels:.0f}",
    "collectives": "{step_collectives:.0f}",
    "moved GB": "{step_moved:.2f}",
}
MEMORY = {
    "temporary MB": "{temporary:.0f}",
    "held GB": "{held:.1f}",
    "of GB": "{memory:.0f}",
}
GIGA = ("draft_read", "pass_read", "step_read", "held", "step_moved")


def key(row: Row) -> tuple:
    """Returns the key of a row, which is unique."""
    return tuple(json.dumps(row[name]) for name in (*Case._fields, "layers", "compiled"))


def markdown(rows: Sequence[Row]) -> str:
    """Returns the page: a table for all requests that differ in method or prompt alone."""
    sources = sorted({f"revision {row['revision']} with JAX {row['versions']}" for row in rows})
    parts = [NOTES, f"Compiled from {' and '.join(sources)}.\n"]
    shared = [name for name in (*Case._fields, "compiled") if name not in ("method", "prompt")]
    for _, group in groupby(rows, itemgetter(*shared)):
        table_rows = list(group)
        first, depths = table_rows[0], table_rows[0]["compiled"]
        kind, mesh = first["quantize"], first["mesh"]
        how = f"temperature {first['temperature']:g}, top-p" if first["temperature"] else "greedy"
        titles = [DEVICES[first["device"]].name, first["size"]]
        titles += [kind] if kind != NONE else []
        titles += [how if first["new"] else "training"]
        depth = f"from programs of {' and '.join(map(str, depths))} layers"
        lines = [f"{first['layers']} layers, {depth if len(depths) == 2 else 'compiled whole'}"]
        lines += [f"{first['new']} new tokens"] if first["new"] else []
        lines += [f"mesh {mesh}"] if mesh else []
        width = first["padded_width"]
        lines += [f"passes padded to {width} tokens"] if width else []
        about = f"{'; '.join(lines)}. `{_command(table_rows)}`"
        parts.append(f"## {', '.join(titles)}\n\n{about}\n\n{_table(table_rows)}\n")
    return "\n".join(parts)


def _command(rows: Sequence[Row]) -> str:
    """Returns the command that compiles the programs of a table."""
    first = rows[0]
    values = {
        "devices": [first["device"]],
        "sizes": [first["size"]],
        "methods": dict.fromkeys(row["method"] for row in rows),
        "temperatures": [first["temperature"]],
        "quantize": [first["quantize"]],
        "layers": first["compiled"],
        "prompt-length": dict.fromkeys(row["prompt"] for row in rows),
        "max-new-tokens": [first["new"]] if first["new"] else [],
        "batch-size": [first["batch"]],
        "mesh": [first["mesh"]] if first["mesh"] else [],
        "padded-width": [first["padded_width"]] if first["padded_width"] else [],
    }
    words = [f"--{name} {' '.join(map(str, each))}" for name, each in values.items() if each]
    return " ".join(["python -m benchmarks.compiled", *words])


def _table(rows: Sequence[Row]) -> str:
    """Lists rows in those columns that any of them has."""
    columns = (ROUND if rows[0]["new"] else STEP) | MEMORY
    cells = [list(map(partial(_cell, row), columns.values())) for row in rows]
    kept = [at for at in range(len(columns)) if any(row[at] != "-" for row in cells)]
    header = [name.strip() for name in columns]
    return table([header[at] for at in kept], [[row[at] for at in kept] for row in cells])


def _cell(row: Row, form: str) -> str:
    """Writes one figure; not every row has it."""
    values = {name: value for name, value in row.items() if value is not None}
    if "widths" in row:
        values["widths"] = " ".join(map(str, row["widths"]))
        values["x_floor"] = row["pass_read"] / row["floor"]
    if row["mesh"]:
        values["moved"] = (row.get("draft_moved", 0) + row.get("pass_moved", 0)) / 1e6
    else:
        values = {name: value for name, value in values.items() if "collectives" not in name}
    for part in ("pass", "step"):
        if f"{part}_s" in row:
            values[f"{part}_x"] = row[f"{part}_s"] / row["floor_s"]
    scale = 1e9 if row["new"] else 1e12
    values |= {name: values[name] / 1e9 for name in GIGA if name in values}
    values["floor"] = row["floor"] / scale
    values["temporary"] = row["temporary"] / 1e6
    if memory := DEVICES[row["device"]].memory:
        values["memory"] = memory / 1e9
    try:
        return form.format(**values)
    except KeyError:
        return "-"
