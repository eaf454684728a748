"""Native code under sanitizers, in threads, after a fork and with a planted fault."""

import importlib.util
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.models.native import instruction_sets, is_available, packed, packed_product

pytestmark = pytest.mark.skipif(not is_available(), reason="no native kernels here")
ARM, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
SOURCES = Path(__file__).parents[2] / "native"
RUN = """
import sys
from pathlib import Path
import pytest
class Library:
    def pytest_sessionstart(self):
        from specjax.models import native
        native.LIBRARY = Path(sys.argv[1])
arguments = ["-q", "-n0", "-p", "no:cacheprovider", *sys.argv[2:]]
sys.exit(pytest.main(arguments, plugins=[Library()]))
"""
FILES = ("tests/native/test_products.py", "tests/native/test_layers.py")


def built(folder: Path, *flags: str, sources: Path = SOURCES) -> Path:
    library = folder / "kernels.bin"
    command = [sys.executable, str(sources / "build.py"), str(library), "-O0", *flags]
    subprocess.run(command, check=True, capture_output=True)
    return library


def run_tests(library: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", RUN, str(library), *arguments]
    root, environment = SOURCES.parent, os.environ | variables
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="its sanitizers are used")
def test_the_kernels_pass_their_tests_under_sanitizers(tmp_path):
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
    library = built(tmp_path, *flags)
    runtimes = [  # the second, since the first wraps the exceptions of JAX
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    preloaded = " ".join(runtime.stdout.strip() for runtime in runtimes)
    options = "detect_leaks=0:malloc_context_size=0"  # the calls before each of JAX's allocations
    tests = (*FILES, "-m", "", "-k", "not odd_shapes")  # slow ones too, but what mostly compiles
    done = run_tests(library, *tests, LD_PRELOAD=preloaded, ASAN_OPTIONS=options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="it compiles them")
def test_kernels_that_clang_optimises_pass_their_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "clang++")
    tests = "products_are_right or quantised or codes"
    done = run_tests(built(tmp_path, "-O3"), FILES[0], "-k", tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.skipif("Avx512Bf16" not in instruction_sets(), reason="its vectors are used")
def test_kernels_of_amx_pass_their_tests_with_its_instructions_in_plain_code(tmp_path):
    library = built(tmp_path, "-O1", "-include", str(Path(__file__).with_name("matrices.h")))
    done = run_tests(library, *FILES, "-m", "not slow", "-k", "bfloat16")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.skipif(not (QEMU and ARM), reason="needs qemu-user and g++-aarch64-linux-gnu")
def test_kernels_of_neon_multiply_as_they_should(tmp_path):
    program = tmp_path / "products"
    flags = ["-O2", "-std=c++17", "-ffp-contract=fast", "-static", "-DINSTRUCTIONS=Neon"]
    source = Path(__file__).with_name("products.cc")
    subprocess.run([str(ARM), *flags, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(QEMU), str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_compiler_that_does_not_know_the_instructions_is_passed_over(tmp_path, monkeypatch):
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", f"{sys.executable} -c pass")
    spec = importlib.util.spec_from_file_location("native_build", SOURCES / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    assert build.compiler() == [sys.executable, "-c", "pass"]
    monkeypatch.delenv("CXX")
    assert build.compiler() != ["g++"]


@pytest.mark.slow
def test_a_kernel_that_sums_three_rows_in_another_order_fails_the_tests(tmp_path):
    sources = Path(shutil.copytree(SOURCES, tmp_path / "native"))
    code = (sources / "products.h").read_text()
    start = "  for (int64_t i = from; i < to; i += R::kStep) {\n"
    assert code.count(start) == 1
    planted = "  for (int64_t n = from; n < to; n += R::kStep) {\n"
    planted += "    const int64_t i = M == 4 ? from + to - R::kStep - n : n;\n"
    (sources / "products.h").write_text(code.replace(start, planted))
    library = built(tmp_path, sources=sources)
    done = run_tests(library, "tests/native/test_products.py", "-k", "products_are_right")
    assert done.returncode == 1 and "AssertionError" in done.stdout, done.stdout[-3000:]


def test_two_programs_multiply_at_once():
    generator = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(generator.normal(size=shape), jnp.float32)  # noqa: E731
    weights = [packed(draw(96, 64)), packed(draw(640, 128))]
    inputs = [draw(3, 64), draw(5, 128)]
    product = jax.jit(packed_product)
    expected = [np.asarray(product(*pair)) for pair in zip(inputs, weights, strict=True)]
    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(product, inputs[n % 2], weights[n % 2]) for n in range(200)]
    for number, job in enumerate(jobs):
        np.testing.assert_array_equal(job.result(), expected[number % 2])


def test_a_forked_process_gets_an_error():
    code = """
import os
from specjax.core.errors import SpecjaxError
from specjax.models import native
assert native.is_available()
if os.fork() == 0:
    try:
        native.instructions()
    except SpecjaxError as error:
        os._exit(0 if "spawn" in str(error) else 1)
    os._exit(2)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCES.parent).returncode == 0


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 128),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 50),
    kind=st.sampled_from(["float32", "bfloat16", "float16"]),
    seed=st.integers(0, 99),
)
def test_products_of_any_shape(rows, inputs, outputs, kind, seed):
    generator = np.random.default_rng(seed)
    weight = jnp.asarray(generator.normal(size=(outputs, inputs)), kind)
    x = jnp.asarray(generator.normal(size=(rows, inputs)), kind)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    sums = np.asarray(packed_product(x, packed(weight)))
    np.testing.assert_allclose(sums, expected, rtol=0, atol=2e-4)
    if rows:
        alone = packed_product(x[-1:], packed(weight))
        np.testing.assert_array_equal(sums[-1:], alone)
