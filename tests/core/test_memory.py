"""Memory is estimated up front, and a shortage is reported with figures and advice."""

from types import SimpleNamespace
from unittest.mock import create_autospec

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Lowered

from specjax.core import memory
from specjax.core.errors import SpecjaxError
from specjax.core.memory import check_fits, check_program, device_bytes, explain_out_of_memory

HALF = {"weights": 5_000_000, "cache": 20_000_000}


@pytest.fixture
def machine(monkeypatch):
    """Sets the free bytes of the machine."""
    return lambda free: monkeypatch.setattr(memory, "_host_bytes", lambda: free)


def test_one_byte_too_little_is_reported_with_figures(machine):
    machine(25_000_000)
    check_fits("it", HALF)
    machine(24_999_999)
    message = r"it needs at least 0\.025 GB \(weights 0\.005, cache 0\.02\), and cpu has 0\.025 GB"
    with pytest.raises(
        SpecjaxError, match=rf"{message} for it; use a smaller dtype, quantize int8"
    ):
        check_fits("it", HALF)
    with pytest.raises(SpecjaxError, match=r"for it; buy more$"):
        check_fits("it", HALF, advice="buy more")


def test_arrays_that_exist_count_on_both_sides(machine):
    held = jnp.zeros(1_250_000)
    machine(20_000_000)
    check_fits("it", HALF, held)
    machine(19_000_000)
    with pytest.raises(SpecjaxError, match=r"has 0\.024 GB"):
        check_fits("it", HALF, held)
    jax.eval_shape(lambda traced: check_fits("it", HALF, traced), held)  # traced: unknown devices


def test_each_of_several_accelerators_needs_enough_memory(monkeypatch):
    stats = {"bytes_limit": 5 * 10**9, "bytes_in_use": 2 * 10**9}
    gpu = SimpleNamespace(
        platform="gpu", device_kind="Tesla T4", process_index=0, memory_stats=lambda: stats
    )
    monkeypatch.setattr(memory, "_devices_of", lambda leaves: [gpu] * 8)
    split = SimpleNamespace(shard_shape=lambda shape: (shape[0] // 8, *shape[1:]))
    held = SimpleNamespace(shape=(8, 2 * 10**9), dtype=jnp.dtype("int8"), sharding=split)
    found = {"temp": 3 * 10**9, "output": 10**9, "alias": 10**9}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in found.items()})
    lowered = create_autospec(Lowered, instance=True)
    lowered.compile().memory_analysis.return_value = analysis
    check_program("it", lowered, held)
    analysis.temp_size_in_bytes += 1
    with pytest.raises(SpecjaxError, match=r"workspace 3\) on each of 8 devices, .* has 5 GB"):
        check_program("it", lowered, held)
    check_fits("it", {"weights": 3 * 10**9}, devices=[gpu] * 8)
    with pytest.raises(SpecjaxError, match="on each of 8 devices"):
        check_fits("it", {"weights": 3 * 10**9 + 1}, devices=[gpu] * 8)
    with pytest.raises(SpecjaxError, match=r"4 GB .* Tesla T4 has 3 GB .*MEM_FRACTION=0\.95"):
        check_fits("it", {"weights": 4 * 10**9}, devices=[gpu])
    gpu.memory_stats = lambda: None  # unknown
    check_fits("it", {"weights": 4 * 10**9}, devices=[gpu])


def test_a_container_may_have_less_than_its_machine(tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9000 kB\nMemAvailable:   5000 kB\nSwapFree: 1000 kB\n")
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory._host_bytes() == 6000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._host_bytes() == 6000 * 1024
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.stat").write_text("anon 96000\nfile 4000000\n")
    assert memory._host_bytes() == 4_000_000
    meminfo.unlink()
    (tmp_path / "memory.max").unlink()
    assert memory._host_bytes() > 10**9  # all that the machine has


def test_int4_takes_half_a_byte_where_it_is_packed():
    codes = jnp.zeros((4, 6), jnp.int4)
    assert (device_bytes(codes), device_bytes(codes, halves_int4=False)) == (12, 24)


def test_exhausted_memory_is_one_line():
    with (
        pytest.raises(SpecjaxError, match="this does not fit in memory; use a smaller dtype"),
        explain_out_of_memory(),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explain_out_of_memory():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
