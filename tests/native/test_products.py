import ctypes
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.slow  # compiles with g++

BUILD = Path(__file__).parents[2] / "native" / "build.py"
DTYPES = ["bfloat16", "float16", "float32"]
SHAPES = [(1, 1), (16, 2), (35, 31), (64, 96)]  # outputs and inputs
GROUP = 32


def builder():
    spec = importlib.util.spec_from_file_location("native_build", BUILD)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def instructions(tmp_path_factory) -> list[str]:
    build = builder()
    if build.compiler() is None:
        pytest.skip("no C++ compiler")
    file = tmp_path_factory.mktemp("native") / "products.so"
    build.build(file)
    library = ctypes.cdll.LoadLibrary(str(file))
    library.specjax_instructions.restype = ctypes.c_char_p
    jax.ffi.register_ffi_target(
        "specjax_product", jax.ffi.pycapsule(library.specjax_product), platform="cpu"
    )
    return library.specjax_instructions().decode().split(",")


def product(rows, panels, scales, number):
    outputs = jax.ShapeDtypeStruct((rows.shape[0], panels.shape[0] * 16), jnp.float32)
    call = jax.ffi.ffi_call("specjax_product", outputs)
    return call(rows, panels, scales, instructions=np.int32(number))


def packed(weight):
    """Packs a weight [O, I] into panels of 16 outputs whose inputs stand in pairs."""
    outputs, inputs = weight.shape
    weight = jnp.pad(weight, ((0, -outputs % 16), (0, -inputs % 2)))
    pairs = weight.reshape(-1, 16, -(-inputs // 2), 2)
    is_paired = weight.dtype.itemsize == 2
    return pairs.transpose(0, 2, 1, 3) if is_paired else pairs.transpose(0, 2, 3, 1)


def packed_int4(codes):
    even, odd = jnp.moveaxis(packed(codes.astype(jnp.int8)).view(jnp.uint8), 2, 0)
    return (even & 15) | (odd << 4)


def no_scales():
    return jnp.zeros((0, 0, 0), jnp.float32)


def drawn(seed, shape, dtype):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_a_row_has_the_same_bits_among_any_others(
    instructions, dtype, shape
):
    outputs, inputs = shape
    weight, rows = drawn(0, shape, dtype), drawn(1, (40, inputs), dtype)
    exact = np.asarray(rows, np.float64) @ np.asarray(weight, np.float64).T
    for number in range(len(instructions)):
        whole = product(rows, packed(weight), no_scales(), number)
        np.testing.assert_allclose(whole[:, :outputs], exact, rtol=1e-4, atol=1e-4)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17):
            part = product(rows[-count:], packed(weight), no_scales(), number)
            np.testing.assert_array_equal(part, whole[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_products_scale_each_group_and_rows_keep_their_bits(instructions, kind, dtype):
    limit, group = (127, 96) if kind == "int8" else (7, GROUP)
    codes = jax.random.randint(jax.random.key(2), (48, 96), -limit - 1, limit + 1, jnp.int8)
    scale = jnp.abs(drawn(3, (48, 96 // group), "float32"))
    scales = scale.reshape(3, 16, -1).transpose(0, 2, 1)
    panels = packed(codes) if kind == "int8" else packed_int4(codes)
    rows = drawn(4, (12, 96), dtype)
    weight = np.asarray(codes, np.float64) * np.repeat(np.asarray(scale), group, axis=1)
    for number in range(len(instructions)):
        whole = product(rows, panels, scales, number)
        exact = np.asarray(rows, np.float64) @ weight.T
        np.testing.assert_allclose(whole, exact, rtol=1e-4, atol=1e-2)
        for count in (1, 3, 5, 9):
            part = product(rows[-count:], panels, scales, number)
            np.testing.assert_array_equal(part, whole[-count:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_reach_their_outputs_and_no_others(instructions, dtype):
    weight = drawn(5, (16, 8), dtype).at[3, 2].set(jnp.inf).at[5, 1].set(jnp.nan)
    rows = jnp.ones((2, 8), dtype)
    for number in range(len(instructions)):
        sums = np.asarray(product(rows, packed(weight), no_scales(), number))
        assert np.isposinf(sums[:, 3]).all() and np.isnan(sums[:, 5]).all()
        assert np.isfinite(np.delete(sums, (3, 5), axis=1)).all()


def test_no_rows_give_no_sums(instructions):
    weight = drawn(6, (16, 8), "float32")
    assert product(jnp.zeros((0, 8)), packed(weight), no_scales(), 0).shape == (0, 16)


@pytest.mark.parametrize(
    "rows, panels",
    [
        (jnp.zeros((2, 8)), jnp.zeros((1, 8, 2, 16))),  # twice the inputs
        (jnp.zeros((2, 8)), jnp.zeros((1, 4, 16, 2))),  # not packed as float32 is
        (jnp.zeros((2, 8)), jnp.zeros((1, 4, 2, 16), jnp.int8)),  # without scales
        (jnp.zeros((2, 8), jnp.int32), jnp.zeros((1, 4, 2, 16))),
    ],
)
def test_operands_that_do_not_fit_are_an_error(instructions, rows, panels):
    with pytest.raises(jax.errors.JaxRuntimeError, match="specjax:"):
        product(rows, panels, no_scales(), 0).block_until_ready()
    with pytest.raises(jax.errors.JaxRuntimeError, match="instruction set"):
        weight = packed(drawn(7, (16, 8), "float32"))
        product(jnp.zeros((2, 8)), weight, no_scales(), len(instructions)).block_until_ready()
