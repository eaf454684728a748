"""The versions of JAX that specjax allows, and the error in the one that it excludes."""

import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from packaging.requirements import Requirement

WRONG = "0.10.2"  # on a CPU it miscomputes rows beyond 32,768 of a product that is summed
ROOT = Path(__file__).parents[1]


@pytest.mark.xfail(jaxlib.__version__ == WRONG, reason=f"jaxlib {WRONG}", strict=False)
def test_every_row_of_a_summed_product_is_right():
    rows = np.arange(3 * 40_000, dtype=np.float32).reshape(-1, 3) % 7
    matrix = np.eye(3, dtype=np.float32)
    sums = jax.jit(jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2)))(rows)
    np.testing.assert_array_equal(sums, (rows**2).sum(axis=1))


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_the_wrong_version_is_excluded(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (text,) = (each for each in project["dependencies"] if Requirement(each).name == name)
    assert WRONG not in Requirement(text).specifier
    if name == "jaxlib":  # whose headers the kernels are compiled with
        assert f'"{text}"' in (ROOT / "hatch_build.py").read_text()


def test_the_workflow_tries_the_oldest_version_that_is_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github" / "workflows" / "check.yml").read_text()
    oldest = workflow.partition("jax==")[2].split()[0]
    for text in project["dependencies"]:
        if (requirement := Requirement(text)).name in ("jax", "jaxlib"):
            assert f">={oldest}" in str(requirement.specifier)
            assert f"{requirement.name}=={oldest}" in workflow
