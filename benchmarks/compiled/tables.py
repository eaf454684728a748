"""The tables of compiled programs, and what changed since they were last written."""

from collections.abc import Sequence
from itertools import groupby

from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.measure import NONE, Row
from benchmarks.harness import table

HEADER = (
    "method",
    "rows",
    "draft GB",
    "pass GB",
    "x floor",
    "x floor by XLA",
    "cache copies",
    "kernels: draft",
    "pass",
    "host syncs",
    "temporary MB",
    "held GB",
    "trace s",
    "compile s",
)
NOTES = """# Programs compiled without the device

Written by `python -m benchmarks.compiled`; nothing ran. Per round at batch 1: the gigabytes that
drafting and commit read, and those of the widest target pass, over its floor (all weights but the
embedding, and the KV cache). *By XLA*: the seconds of XLA's own estimate over those that the floor
takes at the data sheet's bandwidth. *Cache copies*: whole KV caches that are written anew. *Host
syncs*: loops and conditionals of the program that the host decides. *Rows*: nodes of each compiled
pass. *Held*: all that the program keeps in memory, weights included.
"""
SLACK = {"trace_s": 0.25, "compile_s": 0.25}  # of seconds, which are noisy; of all others:
EXACT = 0.005


def markdown(rows: Sequence[Row]) -> str:
    """Returns one table for each device, size and temperature."""
    parts = [NOTES]
    for place, group in groupby(
        rows,
        lambda row: (
            row["device"],
            row["size"],
            row.get("quantize", NONE),
            row["temperature"],
            tuple(row["compiled"]),
        ),
    ):
        own = list(group)
        device, size, kind, temperature, depths = place
        first = own[0]
        weights = "" if kind == NONE else f", {kind}"
        how = "greedy" if not temperature else f"temperature {temperature:g}, top-p"
        depth = f"from programs of {' and '.join(map(str, depths))} layers, whose seconds are shown"
        depth = depth if len(depths) == 2 else "compiled whole"
        parts.append(
            f"## {DEVICES[device].name}, {size}{weights}, {how}\n\n"
            f"{first['layers']} layers, {depth}; prompt {first['prompt']} + {first['new']}; floor "
            f"of a pass {first['floor'] / 1e9:.1f} GB.\n\n{table(HEADER, list(map(_cells, own)))}\n"
        )
    return "\n".join(parts)


def _cells(row: Row) -> list[str]:
    by_xla = f"{row['pass_s'] / row['floor_s']:.2f}" if "pass_s" in row else "-"
    syncs = "-" if row["host_syncs"] is None else str(row["host_syncs"])
    return [
        row["method"],
        " ".join(map(str, row["widths"])),
        f"{row['draft_read'] / 1e9:.2f}",
        f"{row['pass_read'] / 1e9:.2f}",
        f"{row['pass_read'] / row['floor']:.2f}",
        by_xla,
        f"{row['cache_copies']:.2f}",
        f"{row['draft_kernels']:.0f}",
        f"{row['pass_kernels']:.0f}",
        syncs,
        f"{row['temporary'] / 1e6:.0f}",
        f"{row['held'] / 1e9:.1f}" if "held" in row else "-",
        f"{row['trace_s']:.1f}",
        f"{row['compile_s']:.1f}",
    ]


def changes(before: Sequence[Row], row: Row) -> list[str]:
    """Returns a line for each figure that is not as in the row before, if there was one."""
    lines = []
    for old in before:
        for name, value in row.items():
            if isinstance(value, str) or old.get(name) in (value, None) or value is None:
                continue
            if isinstance(value, list) or not isinstance(value, int | float):
                lines.append(f"  {name}: {old[name]} -> {value}")
            elif abs(value - old[name]) > SLACK.get(name, EXACT) * abs(old[name]):
                lines.append(f"  {name}: {old[name]:.6g} -> {value:.6g}")
    return lines
