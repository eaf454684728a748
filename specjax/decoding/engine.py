"""The engine: prefill once, then rounds until every sequence is done.

The tokens `tokens[:length]` are committed. The last one, the root, is not in the target's cache
yet, so the cache holds `length - 1` tokens. A round feeds the root and the draft, keeps one path,
and the bonus becomes the next root. Prefill caches the prompt without its last token, so the first
round is not special.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, Int, Key

from specjax.core.compilation import jit_loops
from specjax.core.errors import SpecjaxError, check_type, check_whole
from specjax.core.memory import check_program
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start
from specjax.decoding.processors import Controls
from specjax.decoding.prompt import Prompt
from specjax.decoding.request import (
    check_key,
    check_memory,
    check_processors,
    check_request,
    check_values,
    end_tokens,
)
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.decoding.state import NO_SOURCE, Generation, LoopState, Prefix, Stats
from specjax.decoding.tree import NO_BONUS, DraftTree, LogProbs, Verification
from specjax.decoding.widths import compiled_widths, padded_pass_width, verify_pass
from specjax.models.cache import KVCache, align, resized, write_slots
from specjax.models.config import TransformerConfig
from specjax.models.native import has_packed
from specjax.models.prefill import PREFILL_CHUNK, prefill, whole_chunks
from specjax.models.sharding import check_batch, everywhere, put_array, shard_batch
from specjax.models.target import ModelOutput, Target


@dataclass(frozen=True)
class Engine:
    """Everything static about a run, in one hashable object; its methods are pure.

        engine = Engine(target.model, drafter, max_new_tokens=128)
        generation = jax.jit(engine.generate)(params, prompt, key)

    or in parts:

        state = engine.prefill(params, prompt, key)
        state = engine.run(params, state, max_rounds=128)
        generation = engine.generation(state)

    Its fields are the static arguments of `speculative_generate`.
    """

    target: Target
    drafter: Drafter
    sampling: Sampling = Sampling()
    max_new_tokens: int = 256
    eos: tuple[int, ...] = ()

    def __post_init__(self):
        check_type("drafter", self.drafter, Drafter, "the drafter from specjax.load_drafter")
        check_type("sampling", self.sampling, Sampling, "specjax.Sampling(temperature=...)")
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        object.__setattr__(self, "eos", end_tokens(self.eos, self.target))

    def generate(
        self,
        params: Params,
        prompt: Prompt,
        key: Key[Array, "..."],
        max_rounds: Int[Array, ""] | int | None = None,
    ) -> Generation:
        """Generates from a prompt, in one program: the function that users wrap in `jax.jit`.

        See `speculative_generate` for the arguments. Without an outer `jit` the request is checked
        whole, under one only its shapes.
        """
        self.check(params, prompt)
        check_key(key, prompt.tokens.shape[0])
        if max_rounds is None:
            max_rounds = self.max_new_tokens  # a round adds at least one token
        if not isinstance(max_rounds, jax.Array):
            check_whole("max_rounds", max_rounds, 0)
            max_rounds = min(max_rounds, self.max_new_tokens)
        return _generate(params, prompt, key, max_rounds, engine=self)

    def check(
        self, params: Params, prompt: Prompt, room: int | None = None, with_memory: bool = True
    ) -> None:
        """Validates a request before compilation; `room` new tokens must fit the positions.

        Under an outer `jit` only shapes are checked. Without `with_memory` the request may need
        more memory than there is now.
        """
        check_type("params", params, Params, "specjax.Params(target.params, drafter_params)")
        check_type("prompt", prompt, Prompt, "specjax.encode(tokenizer, [text])")
        self.drafter.taps.check(self.target.config)
        self.drafter.check(self.target, params.drafter)
        check_request(params.target, prompt, self.target, room or self.max_new_tokens)
        check_processors(self.sampling, params.processors, self.target.config, self.eos)
        batch = prompt.tokens.shape[0]
        check_values(self.sampling, params.sampling, batch, self.target.config.vocab_size)
        if batch > 1:
            check_batch(self.mesh, batch, "a batch of")
        if with_memory:
            shape, slots = prompt.tokens.shape, self.num_slots(prompt.tokens.shape[1])
            check_memory(params, shape, self.pass_width, slots, self.target)

    @property
    def pass_width(self) -> int:
        """Tokens of a pass per sequence: nodes, probe and padding."""
        return padded_pass_width(self.target, self.drafter.pass_width)

    def num_slots(self, prompt_length: int) -> int:
        """Returns the slots per sequence of the KV cache; `prompt_length` includes the padding.

        The text and the pass are both rounded up, so that all drafters with passes of at most 128
        tokens have the same slots: the rounding of attention depends on their number.
        """
        # Each pass writes all its tokens after the committed ones, in finished sequences too.
        text = whole_chunks(prompt_length) + self.max_new_tokens
        return align(text) + align(self.pass_width)

    def prefill(self, params: Params, prompt: Prompt, key: Key[Array, "..."]) -> LoopState:
        """Caches the prompt without its last token and makes the drafter's state; compiled."""
        check_key(key, len(prompt.length))
        return _prefill(params, prompt, key, self._for_prefill)

    def resume(
        self,
        params: Params,
        state: LoopState | Prefix | None,
        prompt: Prompt,
        key: Key[Array, "..."],
    ) -> LoopState:
        """Prefills a prompt, reusing what is cached of it; compiled.

        The prompt holds a whole text, for example all turns of a conversation. The longest prefix
        cached for every sequence is not recomputed by the target; draft models and heads start
        anew. The generated tokens equal those after `prefill` if the target's keys and values do
        not depend on the pass. `state` is that of `run` after an earlier `resume`, with the same
        target and drafter; None starts from nothing. It is not donated, so it may be resumed
        several times.
        """
        self.check(params, prompt, room=1, with_memory=False)  # fewer than asked for may fit
        check_key(key, len(prompt.length))
        taps, (batch, prompt_length) = self.drafter.taps.hidden_layers, prompt.tokens.shape
        slots, room = self.num_slots(prompt_length), whole_chunks(prompt_length) + PREFILL_CHUNK
        if state is None:
            cache = self.target.new_cache(params.target, batch, slots, prompt.length)
            shape = batch, room, len(taps), self.target.config.hidden_size
            hidden = jnp.zeros(shape, self.target.dtype(params.target)) if taps else None
            state = Prefix(prompt.tokens, jnp.ones_like(prompt.length), cache, hidden)
        if len(state.length) != batch:
            raise SpecjaxError(
                f"the state holds {len(state.length)} sequence(s), the prompt {batch}; continue "
                "each of them, or begin with resume(params, None, ...)"
            )
        if taps and state.hidden is None:
            raise SpecjaxError("the state comes from prefill; begin with resume(params, None, ...)")
        # The program depends on the new prompt's padding alone.
        prefix = Prefix(
            tokens=resized(state.tokens, prompt_length, axis=1),
            length=state.length,
            cache=state.cache.with_slots(slots),
            hidden=None if state.hidden is None else resized(state.hidden, room, axis=1),
        )
        return _prefill(params, prompt, key, self._for_prefill, prefix)

    def round(self, params: Params, state: LoopState) -> LoopState:
        """Runs one round: propose, verify, commit, update."""
        state, proposal = self.propose(params, state)
        output, verification, cache = self.verify(params, state, proposal)
        state = replace(state, cache=cache)
        return self.commit(params, state, proposal.tree, output, verification)

    @partial(jit_loops, static_argnums=0, donate_argnames="state")
    def run(self, params: Params, state: LoopState, max_rounds: Int[Array, ""] | int) -> LoopState:
        """Runs rounds until all sequences are done or `max_rounds` are counted; compiled.

        `state.stats` counts since `prefill`, so to stream, call it repeatedly with a growing
        `max_rounds`. The state is donated.
        """
        return lax.while_loop(
            lambda state: ~jnp.all(state.is_done) & (jnp.max(state.stats.rounds) < max_rounds),
            lambda state: self.constrain(self.round(params, state)),
            state,
        )

    @partial(jit_loops, static_argnums=0)
    def generation(self, state: LoopState) -> Generation:
        """Returns the new tokens so far; compiled."""
        return everywhere(state.generation(self.max_new_tokens), self.mesh)

    # ---- Compilation and warm-up ----------------------------------------------------------------

    def lower(
        self, params: Params, prompt: Prompt, key: Key[Array, "..."]
    ) -> tuple[Lowered, Lowered]:
        """Lowers the programs of `prefill` and `run` for ahead-of-time compilation.

        On a mesh this compiles `prefill`, since XLA chooses the shardings of the state.
        """
        state = _prefill.eval_shape(params, prompt, key, self._for_prefill)
        prefill = _prefill.lower(params, prompt, key, self._for_prefill)
        if self.mesh is not None:
            shardings = prefill.compile().output_shardings
            state = jax.tree.map(put_array, state, shardings)
        return prefill, Engine.run.lower(self, params, state, self.max_new_tokens)

    def warm_up(
        self,
        params: Params,
        prompt: Prompt,
        key: Key[Array, "..."],
        begin: Callable[[Params, Prompt, Key[Array, "..."]], LoopState] | None = None,
    ) -> None:
        """Compiles everything and runs one round at each width.

        The first run of a pass is many times slower, as its code is loaded then. `begin` replaces
        `prefill` for a conversation; its programs are not checked for memory.
        """
        for lowered in () if begin else self.lower(params, prompt, key):
            check_program("the request", lowered, params)
        for width in compiled_widths(self.drafter, self.target, params.target):
            state = (begin or self.prefill)(params, prompt, key)
            state = replace(state, min_width=jnp.asarray(width, jnp.int32))
            jax.block_until_ready(self.generation(self.run(params, state, 1)))

    # ---- The parts of a round -------------------------------------------------------------------

    @property
    def mesh(self) -> Mesh | None:
        """The devices of the target; None: a single one."""
        return self.target.mesh

    def constrain(self, state: LoopState) -> LoopState:
        """Constrains the shardings of the state inside a compiled program; see `shard_batch`."""
        return shard_batch(state, self.mesh, state.length.shape[0])

    def propose(self, params: Params, state: LoopState) -> tuple[LoopState, Proposal]:
        """Lets the drafter propose; sequences that are done keep only the root."""
        context = Context(state.tokens, state.length)
        (tree, probe), drafter_state = self.drafter.propose(
            self.target, params, state.drafter, context, self._draw(params, state)
        )
        if tree.num_nodes > self.drafter.num_nodes:  # the cache would be too small
            raise SpecjaxError(
                f"{type(self.drafter).__name__} drafted a tree of {tree.num_nodes} nodes, but its "
                f"num_nodes is {self.drafter.num_nodes}; set it to the maximum, root included"
            )
        is_root = jnp.arange(tree.num_nodes)[None, :] == 0
        tree = replace(tree, valid=tree.valid & (~state.is_done[:, None] | is_root))
        return replace(state, drafter=drafter_state), Proposal(tree, probe)

    def verify(
        self, params: Params, state: LoopState, proposal: Proposal
    ) -> tuple[ModelOutput, Verification, KVCache]:
        """Verifies the proposal in one target pass; see `verify_pass`."""
        weights, draw = params.target, self._draw(params, state)
        request = self.target, self.drafter, weights, state.cache, proposal, draw
        return verify_pass(*request, state.min_width)

    def commit(
        self,
        params: Params,
        state: LoopState,
        tree: DraftTree,
        output: ModelOutput,
        verification: Verification,
    ) -> LoopState:
        """Commits the accepted path and the bonus, in tokens and cache, and updates the drafter.

        `state` holds the caches as `propose` and `verify` left them.
        """
        root_slot, cache = state.length - 1, state.cache
        max_length = state.prompt_length + self.max_new_tokens
        max_length = jnp.minimum(max_length, self.target.config.longest_from(state.prompt_length))
        state = record_sources(state, tree, verification)
        state, count = append(state, tree, verification, max_length, self.eos)
        if tree.is_chain:
            cache = cache.advance(count)
        else:
            is_native = has_packed(params.target)
            cache = cache.keep(verification.path, count, tree.num_nodes, is_native)
        context = Context(state.tokens, state.length)
        outcome = Outcome(tree, output, verification, context, root_slot)
        drafter_state = self.drafter.update(self.target, params, state.drafter, outcome)
        state = replace(state, cache=cache, drafter=drafter_state)
        state = self._commit_processors(params, state, verification.path.shape[1], count)
        if state.hidden is None or output.hidden is None:
            return state
        on_path = outcome.along_path(output.hidden)
        return replace(state, hidden=write_slots(state.hidden, on_path, root_slot, axis=1))

    @property
    def _for_prefill(self) -> "Engine":
        # Prefill does not depend on most of sampling and EOS, so their values share a program.
        return replace(self, sampling=self.sampling.for_prefill, eos=())

    def _commit_processors(
        self, params: Params, state: LoopState, width: int, count: Int[Array, " B"]
    ) -> LoopState:
        """Advances the processors by the last `count[b]` committed tokens, at most `width`."""
        if not state.processors:
            return state
        place = (state.length - count)[:, None] + jnp.arange(width)[None, :]
        tokens = jnp.take_along_axis(state.tokens, place, axis=1)
        processors = self.sampling.with_arrays(params.processors, state.sampling)
        parts = zip(*processors, state.processors, strict=True)
        after = (processor.commit(arrays, old, tokens, count) for processor, arrays, old in parts)
        return replace(state, processors=tuple(after))

    def _draw(self, params: Params, state: LoopState) -> Draw:
        draw = Draw(state.sequence_keys, state.length, self.sampling, values=state.sampling)
        if not state.processors:
            return draw
        processors, arrays = self.sampling.with_arrays(params.processors, state.sampling)
        text = state.tokens, state.length, state.prompt_length
        controls = Controls(*text, state.processors, arrays, processors, self.eos)
        return replace(draw, controls=controls)


@partial(jit_loops, static_argnames="engine")
def _generate(params, prompt, key, max_rounds, *, engine: Engine) -> Generation:
    state = engine.prefill(params, prompt, key)
    return engine.generation(engine.run(params, state, max_rounds))


@partial(jit_loops, static_argnames="engine")
def _prefill(
    params: Params,
    prompt: Prompt,
    key: Key[Array, "..."],
    engine: Engine,
    prefix: Prefix | None = None,
) -> LoopState:
    target, drafter, max_new_tokens = engine.target, engine.drafter, engine.max_new_tokens
    batch, prompt_length = prompt.tokens.shape
    prompt = shard_batch(prompt, engine.mesh, batch)
    padded = whole_chunks(prompt_length)
    tokens = jnp.pad(prompt.tokens, ((0, 0), (0, padded - prompt_length)))
    slots = engine.num_slots(prompt_length)
    cache = target.new_cache(params.target, batch, slots, prompt.length)
    fed, cached_hidden = tokens, None
    if prefix is not None:
        cache = _cached_part(prefix, prompt, target.config)
        fed, cached_hidden = jnp.pad(tokens, ((0, 0), (0, PREFILL_CHUNK))), prefix.hidden
    prefilled, cache = prefill(
        params.target, fed, prompt.length - 1, cache, target, drafter.taps, cached_hidden
    )
    count = max_new_tokens + drafter.max_depth + 1
    processor_states = tuple(
        processor.init(arrays, prompt, target.config.vocab_size)
        for processor, arrays in zip(*engine.sampling.with_arrays(params.processors), strict=True)
    )
    recorded = engine.sampling.logprobs
    logprobs = None if recorded is None else LogProbs.zeros(batch, padded + count, recorded)
    hidden = prefilled.hidden
    if hidden is not None:
        prefilled = replace(prefilled, hidden=hidden[:, :padded])
        hidden = None if prefix is None else resized(hidden, padded + count, axis=1)
    none = jnp.zeros((batch,), jnp.int32)
    state = LoopState(
        tokens=jnp.pad(tokens, ((0, 0), (0, count))),
        from_draft=jnp.zeros((batch, padded + count), bool),
        source=jnp.full((batch, padded + count), NO_SOURCE, jnp.int32),
        length=prompt.length,
        prompt_length=prompt.length,
        is_finite=jnp.ones((batch,), bool),
        is_done=jnp.zeros((batch,), bool),
        sequence_keys=sequence_keys(key, batch),
        cache=cache,
        drafter=drafter.init(Start(target, params, prompt, prefilled, slots, drafter.max_depth)),
        stats=Stats(none, none, none, jnp.zeros((batch, drafter.max_depth + 2), jnp.int32)),
        min_width=jnp.ones((), jnp.int32),
        hidden=hidden,
        processors=processor_states,
        logprobs=logprobs,
        sampling=params.sampling,
    )
    return engine.constrain(state)


def _cached_part(prefix: Prefix, prompt: Prompt, config: TransformerConfig) -> KVCache:
    """Returns the cache of a prefix, as far as the prompt begins with it."""
    same = jnp.cumprod(prompt.tokens == prefix.tokens, axis=1)
    num_same = jnp.minimum(jnp.sum(same, axis=1), jnp.minimum(prefix.length, prompt.length) - 1)
    if config.rope.rope_type in ("dynamic", "longrope"):  # keys depend on the prompt's length
        num_same = jnp.zeros_like(num_same)
    num_cached = jnp.broadcast_to(jnp.min(num_same).astype(jnp.int32), prompt.length.shape)
    return replace(prefix.cache, length=num_cached, prompt_length=prompt.length)


def append(
    state: LoopState,
    tree: DraftTree,
    verification: Verification,
    max_length: Int[Array, " B"],
    eos: tuple[int, ...],
) -> tuple[LoopState, Int[Array, " B"]]:
    """Appends path and bonus, cut after EOS and at `max_length`; returns the numbers of tokens.

    Log-probabilities of the new tokens are recorded if they are computed. A sequence whose logits
    after the path are not finite gets the path alone and is done, unless it ends there anyway.
    """
    steps = jnp.arange(verification.path.shape[1])[None, :]
    new_tokens = verification.new_tokens(tree)
    room = jnp.maximum(max_length - state.length, 0)
    has_bonus = verification.bonus != NO_BONUS
    count = jnp.minimum(verification.num_accepted + has_bonus, room)
    is_eos = jnp.isin(new_tokens, jnp.asarray(eos, jnp.int32)) & (steps < count[:, None])
    has_eos = jnp.any(is_eos, axis=1)
    count = jnp.where(has_eos, jnp.argmax(is_eos, axis=1) + 1, count)
    is_finite = has_bonus | has_eos | (count == room)  # logits after the end do not matter
    count = jnp.where(state.is_done, 0, count).astype(jnp.int32)
    write = partial(write_slots, start=state.length, axis=1)
    is_active = (~state.is_done).astype(jnp.int32)
    lengths = jax.nn.one_hot(count, verification.path.shape[1] + 1, dtype=jnp.int32)
    of_round = Stats(
        rounds=is_active,
        drafted=(tree.num_valid() - 1) * is_active,
        accepted=verification.num_accepted * is_active,
        accepted_lengths=lengths * is_active[:, None],
    )
    new_state = replace(
        state,
        tokens=write(state.tokens, new_tokens),
        from_draft=write(state.from_draft, verification.is_drafted),
        logprobs=jax.tree.map(write, state.logprobs, verification.logprobs),
        length=state.length + count,
        is_finite=state.is_finite & (state.is_done | is_finite),
        is_done=state.is_done | has_eos | (count == room) | ~is_finite,
        stats=jax.tree.map(jnp.add, state.stats, of_round),
    )
    return new_state, count


def record_sources(state: LoopState, tree: DraftTree, verification: Verification) -> LoopState:
    """Records the positions that the root and the new tokens were copied from, for attribution."""
    width = verification.path.shape[1]
    root_source = jnp.take_along_axis(state.source, state.length[:, None] - 1, axis=1)
    sources = jnp.pad(root_source, ((0, 0), (0, width)), constant_values=NO_SOURCE)
    if tree.source is not None:
        # Column 0 is the root: it counts as copied if the first drafted token was accepted.
        on_path = jnp.take_along_axis(tree.source, verification.path, axis=1)
        is_copied = jnp.pad(verification.is_drafted, ((0, 0), (1, 0)), mode="edge")
        sources = jnp.where(is_copied, jnp.pad(on_path, ((0, 0), (0, 1))), sources)
    return replace(state, source=write_slots(state.source, sources, state.length - 1, axis=1))
