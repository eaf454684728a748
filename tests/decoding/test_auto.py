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

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Context, Draw, Params, Proposal
from specjax.decoding.drafters.auto import Gated, assumed
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.gate_state import first_state
from specjax.decoding.drafters.length_rules import Fixed
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.prompt import from_ids
from specjax.decoding.round import pass_widths
from specjax.decoding.sampling import Sampling, row_keys
from specjax.decoding.tree import chain
from specjax.loading import auto_choice, load_drafter
from specjax.hub import LoadedTarget
from specjax.methods import check_settings
from specjax.models import pass_costs
from specjax.models.pass_costs import RowCosts, machine_of
from specjax.models.target import ModelOutput
from specjax.models.transformer import Transformer
from specjax.models.fingerprint import fingerprint
from specjax.tuned import Tuned, write_tuned
from tests.decoding.tiny import Oracle, Stateless, prompt, target

NEW_TOKENS = 120
WIDTHS, COSTS = (1, 5), (1.0, 2.5)
MACHINE = machine_of(target()[1])
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


@dataclass(frozen=True)
class CountedDraft(DraftModel):
    """Counts in the same way."""

    def propose(self, params: Params, state, context: Context, draw: Draw):
        jax.debug.callback(lambda: CALLS.append("propose"))
        return super().propose(params, state, context, draw)


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


def rounds_of(drafter, known=None) -> list[tuple[int, int]]:
    """Text length before each round of the first prompt, and how many tokens it drafted.

    The text is that of plain decoding.
    """
    model, params = target()
    lengths, drafted = [0], [0]
    for part in stream(
        Params(params, known),
        prompt(1),
        jax.random.key(1),
        target=model,
        drafter=drafter,
        max_new_tokens=NEW_TOKENS,
        rounds_per_call=1,
    ):
        lengths.append(int(part.length[0]))
        drafted.append(int(part.stats.drafted[0]))
        tokens = part.tokens[0].tolist()
    start = int(prompt(1).length[0])
    assert tuple(tokens) == whole_texts(1)[0][start:]
    return [(start + at, n) for at, n in zip(lengths, np.diff(drafted).tolist(), strict=False)]


def test_it_shuts_on_text_that_the_inner_drafter_gets_wrong_and_opens_when_it_is_right_again():
    start = int(prompt(1).length[0])
    lies = ((start + 20, start + 70),)
    rounds = rounds_of(Gated(Knows(whole_texts(1), lies), WIDTHS, COSTS, expected=3.0))
    before = [n for at, n in rounds if at < start + 17]
    assert before[0] == 0, "its cost is dear: the first draft must come true as a shadow"
    assert before[1:] and all(before[1:]), "all is accepted: it must not shut"
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
    assert (run(replace(gate, expected=4.0), 3).stats.drafted == 0).all(), "none has come true"
    few = run(replace(gate, expected=4.0, costs=(1.0, 1.4)), 3).stats
    assert (few.drafted > 0).all() and (few.drafted <= 4 * 4).all()


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


def test_to_be_asked_for_nothing_is_a_loss_and_gains_are_remembered_against_it():
    """The target drafts for itself, perfectly, as long as it has positions: then the gate shuts."""
    model, params = target()
    longest = 64
    draft = Transformer(replace(model.config, max_position_embeddings=longest))
    inner = CountedDraft(draft, Fixed(4), max_length=4)
    gate = Gated(inner, WIDTHS, (1.0, 1.0), expected=4.0, asked_cost=4.0)
    CALLS.clear()
    rounds = rounds_of(gate, {"draft": params, "rule": None})
    jax.effects_barrier()
    drafting = [at for at, n in rounds if n]
    assert all(at <= longest for at in drafting)
    assert len(drafting) < len(rounds) - 20
    # More than 30 tokens were gained, 30 are remembered; each further round loses 3 steps, and a
    # loss of more than 3 is too much.
    assert CALLS.count("propose") == len(drafting) + (30 + 3) // 3 + 1


def test_the_loop_compiles_the_widths_that_the_gate_says():
    gate = Gated(PromptLookup(num_tokens=20), (1, 4, 24, 64), (1.0, 1.5, 2.0, 4.0), 3.0)
    assert pass_widths(gate, gate.num_nodes) == [1, 4, 21]
    assert gate.pass_costs() == gate.pass_costs(8) == ((1, 1.0), (4, 1.5), (21, 2.0))
    assert pass_widths(PromptLookup(num_tokens=20), 21) == [1, 8, 21]


def test_a_batch_pays_for_its_own_rows():
    """One text would draft, at 1.5 steps a round; for four texts that pass is 10 times as dear."""
    row_costs = RowCosts((1, 5, 10), (1.0, 1.0, 4.0))
    inner = Knows(whole_texts(1) * 4)
    gate = Gated(inner, WIDTHS, (1.0, 1.5), expected=2.0, row_costs=row_costs)
    assert gate.pass_costs() == ((1, 1.0), (5, 1.5))
    assert gate.pass_costs(4) == ((1, 1.0), (5, 1.5 - 1.0 + 10.0))
    assert gate.pass_costs(10) == ((1, 1.0), (5, pytest.approx((1.5 - 1.0 + 28.0) / 4.0)))
    params = Params(target()[1])
    given = from_ids([whole_texts(1)[0][:20]] * 4, bucket=32)
    state = gate.init(params, given, ModelOutput(None, None, None), 64)
    draw = Draw(row_keys(jax.random.key(0), 4), given.length, Sampling())
    tree = gate.propose(params, state, Context(given.tokens, given.length), draw)[0].tree
    assert tree.num_valid().tolist() == [1] * 4


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"inner": Autoregressive()}, "Autoregressive cannot be gated"),
        ({"inner": Lookahead()}, "add no probe rows"),
        ({"row_widths": (1, 10), "costs": (1.0, 2.0)}, "to at least 11"),
        ({"row_widths": (2, 11), "costs": (1.0, 2.0)}, "must ascend from 1"),
        ({"costs": (1.0,)}, "one for each"),
        ({"costs": (1.0, 0.0)}, "must be finite and positive"),
        ({"costs": (1.0, float("nan"))}, "must be finite and positive"),
        ({"costs": (1.0, float("inf"))}, "must be finite and positive"),
        ({"expected": -1.0}, "expected -1.0 must be finite and at least 0"),
        ({"expected": float("nan")}, "expected nan must be finite"),
        ({"asked_cost": 0.9}, "asked_cost 0.9 must be finite and at least 1"),
    ],
)
def test_a_gate_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(SpecjaxError, match=message):
        replace(assumed(PromptLookup(), "cpu"), **fields)


def test_where_rows_are_dear_an_unmeasured_gate_opens_only_after_a_token_came_true():
    gate, elsewhere = (assumed(PromptLookup(), platform) for platform in ("cpu", "gpu"))
    state = first_state((), 1, gate.num_nodes - 1, gate.expected)
    drafted = jnp.array([gate.num_nodes])
    assert gate._width(state, drafted) == 1
    assert elsewhere._width(state, drafted) == gate.num_nodes
    one_true = replace(
        state, shadow_length=drafted - 1, num_true=jnp.array([1]), is_proven=jnp.array([True])
    )
    assert gate._width(one_true, drafted) == gate.num_nodes


@pytest.mark.parametrize(
    "widths, costs",
    [((2, 4), (1.0, 1.0)), ((1, 4), (2.0, 1.0)), ((1,), (1.0, 2.0)), ((1, 4), (1.0, np.nan))],
)
def test_costs_of_passes_that_cannot_be_are_refused(widths, costs):
    with pytest.raises(SpecjaxError, match=r"cannot cost .*; run `specjax tune machine` again"):
        RowCosts(widths, costs)


# ---- What load_drafter makes of a tuned file ---------------------------------------------------

CHOICE = {
    "device": MACHINE,
    "method": "pld",
    "settings": {"num_tokens": 7},
    "source": None,
    "row_widths": (1, 8),
    "costs": (1.0, 1.9),
    "expected": 4.5,
    "asked_cost": 1.1,
    "row_costs": {"widths": (1, 8), "costs": (1.0, 1.5)},
}


@pytest.fixture
def load(tmp_path):
    """Loads `auto` for the tiny target with `changes` in what was tuned."""
    model, params = target()
    tiny = LoadedTarget(model, params, None, model.config, "tiny")
    path = tmp_path / "specjax.json"

    def load(call, **changes):
        write_tuned(path, Tuned({"auto": CHOICE | changes}), fingerprint(model.config, params))
        return call(target=tiny, tuned=path)

    return load


def test_what_was_tuned_on_this_machine_is_loaded(load):
    drafter, params = load(partial(load_drafter, "auto"))
    costs = (1.0, 1.9), 4.5, 1.1, RowCosts((1, 8), (1.0, 1.5))
    assert drafter == Gated(PromptLookup(num_tokens=7), (1, 8), *costs)
    assert params is None
    assert str(load(auto_choice)) == "auto is pld (num_tokens=7), as tuned on this machine"
    assert load(partial(load_drafter, "auto"), method="plain", settings={})[0] == Autoregressive()


def test_what_was_tuned_elsewhere_is_not_used(load):
    elsewhere = {"device": "another chip, bfloat16"}
    drafter, _ = load(partial(load_drafter, "auto"), **elsewhere)
    assert drafter == assumed(PromptLookup(), "cpu")
    told = str(load(auto_choice, **elsewhere))
    expected = f"auto is pld, tuned on another chip, bfloat16 and not on this, {MACHINE}: `specjax"
    assert told.startswith(expected)


def test_a_machine_is_its_cores_and_the_dtype(monkeypatch):
    monkeypatch.setattr(pass_costs, "num_cores", lambda: 3)
    halves = {"embed_tokens": {"weight": jnp.zeros((2, 2), jnp.bfloat16)}}
    assert machine_of(halves) == "cpu, 3 cores, bfloat16"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"costs": 3}, "is damaged"),
        (
            {"method": "auto"},
            "is damaged .*the method cannot be 'auto'.*run `specjax tune machine`",
        ),
        ({"method": "lookahead", "settings": {}}, "is damaged .*the method cannot be 'lookahead'"),
        ({"method": ["pld"]}, "is damaged"),
        ({"row_costs": {"widths": [1]}}, "is damaged"),
        ({"row_costs": {"widths": [1, 8], "costs": [1, 0.5]}}, "cannot load pld.* cannot cost"),
        ({"costs": (1.0, float("nan"))}, "cannot load pld.* must be finite"),
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
    choice = auto_choice(LoadedTarget(model, params, None, model.config, "tiny"), path)
    assert not choice.is_tuned
    assert str(choice) == "auto is pld, not tuned: `specjax tune machine` measures what is best"
