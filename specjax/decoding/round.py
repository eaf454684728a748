"""One round: draft, verify, commit, learn. It does not know its method."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Probe, Proposal
from specjax.decoding.sampling import Draw, Sampling
from specjax.decoding.state import NO_SOURCE, LoopState, Stats
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.decoding.verify import verify
from specjax.decoding.widths import switch_in_place
from specjax.models.cache import KVCache, write_slots
from specjax.models.target import ModelOutput, QueryRows
from specjax.models.transformer import Transformer

# A pass costs by its rows, so it runs at the least width that fits; a drafter may have its own.
ROW_WIDTHS = (1, 8, 24, 64)


def one_round(
    params: Params,
    state: LoopState,
    target: Transformer,
    drafter: Drafter,
    sampling: Sampling,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> LoopState:
    """Draft, verify, commit, learn."""
    state, proposal = draft(params, state, drafter, sampling)
    draw = Draw(state.row_keys, state.length, sampling)
    output, verification, cache = judge(params.target, state.cache, proposal, draw, target, drafter)
    state = replace(state, cache=cache)
    return conclude(
        params, state, proposal.tree, output, verification, drafter, max_new_tokens, eos
    )


def draft(
    params: Params, state: LoopState, drafter: Drafter, sampling: Sampling
) -> tuple[LoopState, Proposal]:
    """What the drafter proposes, and the state with its own; finished rows get no nodes."""
    context = Context(state.tokens, state.length)
    draw = Draw(state.row_keys, state.length, sampling)
    (tree, probe), drafter_state = drafter.propose(params, state.drafter, context, draw)
    is_root = jnp.arange(tree.num_nodes)[None, :] == 0
    tree = replace(tree, valid=tree.valid & (~state.is_done[:, None] | is_root))
    return replace(state, drafter=drafter_state), Proposal(tree, probe)


def conclude(
    params: Params,
    state: LoopState,
    tree: DraftTree,
    output: ModelOutput,
    verification: Verification,
    drafter: Drafter,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> LoopState:
    """Commits what was accepted, keeps its rows in the cache, and lets the drafter learn from it.

    `state` holds the caches as `draft` and `judge` left them.
    """
    root_slot = state.length - 1
    state, count = commit(state, tree, verification, max_new_tokens, eos)
    is_chain, path = tree.is_chain, verification.path
    cache = state.cache.advance(count) if is_chain else state.cache.keep(path, count)
    outcome = Outcome(
        tree=tree,
        output=output,
        verification=verification,
        context=Context(state.tokens, state.length),
        root_slot=root_slot,
    )
    return replace(state, cache=cache, drafter=drafter.update(params, state.drafter, outcome))


def judge(
    params: Any,
    cache: KVCache,
    proposal: Proposal,
    draw: Draw,
    target: Transformer,
    drafter: Drafter,
) -> tuple[ModelOutput, Verification, KVCache]:
    """One target pass over the proposal and its verification, as narrow as the draft allows.

    Everything whose cost grows with the rows happens at the chosen width; only what the drafter
    taps is padded back to all N rows. Attention is read at the deepest accepted node only.
    """
    num_nodes = proposal.tree.num_nodes
    given = proposal, cache.length

    def at_width(width: int, given: tuple[Proposal, Int[Array, " B"]], cache: KVCache):
        (tree, probe), root_slot = given
        part = tree.first(width)
        rows = query_rows(part, probe, root_slot, drafter.max_depth)
        output, cache = target.run(params, rows, cache, replace(drafter.taps, logits=True))
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

    widths = pass_widths(drafter, num_nodes)
    if len(widths) == 1:
        return at_width(num_nodes, given, cache)
    needed = jnp.max(proposal.tree.num_valid())
    narrowest = jnp.sum(needed > jnp.asarray(widths[:-1]))
    shapes = jax.eval_shape(partial(at_width, num_nodes), given, cache)[:2]
    unknown = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    passes = [
        lambda given, carry, width=width: at_width(width, given, carry[2]) for width in widths
    ]
    return switch_in_place(narrowest, passes, given, (*unknown, cache))


def last_attention(
    attention: Float[Array, "B A Q S"] | None,
    verification: Verification,
    root_slot: Int[Array, " B"],
) -> Float[Array, "B A 1 S"] | None:
    """The row of the deepest accepted node; the columns of the path follow those of the text."""
    if attention is None:
        return None

    def of_text(attention, path, num_accepted, root_slot):
        row = jnp.take(attention, path[num_accepted], axis=1)
        on_path = jnp.take(row, root_slot + path, axis=1)
        return lax.dynamic_update_slice_in_dim(row, on_path, root_slot, axis=1)[:, None]

    return jax.vmap(of_text)(attention, verification.path, verification.num_accepted, root_slot)


def pass_widths(drafter: Drafter, num_nodes: int) -> list[int]:
    """How many nodes a pass may hold, in ascending order: the least that holds the draft is run."""
    widths = getattr(drafter, "row_widths", None)
    if widths is None:
        widths = [width for width in ROW_WIDTHS if 2 * width <= num_nodes]
    return [*(width for width in widths if width < num_nodes), num_nodes]


def query_rows(
    tree: DraftTree, probe: Probe | None, root_slot: Int[Array, " B"], max_depth: int
) -> QueryRows:
    """The rows of a proposal: each node sees its ancestors and itself, probes see their anchor's.

    Node rows come first, then the probe's.
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


def commit(
    state: LoopState,
    tree: DraftTree,
    verification: Verification,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> tuple[LoopState, Int[Array, " B"]]:
    """Appends path and bonus, cut after EOS and at `max_new_tokens`; returns how many per row."""
    steps = jnp.arange(verification.path.shape[1])[None, :]
    is_drafted = steps < verification.num_accepted[:, None]
    below_root = jnp.pad(verification.path[:, 1:], ((0, 0), (0, 1)))
    drafted = jnp.take_along_axis(tree.tokens, below_root, axis=1)
    fresh = jnp.where(is_drafted, drafted, verification.bonus[:, None])

    room = state.prompt_length + max_new_tokens - state.length
    count = jnp.minimum(verification.num_accepted + 1, room)
    ends = jnp.isin(fresh, jnp.asarray(eos, jnp.int32)) & (steps < count[:, None])
    has_eos = jnp.any(ends, axis=1)
    count = jnp.where(has_eos, jnp.argmax(ends, axis=1) + 1, count)
    count = jnp.where(state.is_done, 0, count).astype(jnp.int32)

    root_source = jnp.take_along_axis(state.source, state.length[:, None] - 1, axis=1)
    sources = jnp.pad(root_source, ((0, 0), (0, steps.shape[1])), constant_values=NO_SOURCE)
    if tree.source is not None:
        on_path = jnp.take_along_axis(tree.source, verification.path, axis=1)
        is_copied = jnp.pad(is_drafted, ((0, 0), (1, 0)), mode="edge")
        sources = jnp.where(is_copied, jnp.pad(on_path, ((0, 0), (0, 1))), sources)

    is_active = (~state.is_done).astype(jnp.int32)
    stats = Stats(
        rounds=state.stats.rounds + is_active,
        drafted=state.stats.drafted + (tree.num_valid() - 1) * is_active,
        accepted_lengths=state.stats.accepted_lengths
        + jax.nn.one_hot(count, verification.path.shape[1] + 1, dtype=jnp.int32)
        * is_active[:, None],
    )
    new_state = replace(
        state,
        source=write_slots(state.source, sources, state.length - 1, axis=1),
        tokens=write_slots(state.tokens, fresh, state.length, axis=1),
        from_draft=write_slots(state.from_draft, is_drafted, state.length, axis=1),
        length=state.length + count,
        is_done=state.is_done | has_eos | (count == room),
        stats=stats,
    )
    return new_state, count
