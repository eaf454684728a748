"""The dtype that a model gets by default, and products in 16 bits."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import precision
from specjax.models.config import TransformerConfig
from specjax.models.native import is_available
from specjax.models.precision import cache_dtype, cheap_rows, default_dtype
from specjax.models.products import project

LARGE = 10**8


@pytest.mark.parametrize(
    "platform, capability, faster, num_params, wanted",
    [
        ("cpu", None, True, LARGE, "bfloat16"),
        ("cpu", None, False, LARGE, "float32"),
        ("cpu", None, True, 4_000_000, "float32"),
        ("gpu", "7.5", False, LARGE, "float16"),
        ("gpu", "8.0", False, LARGE, "bfloat16"),
        ("gpu", None, False, LARGE, "bfloat16"),
        ("gpu", "gfx942", False, LARGE, "bfloat16"),
        ("tpu", None, False, LARGE, "bfloat16"),
    ],
)
def test_the_default_dtype(monkeypatch, platform, capability, faster, num_params, wanted):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    device = SimpleNamespace(compute_capability=capability) if capability else SimpleNamespace()
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(precision, "_bfloat16_is_faster", lambda: faster)
    assert default_dtype(num_params, is_packed=False) == wanted
    assert cache_dtype(has_native_layers=True) is None
    assert cache_dtype(has_native_layers=False) == (jnp.float32 if platform == "cpu" else None)


def test_the_products_decide_on_a_cpu():
    assert default_dtype(LARGE, is_packed=True) == "bfloat16"
    assert default_dtype(LARGE, is_packed=False) in ("float32", "bfloat16")  # as timed


@pytest.mark.skipif(not is_available(), reason="XLA's products are not timed")
@pytest.mark.parametrize(
    "seconds, layers, rows",
    [((1, 1.1, 1.15), 30, 8), ((1, 1.1, 1.5), 30, 4), ((1, 1.5, 2.5), 30, 2), ((1, 1, 1), 1, 4)],
)
def test_a_pass_is_as_wide_as_it_is_cheap(monkeypatch, seconds, layers, rows):
    monkeypatch.setattr(precision, "_seconds_of", lambda calls: seconds)
    monkeypatch.setattr(precision, "_timed_rows", precision._timed_rows.__wrapped__)
    assert cheap_rows(TransformerConfig(49152, 576, 1536, layers, 9, 3, 64)) == rows


@pytest.mark.skipif(not is_available(), reason="XLA's products are not timed")
@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_products_of_this_machine_can_be_timed_while_a_program_is_traced(kind):
    config = TransformerConfig(49152, 576, 1536, 30, 9, 3, 64)
    precision._timed_rows.cache_clear()
    assert jax.eval_shape(lambda: jnp.zeros(cheap_rows(config, kind))).shape in ((2,), (4,), (8,))


@pytest.mark.parametrize(
    "dtype, rows", [(jnp.float32, (2, 3)), (jnp.bfloat16, (1,)), (jnp.float16, (9,))]
)
def test_a_product_and_its_slopes_are_those_of_float32(dtype, rows):
    x, weight, pull = (
        jax.random.normal(jax.random.key(number), shape)
        for number, shape in enumerate([(*rows, 48), (32, 48), (*rows, 32)])
    )
    narrow = x.astype(dtype), weight.astype(dtype)
    wide = tuple(each.astype(jnp.float32) for each in narrow)
    with jax.default_matmul_precision("highest"):  # a GPU would round to TF32
        wanted, wanted_slopes = jax.vjp(lambda x, w: x @ w.T, *wide)
    found, slopes = jax.vjp(lambda x, w: project(x, w, jnp.float32), *narrow)
    rtol, atol = (1e-5, 1e-4) if dtype == jnp.float32 else (0.02, 0.1)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)
    for slope, other in zip(slopes(pull), wanted_slopes(pull), strict=True):
        assert slope.dtype == dtype
        np.testing.assert_allclose(slope.astype(jnp.float32), other, rtol, atol)
