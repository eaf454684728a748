"""Devices that programs are compiled for without having them: data-sheet figures and topologies."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies


class Device(NamedTuple):
    """A device, or several; its figures are those of one, and `find` asks XLA for all of them."""

    name: str
    dtype: str
    bytes_per_second: float  # of its main memory; 0: not known
    find: Callable[[], list[Any]]  # raises where the wheels are not installed
    clock: float = 0.0  # cycles per second of XLA's estimates; 0: there are none
    memory: float = 0.0  # bytes
    flops: float = 0.0  # of dense 16-bit products, per second
    is_cuda: bool = False


class Gpu(NamedTuple):
    """The data sheet of an NVIDIA GPU."""

    name: str
    capability: tuple[int, int]
    cores: int
    bytes_per_second: int
    memory: int
    l2_cache: int
    clock_ghz: float
    shared_memory: int  # of a multiprocessor
    max_shared_memory: int  # of a block that asks for more
    threads: int  # of a multiprocessor
    lanes: int  # float32 units of a multiprocessor
    flops: float  # of dense 16-bit products, per second

    def target_config(self) -> str:
        """Returns XLA's `GpuTargetConfigProto` as text."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory} threads_per_core_limit: {self.threads}
  core_count: {self.cores} fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bytes_per_second} l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz} device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.max_shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_vendor: "NVIDIA Corporation" platform_version: "compute capability {major}.{minor}"
  device_address_bits: 64 ecc_enabled: true name: "{self.name}"
  driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.8.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
device_description_str: "{self.name}"
"""

    def find(self, count: int) -> list[Any]:
        """Returns `count` of them on one host; this machine must not have such devices."""
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            target_config=self.target_config(),
            topology=f"1x1x{count}",
        )
        return topology.devices


def _tpu(topology: str, count: int) -> list[Any]:
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }.items():
        os.environ.setdefault(name, value)
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return description.devices[:count]


def _gpu(dtype: str, gpu: Gpu, count: int = 1) -> Device:
    name = gpu.name if count == 1 else f"{count} x {gpu.name}"
    find = partial(gpu.find, count)
    return Device(name, dtype, gpu.bytes_per_second, find, 0.0, gpu.memory, gpu.flops, True)


H100 = Gpu(
    name="NVIDIA H100 80GB HBM3",
    capability=(9, 0),
    cores=132,
    bytes_per_second=3_352_320_000_000,
    memory=79 * 2**30,
    l2_cache=50 * 2**20,
    clock_ghz=1.98,
    shared_memory=228 * 2**10,
    max_shared_memory=227 * 2**10,
    threads=2048,
    lanes=128,
    flops=989e12,
)
A100 = Gpu(
    name="NVIDIA A100-SXM4-40GB",
    capability=(8, 0),
    cores=108,
    bytes_per_second=1_555_200_000_000,
    memory=39 * 2**30,
    l2_cache=40 * 2**20,
    clock_ghz=1.41,
    shared_memory=164 * 2**10,
    max_shared_memory=163 * 2**10,
    threads=2048,
    lanes=64,
    flops=312e12,
)
T4 = Gpu(
    name="Tesla T4",
    capability=(7, 5),
    cores=40,
    bytes_per_second=320_064_000_000,
    memory=15 * 2**30,
    l2_cache=4 * 2**20,
    clock_ghz=1.59,
    shared_memory=64 * 2**10,
    max_shared_memory=64 * 2**10,
    threads=1024,
    lanes=64,
    flops=65e12,
)
V5E = 819e9, 1.5e9, 16 * 2**30, 197e12  # bandwidth, clock, memory and products of a TPU
V6E = 1640e9, 1.75e9, 32 * 2**30, 918e12


def _tpus(name: str, topology: str, count: int, sheet: tuple[float, float, float, float]) -> Device:
    return Device(name, "bfloat16", sheet[0], partial(_tpu, topology, count), *sheet[1:])


DEVICES = {
    "h100": _gpu("bfloat16", H100),
    "a100": _gpu("bfloat16", A100),
    "t4": _gpu("float16", T4),
    "v5e": _tpus("TPU v5e", "v5e:2x2", 1, V5E),
    "v6e": _tpus("TPU v6e", "v6e:2x2", 1, V6E),
    "h100x8": _gpu("bfloat16", H100, 8),
    "v5e-8": _tpus("TPU v5e-8", "v5e:2x4", 8, V5E),
    "v6e-8": _tpus("TPU v6e-8", "v6e:2x4", 8, V6E),
    "cpu": Device("this CPU", "bfloat16", 0.0, lambda: jax.devices("cpu")[:1]),
}
