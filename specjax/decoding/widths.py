"""The widths of a target pass that are compiled, and the switch between them.

A pass costs by its rows, so a round runs the narrowest compiled pass that holds its draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter, Probe, Proposal
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.decoding.verify import verify
from specjax.models.cache import KVCache
from specjax.models.target import ModelOutput, QueryRows, Taps, Target

# For drafters whose drafts vary in length, by bits of the weights: those of at most half the nodes.
# In 16 bits only the widest of them, since 8 rows cost little more than one.
DEFAULT_WIDTHS = {32: (1, 8, 24, 64), 16: (1, 8)}

Branch = Callable[[Any, Any], Any]  # from `given` and `carry` to the next `carry`


def compiled_widths(drafter: Drafter, dtype: DTypeLike, padded_width: int = 0) -> list[int]:
    """Returns how many nodes each compiled pass holds, in ascending order.

    `dtype` is that of the target's weights, and `padded_width` its setting.
    """
    widths = () if padded_width else drafter.pass_widths
    if widths is None:
        bits = jnp.finfo(dtype).bits
        widths = [width for width in DEFAULT_WIDTHS[bits] if 2 * width <= drafter.num_nodes]
        widths = widths[-1:] if bits == 16 else widths
    return [*(width for width in widths if width < drafter.num_nodes), drafter.num_nodes]


def verify_pass(
    target: Target,
    drafter: Drafter,
    params: Any,
    cache: KVCache,
    proposal: Proposal,
    draw: Draw,
    min_width: Int[Array, ""] | int = 1,
) -> tuple[ModelOutput, Verification, KVCache]:
    """Verifies a proposal in one target pass, as narrow as the draft and `min_width` allow.

    Everything that grows with the rows happens at the chosen width; only what the drafter taps is
    padded back to all N rows. Attention is read at the deepest accepted node only.
    """
    num_nodes, dtype = proposal.tree.num_nodes, target.dtype(params)
    given = proposal, cache.length

    def at_width(width: int, given: tuple[Proposal, Int[Array, " B"]], cache: KVCache):
        with jax.named_scope(f"pass_of_{width}"):  # how profiles and `benchmarks.compiled` see it
            return run(width, given, cache)

    def run(width: int, given: tuple[Proposal, Int[Array, " B"]], cache: KVCache):
        (tree, probe), root_slot = given
        part = tree.first(width)
        rows = query_rows(part, probe, root_slot, drafter.max_depth)
        taps = replace(drafter.taps, logits=True)
        output, cache = run_padded(target, params, rows, cache, taps)
        depth = min(drafter.max_depth, width - 1)
        assert output.logits is not None
        verification = verify(part, output.logits[:, :width], draw, root_slot, depth)
        missing = drafter.max_depth - depth
        path = jnp.pad(verification.path, ((0, 0), (0, missing)))

        def widen(values: Array | None, axis: int):
            if values is None or width == num_nodes:
                return values
            nodes, probes = jnp.split(values, [width], axis=axis)
            padding = [(0, 0)] * values.ndim
            padding[axis] = (0, num_nodes - width)
            return jnp.concatenate([jnp.pad(nodes, padding), probes], axis=axis)

        verification = replace(verification, path=path)
        attention = last_attention(output.attention, verification, root_slot)
        logits = widen(output.logits, 1) if drafter.taps.logits else None
        wide = ModelOutput(logits, widen(output.hidden, 1), attention)
        return wide, verification, cache

    widths = compiled_widths(drafter, dtype, target.padded_width)
    if len(widths) == 1:
        return at_width(num_nodes, given, cache)
    needed = jnp.maximum(jnp.max(proposal.tree.num_valid()), min_width)
    narrowest = jnp.sum(needed > jnp.asarray(widths[:-1]))
    shapes = jax.eval_shape(partial(at_width, num_nodes), given, cache)[:2]
    placeholder = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    passes = [
        lambda given, carry, width=width: at_width(width, given, carry[2]) for width in widths
    ]
    return switch_in_place(narrowest, passes, given, (*placeholder, cache))


def padded_pass_width(target: Target, pass_width: int) -> int:
    """Returns how many rows of each text a pass has that is asked for `pass_width`.

    Raises:
        SpecjaxError: if these are more than the target's `padded_width`.
    """
    limit = target.padded_width
    if limit and limit < pass_width:
        raise SpecjaxError(
            f"this method's passes hold {pass_width} tokens, more than padded_width {limit}; load "
            f"the target with --padded-width {pass_width} or more, or draft fewer tokens"
        )
    return limit or pass_width


def run_padded(
    target: Target, params: Any, rows: QueryRows, cache: KVCache, taps: Taps
) -> tuple[ModelOutput, KVCache]:
    """Runs a pass padded to the target's `padded_width`, and returns the output of its tokens.

    The padding repeats the last token; no other token attends to it.
    """
    if not target.padded_width:
        return target.run(params, rows, cache, taps)
    count = rows.tokens.shape[1]
    missing = padded_pass_width(target, count) - count
    below, unseen = ((0, 0), (0, missing)), ((0, 0), (0, 0), (0, missing))
    filled = QueryRows(
        tokens=jnp.pad(rows.tokens, below, "edge"),
        positions=jnp.pad(rows.positions, below, "edge"),
        visible=jnp.pad(jnp.pad(rows.visible, unseen), (*below, (0, 0)), "edge"),
    )
    # What surrounds the pass stays out of its kernels, which are then alike in all programs.
    filled = lax.optimization_barrier(filled)
    output, cache = lax.optimization_barrier(target.run(params, filled, cache, taps))
    own = {"logits": output.logits, "hidden": output.hidden}
    return replace(output, **jax.tree.map(lambda values: values[:, :count], own)), cache


def last_attention(
    attention: Float[Array, "B A Q S"] | None,
    verification: Verification,
    root_slot: Int[Array, " B"],
) -> Float[Array, "B A 1 S"] | None:
    """Returns the row of the deepest accepted node, the path's columns moved next to the text's."""
    if attention is None:
        return None

    def of_text(attention, path, num_accepted, root_slot):
        row = jnp.take(attention, path[num_accepted], axis=1)
        on_path = jnp.take(row, root_slot + path, axis=1)
        return lax.dynamic_update_slice_in_dim(row, on_path, root_slot, axis=1)[:, None]

    return jax.vmap(of_text)(attention, verification.path, verification.num_accepted, root_slot)


def query_rows(
    tree: DraftTree, probe: Probe | None, root_slot: Int[Array, " B"], max_depth: int
) -> QueryRows:
    """Returns the rows of a proposal: the nodes, then the probe's.

    A node sees its ancestors and itself, a probe row what its anchor sees.
    """
    positions = root_slot[:, None] + tree.depth
    seen = ancestors(tree, max_depth)
    if probe is None:
        return QueryRows(tree.tokens, positions, seen)
    anchored = jnp.take_along_axis(seen, probe.anchor[..., None], axis=1)
    above = jnp.pad(seen, ((0, 0), (0, 0), (0, probe.tokens.shape[1])))
    below = jnp.concatenate([anchored, probe.visible], axis=2)
    return QueryRows(
        tokens=jnp.concatenate([tree.tokens, probe.tokens], axis=1),
        positions=jnp.concatenate([positions, root_slot[:, None] + probe.offset], axis=1),
        visible=jnp.concatenate([above, below], axis=1),
    )


# ---- Branches that change large arrays, such as a KV cache, without copying them ----------------
#
# XLA copies whatever a branch changes, into the branch and out of it; a loop of 0 or 1 iterations
# updates it in place. But XLA also hoists loop-invariant computations out of the loop, so they run
# even when it does not: the first products of a pass, or a whole search. An optimization barrier
# around `given` and `carry` prevents that; only weights, which branches read directly, are left
# outside it.


def switch_in_place(
    index: Int[Array, ""], branches: Sequence[Branch], given: Any, carry: Any
) -> Any:
    """Computes `lax.switch(index, branches, given, carry)`, changing arrays of `carry` in place."""
    for number, branch in enumerate(branches):
        carry = if_in_place(index == number, branch, given, carry)
    return carry


def if_in_place(condition: Bool[Array, ""], branch: Branch, given: Any, carry: Any) -> Any:
    """Computes `branch(given, carry)` if the condition holds, else `carry`, in the same way."""

    def turn(step, carry):
        seen, carry, _ = lax.optimization_barrier((given, carry, step))
        return branch(seen, carry)

    return lax.fori_loop(0, condition.astype(jnp.int32), turn, carry)
