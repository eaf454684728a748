import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models import native
from specjax.models.products import lookup
from specjax.models.quantize import QuantizedWeight, quantize

pytestmark = pytest.mark.skipif(
    not native.is_available(), reason="specjax has no native kernels here"
)
DTYPES = ["bfloat16", "float16", "float32"]
SHAPES = [(1, 1), (35, 31), (64, 96)]  # outputs and inputs
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17)  # rows
GROUP = 32
NUM_SETS = len(native.instruction_sets())


def product(rows, weight, number):
    """Multiplies by a packed weight, or by such operands, with one instruction set."""
    operands = native.operands(weight) if hasattr(weight, "panels") else weight
    outputs = jax.ShapeDtypeStruct((rows.shape[0], operands[0].shape[0] * 16), jnp.float32)
    call = jax.ffi.ffi_call("specjax_product", outputs)
    return call(rows, np.int32(len(rows)), *operands, instructions=np.int32(number))


def drawn(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_products(rows, weight, exact, atol, rtol=1e-4):
    """With every instruction set, and that a row has the same bits among any others."""

    @jax.jit
    def products(rows, weight):
        return [
            [product(rows[-count:], weight, number) for count in (len(rows), *COUNTS)]
            for number in range(NUM_SETS)
        ]

    for whole, *parts in products(rows, weight):
        error = np.abs(np.asarray(whole[:, : exact.shape[1]], np.float64) - exact)
        assert (error <= atol + rtol * np.abs(exact)).all()
        for count, part in zip(COUNTS, parts, strict=True):
            np.testing.assert_array_equal(part, whole[-count:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_a_row_has_the_same_bits_among_any_others(dtype, shape):
    weight, rows = drawn(0, shape, dtype), drawn(1, (70, shape[1]), dtype)
    exact = np.asarray(rows, np.float64) @ np.asarray(weight, np.float64).T
    assert_products(rows, native.packed(weight), exact, 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_products_scale_each_group_and_rows_keep_their_bits(kind, dtype):
    limit, group = (127, 96) if kind == "int8" else (7, GROUP)
    codes = np.random.default_rng(2).integers(-limit - 1, limit + 1, (48, 96))
    scale = jnp.abs(drawn(3, (48, 96 // group), dtype))
    weight = native.packed(QuantizedWeight(jnp.asarray(codes, kind), scale))
    rows = drawn(4, (70, 96), dtype)
    exact = np.repeat(np.asarray(scale, np.float64), group, axis=1) * codes
    is_rounded = dtype != "float32" and "Portable" in native.instruction_sets()  # x86-64
    left = rounded(rows) if is_rounded else np.asarray(rows, np.float64)
    assert_products(rows, weight, left @ exact.T, 1e-2)


def rounded(rows):
    """Rounds each 32 inputs to whole numbers of 16 bits, times a power of two."""
    blocks = np.asarray(rows, np.float64).reshape(len(rows), -1, 32)
    tops = np.abs(blocks).max(axis=2, keepdims=True)
    steps = 2.0 ** (np.floor(np.log2(tops)) - 14)
    return (np.round(blocks / steps) * steps).reshape(rows.shape)


@pytest.mark.parametrize(
    ("kind", "groups"), [("int8", 1), ("int8", 3), ("int8", 9), ("int4", 3), ("int4", 9)]
)
def test_codes_multiply_numbers_of_bfloat16_exactly(kind, groups):
    """In blocks of 32 inputs and groups of 8, 24 or all 72, whatever the size of their numbers."""
    draws = np.random.default_rng(11)
    codes = jnp.asarray(draws.integers(-8, 8, (35, 72)), kind)
    scale = jnp.asarray(2.0 ** draws.integers(-2, 3, (35, groups)), "bfloat16")
    weight = QuantizedWeight(codes, scale)
    rows = draws.choice([-1, 1], (20, 72)) * draws.uniform(1, 100, (20, 72))
    rows *= np.repeat(2.0 ** draws.integers(-60, 60, (20, 3)), (32, 32, 8), axis=1)
    rows[7] = 0
    rows = jnp.asarray(rows, "bfloat16")
    right = np.repeat(np.asarray(scale, np.float64), 72 // groups, axis=1) * np.asarray(codes)
    left = np.asarray(rows, np.float64)
    slack = 1e-6 * np.abs(left) @ np.abs(right).T
    assert_products(rows, native.packed(weight), left @ right.T, slack, rtol=0)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_nan_and_infinity_of_a_row_stay_in_it(kind):
    weight = native.packed(quantize(drawn(12, (48, 64), "bfloat16"), kind, jnp.bfloat16))
    rows = drawn(13, (5, 64), "bfloat16")
    broken = rows.at[1, 40].set(jnp.nan).at[3, 0].set(jnp.inf)
    for number in range(NUM_SETS):
        sums, expected = product(broken, weight, number), product(rows, weight, number)
        assert not np.isfinite(sums[jnp.array([1, 3])]).any()
        kept = jnp.array([0, 2, 4])
        np.testing.assert_array_equal(sums[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_reach_their_outputs_and_no_others(dtype):
    weight = np.array(drawn(5, (16, 8), "float32"))
    weight[3, 2], weight[5, 1] = np.inf, np.nan
    weight, rows = native.packed(jnp.asarray(weight, dtype)), jnp.ones((2, 8), dtype)
    for number in range(NUM_SETS):
        sums = np.asarray(product(rows, weight, number))
        assert np.isposinf(sums[:, 3]).all() and np.isnan(sums[:, 5]).all()
        assert np.isfinite(np.delete(sums, (3, 5), axis=1)).all()


def test_every_finite_float16_is_read_exactly_as_a_weight_and_as_a_scale():
    numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16)  # denormals too
    column, codes = jnp.asarray(numbers)[:, None], jnp.ones((numbers.size, 2), jnp.int8)
    row = jnp.array([[1, 0]], jnp.float16)
    for weight in (column, QuantizedWeight(codes, column)):
        for number in range(NUM_SETS):
            sums = product(row[:, : weight.shape[1]], native.packed(weight), number)
            np.testing.assert_array_equal(sums[0, : numbers.size], numbers)


def test_products_of_nothing_are_empty_or_an_error():
    weight = native.packed(drawn(6, (16, 8), "float32"))
    assert product(jnp.zeros((0, 8)), weight, 0).shape == (0, 16)
    with pytest.raises(jax.errors.JaxRuntimeError, match="specjax: scales"):
        operands = jnp.zeros((1, 0, 16, 2), jnp.int8), jnp.ones((1, 1, 16))
        product(jnp.zeros((2, 0)), operands, 0)


@pytest.mark.parametrize(
    "rows, operands",
    [
        (jnp.zeros((2, 8)), [jnp.zeros((1, 8, 2, 16))]),  # twice the inputs
        (jnp.zeros((2, 8)), [jnp.zeros((1, 4, 16, 2))]),  # not packed as float32 is
        (jnp.zeros((2, 8)), [jnp.zeros((1, 4, 16, 2), jnp.int8)]),  # without scales
        (jnp.zeros((2, 8)), [jnp.zeros((1, 4, 16, 2), jnp.bfloat16)]),  # of another type
        (jnp.zeros((2, 8), jnp.int32), [jnp.zeros((1, 4, 2, 16))]),
        (jnp.zeros((2, 8)), [jnp.zeros((1, 1, 16), jnp.uint32), jnp.zeros((1, 3, 16))]),
    ],
)
def test_operands_that_do_not_fit_are_an_error(rows, operands):
    with pytest.raises(jax.errors.JaxRuntimeError, match="specjax:"):
        product(rows, operands, 0).block_until_ready()


def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="instruction set"):
        product(jnp.zeros((2, 8)), [jnp.zeros((1, 4, 2, 16))], NUM_SETS).block_until_ready()


@pytest.mark.parametrize("name", ["0", "Avx3"])
def test_an_unknown_name_of_the_instruction_set_is_an_error_after_loading_too(monkeypatch, name):
    monkeypatch.setenv(native.SWITCH, name)
    with pytest.raises(SpecjaxError, match=f"{native.SWITCH}={name} is not one of"):
        native.packed_product(jnp.zeros((2, 8)), native.packed(jnp.zeros((16, 8))))


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_unpacking_gives_the_weight_back(kind):
    weight = drawn(8, (35, 64), "bfloat16")
    weight = weight if kind is None else quantize(weight, kind, jnp.bfloat16)
    packed_weight = native.packed(weight)
    assert (packed_weight.shape, packed_weight.dtype) == (weight.shape, weight.dtype)
    chex.assert_trees_all_equal(native.unpack_params({"weight": packed_weight})["weight"], weight)
    of_rows = jax.jit(lambda weight: lookup(weight, jnp.array([34, 0, 17, -1, 35])))
    chex.assert_trees_all_equal(of_rows(packed_weight), of_rows(weight))


def test_a_packed_weight_has_no_gradients():
    weight, rows = native.packed(drawn(9, (16, 8), "float32")), drawn(10, (2, 8), "float32")
    with pytest.raises(SpecjaxError, match="packed=False"):
        jax.grad(lambda rows: native.packed_product(rows, weight).sum())(rows)
