"""The loop: prefill once, then rounds of draft, verify and commit, all in one compiled program.

`tokens[:length]` is committed. The last of them, the root, is not in the target's cache, which
holds `length - 1` rows. A round feeds the root and the draft, keeps one path, and the bonus becomes
the next root. Prefill caches the prompt without its last token, so the first round is like any
other. The loop does not know its method.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Key

from specjax.decoding.drafter import (
    Context,
    Drafter,
    Outcome,
    Params,
    Probe,
    Proposal,
)
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import check_request
from specjax.decoding.sampling import Draw, Sampling, row_keys
from specjax.decoding.tree import DraftTree, Verification, ancestors
from specjax.decoding.verify import verify
from specjax.models.cache import KVCache, write_slots
from specjax.models.llama import Llama
from specjax.models.outputs import ModelOutput, Taps
from specjax.models.rows import QueryRows, causal_rows
from specjax.pytree import pytree

PREFILL_CHUNK = 256  # rows per prefill pass: bounds the memory of attention scores
ROW_WIDTHS = (1, 8, 24, 64)  # a pass costs by its rows, so it runs at the least width that fits
STATIC = ("target", "drafter", "sampling", "max_new_tokens", "eos")


@pytree
class Stats:
    """What the rounds of each row did. P = max_depth + 1, the longest accepted length."""

    rounds: Int[Array, " B"]  # target passes, prefill not counted
    drafted: Int[Array, " B"]  # valid nodes offered, roots not counted
    accepted_lengths: Int[Array, "B P+1"]  # entry n: rounds that committed n tokens

    @property
    def mean_accepted_length(self) -> jax.Array:
        """Tokens per target pass, bonus included, over all rows."""
        lengths = jnp.arange(self.accepted_lengths.shape[1])
        rounds = jnp.maximum(jnp.sum(self.rounds), 1)
        return jnp.sum(self.accepted_lengths * lengths[None, :]) / rounds


@pytree
class Generation:
    """New tokens of each row. M = max_new_tokens."""

    tokens: Int[Array, "B M"]  # zero beyond length
    length: Int[Array, " B"]  # EOS included
    from_draft: Bool[Array, "B M"]  # the token was drafted and accepted, not added by the target
    stats: Stats


@pytree
class LoopState:
    """Everything that a round takes and returns."""

    tokens: Int[Array, "B S"]  # prompt and new tokens; meaningless beyond length
    from_draft: Bool[Array, "B S"]
    length: Int[Array, " B"]  # committed tokens, root included
    prompt_length: Int[Array, " B"]
    is_done: Bool[Array, " B"]  # such rows keep still
    row_keys: Key[Array, " B"]
    cache: KVCache  # length - 1 committed rows
    drafter: Any
    stats: Stats

    def generation(self, max_new_tokens: int) -> Generation:
        """The new tokens so far."""
        length = self.length - self.prompt_length
        at = self.prompt_length[:, None] + jnp.arange(max_new_tokens)[None, :]
        is_new = jnp.arange(max_new_tokens)[None, :] < length[:, None]
        return Generation(
            tokens=jnp.where(is_new, jnp.take_along_axis(self.tokens, at, axis=1), 0),
            length=length,
            from_draft=is_new & jnp.take_along_axis(self.from_draft, at, axis=1),
            stats=self.stats,
        )


def speculative_generate(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Llama,
    drafter: Drafter,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    max_new_tokens: int = 256,
    eos: tuple[int, ...] | int | None = None,
) -> Generation:
    """Generates up to `max_new_tokens` per row, saying what plain decoding with `key` would say.

    One compiled program per shape of prompt and static settings. Row b of a batch equals its
    prompt alone under `jax.random.fold_in(key, b)`.

    Args:
        params: the target's weights and whatever the drafter reads.
        prompt: at least 2 tokens per row.
        key: decides the text above temperature 0.
        target: the model; static, as are all that follow.
        drafter: the method; it decides the speed, never the text.
        sampling: temperature, filters, and the way of verification.
        max_new_tokens: new tokens per row at most.
        eos: token or tokens that end a row.

    Raises:
        SpecjaxError: for a request that cannot be served; values are checked where they are
            concrete, that is outside an outer `jit`.
    """
    eos = (eos,) if isinstance(eos, int) else tuple(eos or ())
    check_request(params, prompt, target, drafter, max_new_tokens)
    return _generate(
        params,
        prompt,
        key,
        target=target,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=eos,
    )


def stream(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    *,
    target: Llama,
    drafter: Drafter,
    sampling: Sampling = Sampling(),  # noqa: B008 - frozen
    max_new_tokens: int = 256,
    eos: tuple[int, ...] | int | None = None,
    rounds_per_call: int = 4,
) -> Iterator[Generation]:
    """As `speculative_generate`, but yields the text so far after every few rounds."""
    eos = (eos,) if isinstance(eos, int) else tuple(eos or ())
    check_request(params, prompt, target, drafter, max_new_tokens)
    settings = dict(
        target=target, drafter=drafter, sampling=sampling, max_new_tokens=max_new_tokens
    )
    state = _start_jit(params, prompt, key, **settings)
    is_done = False
    while not is_done:
        state, generation = _advance_jit(
            params, state, eos=eos, num_rounds=rounds_per_call, **settings
        )
        is_done = bool(jnp.all(state.is_done))
        yield generation


@partial(jax.jit, static_argnames=STATIC)
def _generate(
    params, prompt, key, *, target, drafter, sampling, max_new_tokens, eos
) -> Generation:
    state = start(params, prompt, key, target, drafter, max_new_tokens)
    state = lax.while_loop(
        lambda state: ~jnp.all(state.is_done),
        lambda state: one_round(params, state, target, drafter, sampling, max_new_tokens, eos),
        state,
    )
    return state.generation(max_new_tokens)


@partial(jax.jit, static_argnames=("target", "drafter", "sampling", "max_new_tokens"))
def _start_jit(params, prompt, key, *, target, drafter, sampling, max_new_tokens) -> LoopState:
    del sampling
    return start(params, prompt, key, target, drafter, max_new_tokens)


@partial(jax.jit, static_argnames=(*STATIC, "num_rounds"), donate_argnames="state")
def _advance_jit(
    params, state, *, target, drafter, sampling, max_new_tokens, eos, num_rounds
) -> tuple[LoopState, Generation]:
    def body(_, state):
        return one_round(params, state, target, drafter, sampling, max_new_tokens, eos)

    state = lax.fori_loop(0, num_rounds, body, state)
    return state, state.generation(max_new_tokens)


def start(
    params: Params,
    prompt: Prompt,
    key: Key[Array, ""],
    target: Llama,
    drafter: Drafter,
    max_new_tokens: int,
) -> LoopState:
    """Prefills the prompt without its last token and lets the drafter prepare."""
    batch, padded = prompt.tokens.shape
    chunk = min(PREFILL_CHUNK, padded)
    padded = -(-padded // chunk) * chunk
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, padded - prompt.tokens.shape[1])))
    # A finished row still writes a round's rows behind its text.
    num_slots = padded + max_new_tokens + drafter.num_nodes + drafter.num_probes
    cache = KVCache.create(
        target.config,
        batch,
        num_slots,
        params.target["embed_tokens"]["weight"].dtype,
        text_length=prompt.tokens.shape[1] + max_new_tokens,
    )
    prefilled, cache = prefill(params.target, tokens, cache, target, drafter.taps, chunk)
    cache = replace(cache, length=prompt.length - 1)
    count = max_new_tokens + drafter.max_depth + 1
    return LoopState(
        tokens=jnp.pad(tokens, ((0, 0), (0, count))),
        from_draft=jnp.zeros((batch, padded + count), bool),
        length=prompt.length,
        prompt_length=prompt.length,
        is_done=jnp.zeros((batch,), bool),
        row_keys=row_keys(key, batch),
        cache=cache,
        drafter=drafter.init(params, prompt, prefilled, num_slots),
        stats=Stats(
            rounds=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.zeros((batch,), jnp.int32),
            accepted_lengths=jnp.zeros((batch, drafter.max_depth + 2), jnp.int32),
        ),
    )


def prefill(
    params: Any,
    tokens: Int[Array, "B P"],
    cache: KVCache,
    target: Llama,
    taps: Taps,
    chunk: int,
) -> tuple[ModelOutput, KVCache]:
    """Writes `tokens` to an empty cache, `chunk` rows at a time; P is a multiple of `chunk`.

    Reveals the tapped hidden states of all rows; never logits or attention, whose size grows with
    the square of the prompt.
    """
    batch, padded = tokens.shape
    taps = replace(taps, attention_heads=(), logits=False)

    def write_chunk(cache, chunk_tokens):
        rows = causal_rows(chunk_tokens, cache.length)
        output, cache = target.apply({"params": params}, rows, cache, taps)
        return cache.advance(jnp.full((batch,), chunk)), output.hidden

    if padded == chunk:
        cache, hidden = write_chunk(cache, tokens)
    else:
        chunks = tokens.reshape(batch, -1, chunk).swapaxes(0, 1)
        cache, hidden = lax.scan(write_chunk, cache, chunks)
        if hidden is not None:
            hidden = hidden.swapaxes(0, 1).reshape(batch, padded, *hidden.shape[3:])
    return ModelOutput(logits=None, hidden=hidden), cache


def one_round(
    params: Params,
    state: LoopState,
    target: Llama,
    drafter: Drafter,
    sampling: Sampling,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> LoopState:
    """Draft, verify, commit, learn."""
    context = Context(state.tokens, state.length)
    draw = Draw(state.row_keys, state.length, sampling)
    proposal, drafter_state = drafter.propose(params, state.drafter, context, draw)
    is_root = jnp.arange(proposal.tree.num_nodes)[None, :] == 0
    tree = replace(proposal.tree, valid=proposal.tree.valid & (~state.is_done[:, None] | is_root))
    proposal = Proposal(tree, proposal.probe)
    output, verification, cache = judge(params.target, state.cache, proposal, draw, target, drafter)
    state, count = commit(state, tree, verification, max_new_tokens, eos)
    if tree.is_chain:
        cache = cache.advance(count)
    else:
        cache = cache.keep(verification.path, count)
    outcome = Outcome(
        tree=tree,
        output=output,
        verification=verification,
        context=Context(state.tokens, state.length),
        root_slot=context.length - 1,
    )
    return replace(
        state, cache=cache, drafter=drafter.update(params, drafter_state, outcome)
    )


def judge(
    params: Any,
    cache: KVCache,
    proposal: Proposal,
    draw: Draw,
    target: Llama,
    drafter: Drafter,
) -> tuple[ModelOutput, Verification, KVCache]:
    """One target pass over the proposal and its verification, as narrow as the draft allows.

    Everything whose cost grows with the rows happens at the chosen width; only what the drafter
    wants to read is padded back to all N rows.
    """
    tree, probe = proposal
    num_nodes = tree.num_nodes
    root_slot = cache.length

    def at_width(width: int, cache: KVCache):
        part = tree.first(width)
        rows = query_rows(part, probe, root_slot, drafter.max_depth)
        output, cache = target.apply({"params": params}, rows, cache, drafter.taps)
        depth = min(drafter.max_depth, width - 1)
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

        wide = ModelOutput(
            widen(output.logits, 1), widen(output.hidden, 1), widen(output.attention, 2)
        )
        return wide, replace(verification, path=path), cache

    widths = [width for width in ROW_WIDTHS if 2 * width <= num_nodes] + [num_nodes]
    if len(widths) == 1:
        return at_width(num_nodes, cache)
    needed = jnp.max(tree.num_valid())
    narrowest = jnp.sum(needed > jnp.asarray(widths[:-1]))
    return lax.switch(narrowest, [partial(at_width, width) for width in widths], cache)


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
        tokens=write_slots(state.tokens, fresh, state.length, axis=1),
        from_draft=write_slots(state.from_draft, is_drafted, state.length, axis=1),
        length=state.length + count,
        is_done=state.is_done | has_eos | (count == room),
        stats=stats,
    )
    return new_state, count
