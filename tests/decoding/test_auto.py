"""The gate, replayed over texts of all kinds, and in the engine."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Engine, Prompt, stream
from specjax.decoding.continuous import Batch
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start
from specjax.decoding.drafters import auto
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.hybrid import Hybrid
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.decoding.tree import Verification, chain
from specjax.decoding.widths import compiled_widths
from specjax.models.target import ModelOutput
from tests.decoding import contract
from tests.decoding.tiny import Oracle, prompt, slow_except, target

# ---- A replay of prompt lookup, in steps, without a model or a clock ----------------------------

PROMPT, LENGTH = 120, 420
LOOKUP = PromptLookup(num_tokens=10, allow_shorter=True)
KINDS = {  # tokens copied from the prompt in a row, then random ones; and the size of the alphabet
    "copies": (60, 1, 4000),
    "short copies": (12, 1, 4000),
    "copies, then random": (30, 30, 4000),
    "random": (0, LENGTH, 4000),
    "small alphabet": (0, LENGTH, 40),
    "one right": (1, 1, 4000),
    "two right": (2, 1, 4000),
}
PREDICTABLE = ("copies", "short copies", "copies, then random")


def text(kind: str, seed: int) -> np.ndarray:
    """A text of a kind; the first PROMPT tokens are the prompt."""
    num_copied, num_random, alphabet = KINDS[kind]
    numbers = np.random.default_rng(seed)
    found = numbers.integers(0, alphabet, LENGTH)
    for at in range(PROMPT, LENGTH, num_copied + 1 + num_random):
        start = int(numbers.integers(PROMPT - num_copied - 1))
        copied = found[start : start + num_copied + 1]  # the lookup needs the first to find it
        found[at : at + len(copied)] = copied[: LENGTH - at]
    return found


def writer(break_even: float, is_gated: bool) -> Callable[[jax.Array], jax.Array]:
    """A program: the steps of plain decoding that writing a text takes."""
    gate, params = Auto(LOOKUP, break_even if is_gated else -1.0), Params(None)
    model, nothing = target()[0], ModelOutput(None)

    def one_round(tokens, carry):
        state, length, taken = carry
        draw = Draw(sequence_keys(jax.random.key(0), 1), length, Sampling())
        (tree, _), state = gate.propose(model, params, state, Context(tokens, length), draw)
        following = jax.lax.dynamic_slice_in_dim(tokens, length[0], gate.max_depth, axis=1)
        is_right = (tree.tokens[:, 1:] == following) & tree.valid[:, 1:]
        accepted = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1, dtype=jnp.int32)
        path = jnp.arange(gate.num_nodes)[None]
        outcome = Outcome(
            tree=tree,
            output=nothing,
            verification=Verification(path, accepted, tokens[:, 0]),
            context=Context(tokens, length + accepted + 1),
            root_slot=length - 1,
        )
        state = gate.update(model, params, state, outcome)
        return state, length + accepted + 1, taken + 1 + break_even * (tree.num_valid()[0] > 1)

    @jax.jit
    def write(tokens):
        start = jnp.array([PROMPT])
        state = gate.init(Start(model, params, Prompt(tokens, start), nothing, LENGTH, 0))
        carry = state, start, jnp.zeros(())
        goes_on = lambda carry: carry[1][0] < LENGTH  # noqa: E731
        return jax.lax.while_loop(goes_on, lambda carry: one_round(tokens, carry), carry)[2]

    return write


@pytest.mark.parametrize("break_even", slow_except((0.6, 2.5), 0.6))
def test_it_is_never_far_below_plain_decoding_and_nearly_as_fast_as_without_a_gate(break_even):
    plain = LENGTH - PROMPT
    most_lost = auto.CREDIT + break_even + auto.ALLOWANCE * plain
    writers = [writer(break_even, is_gated) for is_gated in (True, False)]
    for kind in KINDS:
        texts = [np.pad(text(kind, seed), (0, 16), constant_values=-1)[None] for seed in range(4)]
        gated, alone = (plain / np.array([*map(write, texts)]) for write in writers)
        assert (gated >= plain / (plain + most_lost)).all(), kind
        if kind in PREDICTABLE:
            assert gated.mean() >= 0.93 * alone.mean(), kind
        else:
            assert (gated >= np.minimum(0.98, alone)).all(), kind
    assert alone.mean() < 1 or break_even < 2, "without a gate all would be well"


# ---- In the engine ------------------------------------------------------------------------------

NEW_TOKENS = 120
CALLS: list[str] = []  # by calls that a program makes when it gets there


@dataclass(frozen=True)
class Knows(Drafter):
    """Drafts from texts that are a setting, so it has no params."""

    texts: tuple[tuple[int, ...], ...]

    num_nodes = 5

    def propose(self, target, params, state, context: Context, draw: Draw):
        jax.debug.callback(lambda: CALLS.append("propose"))
        at = context.length[:, None] + jnp.arange(4)[None, :]
        drafted = jnp.take_along_axis(jnp.asarray(self.texts), at, axis=1, mode="clip")
        return Proposal(chain(context.root, drafted, jnp.full_like(at[:, 0], 4))), state


@dataclass(frozen=True)
class CountedOracle(Oracle):
    """Counts what it is asked; finds nothing to draft where the text that it knows is -1."""

    def propose(self, *given):
        jax.debug.callback(lambda: CALLS.append("propose"))
        (tree, _), state = super().propose(*given)
        return Proposal(replace(tree, valid=tree.valid & (tree.tokens >= 0))), state

    def update(self, target, params, state, outcome):
        jax.debug.callback(lambda: CALLS.append("update"))
        return state


def run(drafter: Drafter, batch: int = 1, known=None, **settings):
    CALLS.clear()
    out = contract.generate(drafter, known, prompt(batch), max_new_tokens=NEW_TOKENS, **settings)
    jax.effects_barrier()
    return out


def whole_texts(batch: int) -> tuple[tuple[int, ...], ...]:
    """Prompt and continuation of each row."""
    return tuple(map(tuple, contract.whole_texts("greedy", batch).tolist()))


def test_the_gate_closes_at_wrong_drafts_and_reopens():
    (model, params), [text] = target(), whole_texts(1)
    start = int(prompt(1).length[0])
    wrong = range(start + 20, start + 70)
    known = tuple((token + 1) % 40 if at in wrong else token for at, token in enumerate(text))
    gate = Auto(Knows((known,)), 1.5)
    CALLS.clear()
    at, drafted, asked = [0], [0], [0]
    settings = {"target": model, "drafter": gate, "max_new_tokens": NEW_TOKENS}
    num_compiled = Engine.run._cache_size()
    parts = stream(Params(params), prompt(1), jax.random.key(1), rounds_per_call=1, **settings)
    for part in parts:
        jax.effects_barrier()
        at.append(int(part.length[0]))
        drafted.append(int(part.stats.drafted[0]))
        asked.append(len(CALLS))
    assert tuple(part.tokens[0].tolist()) == text[start : start + NEW_TOKENS]
    assert Engine.run._cache_size() == num_compiled + 1, "the state keeps its types"
    rounds = list(zip(at, np.diff(drafted) > 0, np.diff(asked) > 0, strict=False))
    assert all(drafts for at, drafts, _ in rounds if at < 17)
    during = [(drafts, asks) for at, drafts, asks in rounds if 20 <= at < 70]
    assert sum(drafts for drafts, _ in during) <= 5
    assert 4 <= sum(asks for _, asks in during[10:]) <= 10, "one round in eight"
    opened = next(at for at, drafts, _ in rounds if at >= 70 and drafts)
    assert opened <= 70 + auto.MAX_PAUSE + 4, "a pause, and a few true tokens"
    assert all(drafts for at, drafts, _ in rounds if at >= opened + 10)


def test_a_drafter_with_params_stops_once_the_credit_is_spent():
    true = jnp.asarray(whole_texts(1))
    wrong, nothing = (true + 1) % 40, jnp.full_like(true, -1)
    for known, num_asked in ((true, NEW_TOKENS // 5), (wrong, 2), (nothing, 2)):
        out = run(Auto(CountedOracle(), 1.5), known=known)
        assert CALLS.count("propose") == CALLS.count("update") == num_asked
        assert out.stats.rounds[0] == (num_asked if known is true else NEW_TOKENS)


def test_a_text_that_joins_a_batch_brings_credit_of_its_own():
    true = jnp.asarray(whole_texts(2))
    params = Params(target()[1], true.at[1].set((true[1] + 1) % 40))
    engine = Engine(target()[0], Auto(CountedOracle(), 1.5), max_new_tokens=NEW_TOKENS)
    batch = Batch(engine, params, 2)
    CALLS.clear()
    drafts = NEW_TOKENS // 5 + 1  # and one before the gate sees that the text has ended
    for place, num_asked in ((1, 2), (0, 2 + drafts)):
        alone = jax.tree.map(lambda leaf, at=place: leaf[at : at + 1], prompt(2))
        batch.put(place, engine.prefill(params, alone, jax.random.key(1)))
        generation, _ = batch.run(NEW_TOKENS // 4)
        jax.effects_barrier()
        assert CALLS.count("propose") == num_asked
    assert generation.length[0] == NEW_TOKENS and generation.length[1] < NEW_TOKENS


def test_a_text_that_stopped_drafting_goes_on_plainly_when_another_ends():
    """The first text spends the credit of both, then ends; the second has missed tokens by then."""
    true = jnp.asarray(whole_texts(2))
    known = true.at[0].set((true[0] + 1) % 40)
    plain = contract.truth("greedy", 2)[:, :NEW_TOKENS]
    end = next(at for at, token in enumerate(plain[0]) if at > 5 and token not in plain[1])
    out = run(Auto(CountedOracle(max_depth=1), 1.05), 2, known=known, eos=(int(plain[0, end]),))
    assert 5 < out.length[0] <= end + 1 < NEW_TOKENS == out.length[1]
    assert CALLS.count("propose") == 4


@pytest.mark.slow
def test_a_batch_shares_its_gate_and_rows_that_are_done_do_not_count():
    """One row of three is right, and gains 4 tokens: 4/3 on average, 4 once the others are done."""
    known = whole_texts(3)
    wrong = tuple(tuple((token + 1) % 40 for token in text) for text in known[1:])
    mixed, plain = Knows((known[0], *wrong)), contract.truth("greedy", 3)[:, :NEW_TOKENS]
    ends = [int(next(t for t in row if t not in plain[0])) for row in plain[1:]]
    for break_even, eos, *bounds in ((1.0, (), 24, 34), (2.5, (), 110, 120), (2.5, ends, 24, 60)):
        out = run(Auto(mixed, break_even), 3, eos=eos)
        np.testing.assert_array_equal(out.tokens[0], plain[0])
        assert bounds[0] <= out.stats.rounds[0] <= bounds[1], (break_even, eos)


@pytest.mark.parametrize("inner", [Autoregressive(), Lookahead(), Auto(PromptLookup(), 1.0)])
def test_drafters_that_cannot_be_gated_are_rejected(inner):
    message = f"{type(inner).__name__} cannot be gated"
    contract.assert_params_rejected(Auto(inner, 1.0), None, message)


@pytest.mark.parametrize(
    "inner, widths",
    [
        (PromptLookup(num_tokens=20), [1, 8, 21]),
        (PromptLookup(num_tokens=4, max_tokens=9), [1, 5, 10]),
        (Oracle(max_depth=6), [1, 7]),
    ],
)
def test_a_single_node_and_short_drafts_have_passes_of_their_widths(inner, widths):
    assert compiled_widths(Auto(inner, 1.0), *target()) == widths


def test_it_cannot_be_part_of_a_hybrid():
    engine = Engine(target()[0], Hybrid(Auto(PromptLookup(), 1.0), PromptLookup()))
    params = Params(target()[1], {"copy": None, "head": None})
    with pytest.raises(SpecjaxError, match="Auto cannot be part of a hybrid"):
        jax.eval_shape(engine.prefill, params, prompt(1), jax.random.key(0))
