"""Settings for every test, in the environment so that the processes a test starts have them too.

One device: a test of sharding runs in a separate process with
`XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

import gc
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

if "jax" in sys.modules:
    raise pytest.UsageError("jax was imported before tests/conftest.py could configure it.")

CACHE = Path(__file__).resolve().parent.parent / ".pytest_cache" / "jax"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("SPECJAX_TEST_CACHE", str(CACHE))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # a quarter of lowering
# Compiling takes most of the time of a test; LLVM's optimisations are half of it, and of the rest
# the newer emitters of fused loops are half; splitting the code for many threads costs, too.
# Products run in libraries that none of it touches. An unknown flag ends the process, so all but
# the first are set for the versions that are known to have them.
FLAGS = ["--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("PYTHONUNBUFFERED", None)  # numpy writes files to a pipe only if it is set
# Some environments forbid compiled modules; then each process that a test starts compiles them all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["XDG_CACHE_HOME"] = str(CACHE.parent / "user")  # what the user has tuned plays no part


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a tiny random target with a real tokenizer."""
    from tests.cli.target import write_target  # imports jax, which is configured above

    write_target(folder := tmp_path_factory.mktemp("targets") / "tiny")
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


def pytest_collection_finish():
    """Leaves modules out of garbage collection, which tracing makes run often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


MAPS = Path("/proc/self/maps")
MAX_MAPS = 40_000
STATM = Path("/proc/self/statm")
MAX_RESIDENT = 3 << 30  # bytes; two processes run tests
counted_at = 0.0  # CPU seconds of this process


@pytest.fixture(autouse=True)
def _release_programs():
    """Lets go of compiled programs before they fill memory, or reach what Linux allows one process.

    Each takes some hundred memory maps; at 65530 the next compilation ends in a segmentation fault.
    Counting them takes long once they are many, and compiling that many takes longer.
    """
    global counted_at
    yield
    if time.process_time() < counted_at + 2:
        return
    counted_at = time.process_time()
    if not MAPS.exists():
        return
    resident = int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if resident > MAX_RESIDENT or MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
