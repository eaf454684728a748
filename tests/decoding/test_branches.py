"""A branch that is not taken computes nothing: not from what it reads, nor from what it keeps."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from specjax.decoding.widths import if_in_place, switch_in_place

MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loops_around(program: str, operation: str) -> list[int]:
    """Within how many loops the operation stands, at each of its places in a compiled program."""
    parts = re.findall(r"^(ENTRY )?%([\w.-]+) \((.*?)^\}", program, re.MULTILINE | re.DOTALL)
    bodies = {name: body for _, name, body in parts}
    [entry] = [name for is_entry, name, _ in parts if is_entry]

    def within(name: str, depth: int) -> list[int]:
        found = [depth] * bodies[name].count(f" {operation}(")
        for role, called in re.findall(r"(body|calls|to_apply)=%([\w.-]+)", bodies[name]):
            found += within(called, depth + (role == "body"))
        return found

    return within(entry, 0)


def one_of_two(condition, branch, given, carry):
    branches = (lambda given, carry: carry, branch)
    return switch_in_place(condition.astype(jnp.int32), branches, given, carry)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere XLA has branches for this")
@pytest.mark.parametrize("in_place", [if_in_place, one_of_two])
def test_no_product_is_moved_in_front_of_its_branch(in_place):
    weights = jnp.ones(MATRIX.shape)

    def branch(given, carry):
        kept, sums = carry  # the second product is of what the branch leaves as it was
        return kept, sums + jnp.dot(given, weights) + jnp.dot(kept, weights)

    def rounds(conditions, given, carry):
        def one(carry, condition):
            return in_place(condition, branch, given, carry), None

        return lax.scan(one, carry, conditions)[0]

    conditions = jax.ShapeDtypeStruct((9,), bool)
    program = jax.jit(rounds).lower(conditions, MATRIX, (MATRIX, MATRIX)).compile().as_text()
    assert program is not None
    assert loops_around(program, "dot") == [2, 2], "that of the rounds, and that of the branch"
