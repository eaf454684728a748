"""The compiled widths of a target pass, and the switch between them.

The cost of a pass grows with its tokens, so a round runs the narrowest compiled pass that holds its
draft.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Drafter, Probe, Proposal
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.decoding.verify import verify
from specjax.models.cache import KVCache, resized
from specjax.models.native import has_native_layers, has_packed
from specjax.models.target import ModelOutput, QueryRows, Taps, Target

# Of drafters without `pass_widths`, up to half their nodes. In 16 bits XLA's pass over 8 tokens
# costs little more than one over a single token, so only one narrow pass is compiled: that of 8, or
# of 1 for fewer than 16 nodes.
DEFAULT_WIDTHS = (1, 8, 24, 64)

Branch = Callable[[Any, Any], Any]  # from `inputs` and `carry` to the next `carry`


def compiled_widths(drafter: Drafter, target: Target, params: Any) -> list[int]:
    """Returns the number of nodes of each compiled pass, ascending; `params` are the target's."""
    widths = () if target.padded_width else drafter.pass_widths
    if widths is None:
        widths = [width for width in DEFAULT_WIDTHS if 2 * width <= drafter.num_nodes]
        if jnp.finfo(target.dtype(params)).bits == 16 and not has_packed(params):
            widths = widths[:2][-1:]
    if has_native_layers(params, target.config.head_dim) and not drafter.num_probes:
        # Kernels skip the padding of a pass, so a narrower pass saves only its verification.
        widths = [width for width in widths if 4 * width <= drafter.num_nodes]
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

    Only the drafter's taps are padded back to all N nodes. Attention is that of the deepest
    accepted node.
    """
    num_nodes = proposal.tree.num_nodes
    inputs = proposal, cache.length

    def at_width(width: int) -> Branch:
        # Profiles and `benchmarks.compiled` read the name.
        return jax.named_call(partial(run, width), name=f"pass_of_{width}")

    def run(width: int, inputs: tuple[Proposal, Int[Array, " B"]], carry: tuple[Any, ...]):
        (tree, probe), root_slot = inputs
        part = tree.first(width)
        rows = query_rows(part, probe, root_slot, drafter.max_depth)
        taps = replace(drafter.taps, logits=True)
        output, cache = run_padded(target, params, rows, carry[-1], taps)
        depth = min(drafter.max_depth, width - 1)
        assert output.logits is not None
        verification = verify(part, output.logits[:, :width], draw, root_slot, depth)
        lengthen = partial(resized, size=drafter.max_depth + 1, axis=1)
        path = lengthen(verification.path)
        logprobs = jax.tree.map(lengthen, verification.logprobs)

        def widen(values: Array | None):
            if values is None or width == num_nodes:
                return values
            nodes, probes = jnp.split(values, [width], axis=1)
            return jnp.concatenate([resized(nodes, num_nodes, axis=1), probes], axis=1)

        verification = replace(verification, path=path, logprobs=logprobs)
        attention = last_attention(output.attention, verification, root_slot)
        logits = widen(output.logits) if drafter.taps.logits else None
        wide = ModelOutput(logits, widen(output.hidden), attention)
        return wide, verification, cache

    # A tree may be smaller than its drafter says.
    widths = sorted({min(width, num_nodes) for width in compiled_widths(drafter, target, params)})
    if len(widths) == 1:
        return at_width(num_nodes)(inputs, (cache,))
    needed = jnp.maximum(proposal.tree.num_needed(), min_width)
    narrowest = jnp.sum(needed > jnp.asarray(widths[:-1]))
    shapes = jax.eval_shape(at_width(num_nodes), inputs, (cache,))[:2]
    placeholder = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry = (*placeholder, cache)
    for number, width in enumerate(widths):
        carry = if_in_place(narrowest == number, at_width(width), inputs, carry)
    return carry


def padded_pass_width(target: Target, pass_width: int) -> int:
    """Returns the tokens per sequence of a pass, with the padding to `padded_width`."""
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
    padded = QueryRows(
        tokens=jnp.pad(rows.tokens, below, "edge"),
        positions=jnp.pad(rows.positions, below, "edge"),
        visible=jnp.pad(jnp.pad(rows.visible, unseen), (*below, (0, 0)), "edge"),
    )
    # The barriers stop XLA fusing the pass with its surroundings, so that all programs run the same
    # kernels.
    padded = lax.optimization_barrier(padded)
    output, cache = lax.optimization_barrier(target.run(params, padded, cache, taps))
    by_token = {"logits": output.logits, "hidden": output.hidden}
    return replace(output, **jax.tree.map(lambda values: values[:, :count], by_token)), cache


def last_attention(
    attention: Float[Array, "B A Q S"] | None,
    verification: Verification,
    root_slot: Int[Array, " B"],
) -> Float[Array, "B A 1 S"] | None:
    """Returns the attention of the deepest accepted node, with the path right after the text."""
    if attention is None:
        return None

    def of_sequence(attention, path, num_accepted, root_slot):
        weights = jnp.take(attention, path[num_accepted], axis=1)
        on_path = jnp.take(weights, root_slot + path, axis=1)
        return lax.dynamic_update_slice_in_dim(weights, on_path, root_slot, axis=1)[:, None]

    return jax.vmap(of_sequence)(attention, verification.path, verification.num_accepted, root_slot)


def query_rows(
    tree: DraftTree, probe: Probe | None, root_slot: Int[Array, " B"], max_depth: int
) -> QueryRows:
    """Returns the tokens of a pass: the nodes, then the probe.

    A node sees its ancestors and itself; a probe token sees all that its anchor sees.
    """
    positions = root_slot[:, None] + tree.depth
    seen = ancestors(tree, max_depth)
    if probe is None:
        return QueryRows(tree.tokens, positions, seen, tree.num_needed())
    anchored = jnp.take_along_axis(seen, probe.anchor[..., None], axis=1)
    above = jnp.pad(seen, ((0, 0), (0, 0), (0, probe.tokens.shape[1])))
    below = jnp.concatenate([anchored, probe.visible], axis=2)
    return QueryRows(
        tokens=jnp.concatenate([tree.tokens, probe.tokens], axis=1),
        positions=jnp.concatenate([positions, root_slot[:, None] + probe.offset], axis=1),
        visible=jnp.concatenate([above, below], axis=1),
    )


# ---- Branches that update large arrays, such as a KV cache, in place ----------------------------
#
# XLA copies all arrays that a branch changes, into the branch and out of it; a loop of 0 or 1
# iterations updates them in place. But XLA also hoists loop-invariant computations out of the loop,
# so they run even if the loop does not. An optimization barrier around `inputs` and `carry`
# prevents that; only weights, which branches read directly, stay outside.


def if_in_place(condition: Bool[Array, ""], branch: Branch, inputs: Any, carry: Any) -> Any:
    """Computes `branch(inputs, carry) if condition else carry`, updating `carry` in place."""

    def run_branch(step, carry):
        isolated, carry, _ = lax.optimization_barrier((inputs, carry, step))
        return branch(isolated, carry)

    return lax.fori_loop(0, condition.astype(jnp.int32), run_branch, carry)
