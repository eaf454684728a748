"""Estimates memory use up front, and raises a readable error if it will not fit."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.stages import Lowered

from specjax.core.errors import SpecjaxError

OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory")  # in errors of devices, and of the CPU
ADVICE = "use a smaller dtype, quantize int8 or int4, draft fewer tokens, or give less text at once"
GPU_ADVICE = ", or give JAX more of the GPU (XLA_PYTHON_CLIENT_MEM_FRACTION=0.95; it takes 0.75)"
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def device_bytes(tree: Any, halves_int4: bool = True) -> int:
    """Returns the bytes of all leaves, arrays or shapes, that one device holds.

    With `halves_int4` an int4 takes half a byte; in XLA's arrays on a CPU it takes a whole one.
    """

    def bytes_of(leaf: Any) -> int:
        leaf = leaf if hasattr(leaf, "shape") else np.asarray(leaf)
        sharding = getattr(leaf, "sharding", None)
        size = prod(leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))
        return size // 2 if halves_int4 and leaf.dtype == jnp.int4 else size * leaf.dtype.itemsize

    return sum(map(bytes_of, jax.tree.leaves(tree)))


def check_fits(
    what: str,
    needs: Mapping[str, int],
    held: Any = (),
    advice: str = ADVICE,
    devices: Iterable[Any] | None = None,
) -> None:
    """Raises SpecjaxError, with figures, if `what` needs more memory than a device has.

    `needs` are bytes of each device, by purpose; `held` are arrays among them that exist already,
    and nothing is checked while they are traced. `devices` are by default those of `held`.
    """
    leaves = jax.tree.leaves(held)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return
    devices = _devices_of(leaves) if devices is None else _of_this_process(devices)
    if devices[0].platform == "cpu":
        available = _host_bytes() // len(devices)
    else:
        available = min(map(_free_bytes, devices))
    available += device_bytes(held)
    if (total := sum(needs.values())) <= available:
        return
    parts = ", ".join(f"{name} {_gigabytes(count)}" for name, count in needs.items())
    more = GPU_ADVICE if devices[0].platform == "gpu" else ""
    where = f" on each of {len(devices)} devices" if len(devices) > 1 else ""
    raise SpecjaxError(
        f"{what} needs at least {_gigabytes(total)} GB ({parts}){where}, and "
        f"{devices[0].device_kind} has {_gigabytes(available)} GB for it; {advice}{more}"
    )


def check_program(what: str, lowered: Lowered, held: Any, advice: str = ADVICE) -> None:
    """Compiles a program and raises SpecjaxError if it needs more memory than is available.

    `held` are its arguments. A later call of the jitted function with them does not compile again.
    """
    analysis = lowered.compile().memory_analysis()
    if analysis is not None:  # experimental backends give None
        work = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        work = max(work - analysis.alias_size_in_bytes, 0)
        check_fits(what, {"arguments": device_bytes(held), "workspace": work}, held, advice)


@contextmanager
def explain_out_of_memory(what: str = "this", advice: str = ADVICE) -> Iterator[None]:
    """Turns XLA's out-of-memory errors into SpecjaxError, in one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not any(sign in str(error) for sign in OUT_OF_MEMORY):
            raise
        more = GPU_ADVICE if jax.default_backend() == "gpu" else ""
        raise SpecjaxError(f"{what} does not fit in memory; {advice}{more}") from error


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.3g}" if count < 1e10 else f"{count / 1e9:,.0f}"


def _devices_of(leaves: list[Any]) -> list[Any]:
    placed = [leaf for leaf in leaves if isinstance(leaf, jax.Array)] or [jnp.zeros(())]
    return _of_this_process(max((leaf.sharding.device_set for leaf in placed), key=len))


def _of_this_process(devices: Iterable[Any]) -> list[Any]:
    return [device for device in devices if device.process_index == jax.process_index()]


def _free_bytes(device: Any) -> int:
    """Returns the free bytes of an accelerator; if it has no limit, more than any has."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", 2**60) - stats.get("bytes_in_use", 0)


def _host_bytes() -> int:
    """Returns the free bytes of the machine, or of its container."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError, ValueError):  # Linux
        values = _table(MEMINFO)
        free = 1024 * (values["MemAvailable:"] + values["SwapFree:"])
    with suppress(OSError, KeyError, ValueError):  # a container with a limit
        limit = int((CGROUP / "memory.max").read_text())
        free = min(free, limit - _table(CGROUP / "memory.stat")["anon"])
    return free


def _table(file: Path) -> dict[str, int]:
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(value) for name, value, *_ in lines}
