"""Branches of the compiled loop that change large arrays, such as a KV cache, without copying them.

On CPU XLA copies whatever a branch changes, into the branch and out of it; a loop that runs once or
never changes it in place. But XLA also moves what a loop does not change in front of it, where it
is computed even if the loop never runs: the first products of a pass, or a whole search. That may
be `given`, and as well any part of `carry` that the branch returns as it was. So both are made to
look different in each turn; only weights, which branches read directly, are not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

Branch = Callable[[Any, Any], Any]  # from `given` and `carry` to the next `carry`


def switch_in_place(
    index: Int[Array, ""], branches: Sequence[Branch], given: Any, carry: Any
) -> Any:
    """As `lax.switch(index, branches, given, carry)`; arrays of `carry` are changed in place."""

    def as_loops(index, given, carry):
        for number, branch in enumerate(branches):
            carry = _at_most_once(index == number, branch, given, carry)
        return carry

    as_switch = lambda index, *operands: lax.switch(index, branches, *operands)  # noqa: E731
    return lax.platform_dependent(index, given, carry, cpu=as_loops, default=as_switch)


def if_in_place(condition: Bool[Array, ""], branch: Branch, given: Any, carry: Any) -> Any:
    """`branch(given, carry)` if the condition holds, else `carry`, in the same way."""

    def as_loop(condition, given, carry):
        return _at_most_once(condition, branch, given, carry)

    def as_cond(condition, given, carry):
        return lax.cond(condition, branch, lambda given, carry: carry, given, carry)

    return lax.platform_dependent(condition, given, carry, cpu=as_loop, default=as_cond)


def _at_most_once(condition: Bool[Array, ""], branch: Branch, given: Any, carry: Any) -> Any:
    def turn(step, carry):
        seen, carry, _ = lax.optimization_barrier((given, carry, step))
        return branch(seen, carry)

    return lax.fori_loop(0, condition.astype(jnp.int32), turn, carry)
