"""The gate: when it shuts, that it opens again, and that a shut one asks for nothing it must not.

Costs make drafting pay from the second accepted token on, unless a test says otherwise.
"""

import json
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.drafter import Context, Draw, Params, Proposal
from specjax.decoding.drafters import check_settings
from specjax.decoding.drafters.auto import Gated, assumed
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.round import pass_widths
from specjax.decoding.tree import chain
from specjax.drafting import auto_choice, load_drafter
from specjax.errors import SpecjaxError
from specjax.hub import Target
from specjax.tuned import Tuned, fingerprint, write_tuned
from tests.decoding.tiny import Oracle, Stateless, prompt, target

NEW_TOKENS = 120
WIDTHS, COSTS = (1, 5), (1.0, 2.5)
DEVICE = jax.devices()[0].device_kind
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Knows(Stateless):
    """Has no params: knows the texts as a setting. Its drafts are wrong within `lies`, spans of
    positions of the text."""

    texts: tuple[tuple[int, ...], ...]
    lies: Spans = ()
    max_depth: int = 4

    def propose(self, params: Params, state, context: Context, draw: Draw):
        at = context.length[:, None] + jnp.arange(self.max_depth)[None, :]
        drafted = jnp.take_along_axis(jnp.asarray(self.texts), at, axis=1, mode="clip")
        for start, end in self.lies:
            drafted = jnp.where((at >= start) & (at < end), (drafted + 1) % 40, drafted)
        return Proposal(chain(context.root, drafted, jnp.full_like(at[:, 0], 4))), state


@dataclass(frozen=True)
class CountedOracle(Oracle):
    """Counts what it is asked, by calls that a program makes when it gets there."""

    def propose(self, params: Params, state, context: Context, draw: Draw):
        jax.debug.callback(lambda: CALLS.append("propose"))
        return super().propose(params, state, context, draw)

    def update(self, params: Params, state, outcome):
        jax.debug.callback(lambda: CALLS.append("update"))
        return state


CALLS: list[str] = []


def run(drafter, batch: int = 1, known=None):
    model, params = target()
    return speculative_generate(
        Params(params, known),
        prompt(batch),
        jax.random.key(1),
        target=model,
        drafter=drafter,
        max_new_tokens=NEW_TOKENS,
    )


def whole_texts(batch: int) -> tuple[tuple[int, ...], ...]:
    """Prompt and continuation of each row."""
    given, out = prompt(batch), run(Autoregressive(), batch)
    rows = [
        [*np.asarray(given.tokens)[row, : given.length[row]].tolist(), *out.tokens[row].tolist()]
        for row in range(batch)
    ]
    longest = max(map(len, rows))
    return tuple(tuple(row + [0] * (longest - len(row))) for row in rows)


def rounds_of(drafter) -> list[tuple[int, int]]:
    """Text length before each round of the first prompt, and how many tokens it drafted."""
    model, params = target()
    lengths, drafted = [0], [0]
    for part in stream(
        Params(params),
        prompt(1),
        jax.random.key(1),
        target=model,
        drafter=drafter,
        max_new_tokens=NEW_TOKENS,
        rounds_per_call=1,
    ):
        lengths.append(int(part.length[0]))
        drafted.append(int(part.stats.drafted[0]))
    start = int(prompt(1).length[0])
    return [(start + at, n) for at, n in zip(lengths, np.diff(drafted).tolist(), strict=False)]


def test_it_shuts_on_text_that_the_inner_drafter_gets_wrong_and_opens_when_it_is_right_again():
    start = int(prompt(1).length[0])
    lies = ((start + 20, start + 70),)
    rounds = rounds_of(Gated(Knows(whole_texts(1), lies), WIDTHS, COSTS, expected=3.0))
    before = [n for at, n in rounds if at < start + 17]
    assert before and all(before), "all is accepted: it must not shut"
    during = [n for at, n in rounds if start + 20 <= at < start + 70]
    assert 1 <= np.count_nonzero(during) <= 4, "it shuts after few rounds"
    assert not any(during[5:]), "and stays shut"
    after = [(at, n) for at, n in rounds if at >= start + 70]
    opened = next(at for at, n in after if n)
    assert opened <= start + 70 + 8 + 4, "a pause of at most 7 rounds, and a few true tokens"
    assert all(n for at, n in after if at >= opened)


def test_it_never_lets_a_liar_in_that_tuning_had_found_useless():
    texts = whole_texts(3)
    gate = Gated(Knows(texts, ((0, 1000),)), WIDTHS, COSTS, expected=1.0)
    out = run(gate, 3)
    assert (out.stats.drafted == 0).all()
    np.testing.assert_array_equal(out.stats.rounds, [NEW_TOKENS] * 3)
    np.testing.assert_array_equal(out.tokens, run(Autoregressive(), 3).tokens)
    few = run(replace(gate, expected=4.0), 3).stats
    assert (few.drafted > 0).all() and (few.drafted <= 3 * 4).all()


def test_rows_share_a_gate_but_keep_their_own_text():
    """One row of three is right: what it gains does not pay for the pass of all."""
    texts = whole_texts(3)
    wrong = tuple(tuple((token + 1) % 40 for token in text) for text in texts)
    plain = run(Autoregressive(), 3)
    mixed = Knows((texts[0], *wrong[1:]))
    out = run(Gated(mixed, WIDTHS, COSTS, expected=4.0), 3)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.mean_accepted_length < 1.3
    cheap = run(Gated(mixed, WIDTHS, (1.0, 1.2), expected=4.0), 3)
    np.testing.assert_array_equal(cheap.tokens, plain.tokens)
    np.testing.assert_array_equal(cheap.stats.rounds, [NEW_TOKENS // 5, NEW_TOKENS, NEW_TOKENS])


def test_drafts_too_wide_to_pay_wait_while_narrow_ones_go_through():
    @dataclass(frozen=True)
    class TwoLengths(Knows):
        """The first row drafts one token, the other four."""

        def propose(self, params: Params, state, context: Context, draw: Draw):
            (tree, _), _ = super().propose(params, state, context, draw)
            counts = jnp.array([1, 4])
            return Proposal(chain(context.root, tree.tokens[:, 1:], counts)), state

    inner = TwoLengths(whole_texts(2))
    out = run(Gated(inner, (1, 2, 5), (1.0, 1.1, 50.0), expected=1.0), 2)
    assert out.stats.rounds.tolist() == [NEW_TOKENS // 2, NEW_TOKENS]
    assert out.stats.drafted.tolist() == [NEW_TOKENS // 2, 0]


@pytest.mark.parametrize("wrong_every", [0, 1])
def test_a_shut_gate_does_not_ask_a_drafter_with_params(wrong_every):
    known = jnp.asarray(whole_texts(1))
    gate = Gated(CountedOracle(4, wrong_every), WIDTHS, COSTS, expected=3.0)
    CALLS.clear()
    out = run(gate, known=known)
    jax.effects_barrier()
    rounds, drafted = int(out.stats.rounds[0]), int(out.stats.drafted[0]) // 4
    assert CALLS.count("propose") == CALLS.count("update") == drafted
    if wrong_every:
        assert rounds == NEW_TOKENS and 1 <= drafted <= 4
    else:
        assert rounds == drafted == NEW_TOKENS // 5


def test_the_loop_compiles_the_widths_that_the_gate_says():
    gate = Gated(PromptLookup(num_tokens=20), (1, 4, 24, 64), (1.0, 1.5, 2.0, 4.0), 3.0)
    assert pass_widths(gate, gate.num_nodes) == [1, 4, 21]
    assert gate.pass_costs == ((1, 1.0), (4, 1.5), (21, 2.0))
    assert pass_widths(PromptLookup(num_tokens=20), 21) == [1, 8, 21]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"inner": Autoregressive()}, "Autoregressive cannot be gated"),
        ({"inner": Lookahead()}, "add no probe rows"),
        ({"row_widths": (1, 10), "costs": (1.0, 2.0)}, "to at least 11"),
        ({"row_widths": (2, 11), "costs": (1.0, 2.0)}, "must ascend from 1"),
        ({"costs": (1.0,)}, "one for each"),
        ({"costs": (1.0, 0.0)}, "must be positive"),
        ({"expected": -1.0}, "at least 0"),
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(SpecjaxError, match=message):
        replace(assumed(PromptLookup(), "cpu"), **fields)


# ---- What load_drafter makes of a tuned file ---------------------------------------------------

CHOICE = {
    "device": DEVICE,
    "method": "pld",
    "settings": {"num_tokens": 7},
    "source": None,
    "row_widths": (1, 8),
    "costs": (1.0, 1.9),
    "expected": 4.5,
}


@pytest.fixture
def load(tmp_path):
    """Loads `auto` for the tiny target with `changes` in what was tuned."""
    model, params = target()
    tiny = Target(model, params, None, model.config, "tiny")
    path = tmp_path / "specjax.json"

    def load(call, **changes):
        write_tuned(path, Tuned({"auto": CHOICE | changes}), fingerprint(model.config, params))
        return call(target=tiny, tuned=path)

    return load


def test_what_was_tuned_on_this_device_is_loaded(load):
    drafter, params = load(partial(load_drafter, "auto"))
    assert drafter == Gated(PromptLookup(num_tokens=7), (1, 8), (1.0, 1.9), 4.5)
    assert params is None
    assert str(load(auto_choice)) == "auto is pld (num_tokens=7), as tuned on this device"
    assert load(partial(load_drafter, "auto"), method="plain", settings={})[0] == Autoregressive()


def test_what_was_tuned_elsewhere_is_not_used(load):
    drafter, _ = load(partial(load_drafter, "auto"), device="another chip")
    assert drafter == assumed(PromptLookup(), "cpu")
    told = str(load(auto_choice, device="another chip"))
    assert told.startswith(f"auto is pld, tuned on another chip, not on this {DEVICE}: `specjax")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"costs": 3}, "is damaged"),
        ({"settings": {"nope": 1}}, "has no setting 'nope'; .*run `specjax tune machine` again"),
        ({"method": "nope"}, "cannot load nope"),
        ({"row_widths": (1, 4)}, "at least 8"),
        (
            {"method": "rest", "settings": {}, "source": "/gone"},
            "auto cannot load rest.*gone.*run `specjax tune machine` again",
        ),
    ],
)
def test_a_choice_that_no_longer_loads_says_what_to_do(load, changes, message):
    with pytest.raises(SpecjaxError, match=message):
        load(partial(load_drafter, "auto"), **changes)


def test_auto_takes_neither_settings_nor_a_source(load):
    with pytest.raises(SpecjaxError, match="has none: `specjax tune machine` chooses them"):
        check_settings("auto", {"num_tokens": 3})
    with pytest.raises(SpecjaxError, match="leave out 'folder'"):
        load(partial(load_drafter, "auto", source="folder"))


def test_a_missing_entry_is_told(tmp_path):
    model, params = target()
    path = tmp_path / "specjax.json"
    owner = fingerprint(model.config, params)
    path.write_text(json.dumps({"target": owner, "settings": {}}))
    choice = auto_choice(Target(model, params, None, model.config, "tiny"), path)
    assert not choice.is_tuned
    assert str(choice) == "auto is pld, not tuned: `specjax tune machine` measures what is best"
