"""Compares ways to compute attention, compiled without a device: python -m benchmarks.attention

Of one layer with the heads of an 8B shape: temporary memory, bytes read and kernels of attention at
once, in blocks of slots, and by cuDNN where there is one. Needs the wheels that
`benchmarks.compiled` needs. Loops are counted with all of their turns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks.compiled.devices import DEVICES
from benchmarks.compiled.measure import UNTUNED
from benchmarks.compiled.program import Cost, Program
from benchmarks.harness import SIZES, at_least_1, main, option, table
from specjax.core.errors import SpecjaxError
from specjax.models.attention import KEY_BLOCK, attend, attend_to_blocks

HEADER = ("attention", "temporary MB", "read MB", "kernels", "M cycles by XLA")


@dataclass(frozen=True)
class AttentionOptions:
    """The options of this benchmark."""

    device: str = option(f"of {', '.join(DEVICES)}", "h100")
    rows: int = option("rows of the pass", 128)
    slots: int = option("slots of the cache", 32768)


def at_once(query, keys, values, visible):
    """Attention with scores of all slots."""
    return attend(query, keys, values, visible)[0]


def in_blocks(query, keys, values, visible):
    """Attention as prefill of long texts computes it; all slots are read."""
    slots = jnp.asarray(keys.shape[2])
    return attend_to_blocks(query, keys, values, visible, slots)


def by_cudnn(query, keys, values, visible):
    """JAX's fused attention."""
    given = (each.swapaxes(1, 2) for each in (query, keys, values))
    fused = partial(jax.nn.dot_product_attention, implementation="cudnn")
    return fused(*given, mask=visible[:, None]).swapaxes(1, 2)


def run(options: AttentionOptions) -> None:
    """Compiles each and prints the table."""
    at_least_1(options, "rows", "slots")
    if options.device not in DEVICES:
        raise SpecjaxError(f"device {options.device!r} is unknown; choose of {', '.join(DEVICES)}")
    jax.config.update("jax_platforms", "cpu")
    device, config = DEVICES[options.device], SIZES["8b"].config(1)
    on = SingleDeviceSharding(device.find()[0])
    floats = partial(jax.ShapeDtypeStruct, dtype=device.dtype, sharding=on)
    stored = floats((1, config.num_key_value_heads, options.slots, config.head_dim))
    query = floats((1, config.num_attention_heads, options.rows, config.head_dim))
    visible = jax.ShapeDtypeStruct((1, options.rows, options.slots), bool, sharding=on)
    ways: dict[str, Callable[..., Any]] = {"at once": at_once}
    ways |= {"in blocks": in_blocks} if options.slots > KEY_BLOCK else {}
    ways |= (
        {"by cuDNN": by_cudnn} if device.is_cuda and device.dtype == "bfloat16" else {}
    )  # since Ampere
    rows = []
    for name, way in ways.items():
        lowered = jax.jit(way).lower(query, stored, stored, visible)
        compiled = lowered.compile(UNTUNED if device.is_cuda else {})
        text, memory, whole = compiled.as_text(), compiled.memory_analysis(), Cost()
        assert text is not None and memory is not None
        program = Program(text)
        for cost in program.costs(program.entry, ()).values():
            whole.add(cost)
        figures = memory.temp_size_in_bytes / 1e6, whole.read / 1e6, whole.kernels
        rows.append([name, *(f"{each:.0f}" for each in figures), f"{whole.cycles / 1e6:.2f}"])
    print(table(HEADER, rows))


if __name__ == "__main__":
    main(run, AttentionOptions, __doc__)
