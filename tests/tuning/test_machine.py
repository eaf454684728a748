"""The choice of a method for a machine: on made-up times, and for real on a tiny target."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specjax.bench import measure
from specjax.bench.measure import GeneratedText, Sample
from specjax.bench.options import MethodVariant
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.engine import Engine
from specjax.loading.drafters import load_drafter
from specjax.loading.methods import METHODS
from specjax.loading.tuned import AutoChoice, Tuned, machine_of, write_tuned
from specjax.models.fingerprint import fingerprint
from specjax.run.runner import Runner
from specjax.tuning import machine
from specjax.tuning.machine import tune_machine
from specjax.tuning.runs import Workload
from tests.loading.tiny import tiny

PLD = {"pld": MethodVariant("pld")}
PROMPTS = [tuple(np.random.default_rng(seed).integers(0, 6, 12).tolist()) for seed in range(5)]


@pytest.fixture
def workload(tmp_path) -> Workload:
    """Its target is a folder, so what lies there is read as tuned for it."""
    return Workload(tiny(str(tmp_path)), PROMPTS, 16)


def keep(workload: Workload, name: str, settings: dict) -> Path:
    path = Path(workload.target.name) / name
    owner = fingerprint(workload.target.config, workload.target.params)
    write_tuned(path, Tuned(settings), owner)
    return path


def set_space(monkeypatch, method: str, *space) -> None:
    monkeypatch.setitem(METHODS, method, replace(METHODS[method], search_space=space))


@pytest.fixture
def made_up(monkeypatch):
    """Runs whose rounds take made-up times, by their width; all that they draft is accepted."""
    seen = []

    def make(cost_of, hiccups=()):
        def timed(runner, batch, number, repeat) -> Sample:
            width = runner.engine.drafter.num_nodes
            seen.append((width, batch[0].ids))
            seconds = cost_of(width) * (max(1, 60 // width)) * (50 if len(seen) in hiccups else 1)
            text = GeneratedText((0,) * 60, max(1, 60 // width))
            return Sample(runner.name, "", batch, number, repeat, (text,), 0.0, seconds, 0)

        monkeypatch.setattr(measure, "_timed", timed)
        monkeypatch.setattr(Engine, "warm_up", lambda *_: None)
        monkeypatch.setattr(Runner, "run", lambda *_: None)
        rounds = lambda runner, _: max(1, 60 // runner.engine.drafter.num_nodes)  # noqa: E731
        monkeypatch.setattr(Runner, "num_drafting_rounds", rounds)
        return seen

    return make


def test_the_slower_half_is_dropped_and_the_rest_runs_more_prompts(workload, made_up, monkeypatch):
    set_space(monkeypatch, "pld", {"num_tokens": (1, 2, 3, 4, 5)})
    seen = made_up(lambda width: 1 + 0.1 * width**2, hiccups=(9, 40))
    tables = {}

    def report(title, results):
        tables[title] = [each.name for each in results]

    choice = tune_machine(workload, PLD, True, report)
    two, three, one = (f"pld (num_tokens={n})" for n in (2, 3, 1))
    assert list(tables) == [
        *(f"On {n} prompts" for n in (2, 4, 5)),
        "Behind the gate, on all prompts",
    ]
    assert len(tables["On 2 prompts"]) == 5
    assert tables["On 4 prompts"] == [two, three, one]
    assert tables["On 5 prompts"] == [two, three]
    assert len({ids for width, ids in seen if width == 6}) == 2
    # A round over 3 rows takes 1.9 s where a step of plain decoding takes 1.1 s.
    expected = pytest.approx(1.9 / 1.1 - 1)
    assert (choice.settings, choice.widths, choice.break_even) == (
        {"num_tokens": 2},
        (1, 3),
        expected,
    )


def test_without_a_gain_plain_decoding_is_chosen(workload, made_up, monkeypatch):
    set_space(monkeypatch, "pld", {"num_tokens": (1, 2, 3)}, {"num_tokens": (5,)})
    made_up(float)
    seen = {}
    choice = tune_machine(
        workload, {"pld": MethodVariant("pld", None, {"num_tokens": 2})}, True, seen.__setitem__
    )
    assert [each.name for each in seen["On 2 prompts"]] == ["pld (num_tokens=2)"]
    assert choice == AutoChoice(machine_of(workload.target), "plain", widths=(1,))
    path = keep(workload, "out.json", {"auto": choice.record()})
    assert load_drafter("auto", workload.target, tuned=path) == (Autoregressive(), None)


def test_a_rule_is_not_tried_with_the_settings_of_another(workload, made_up, monkeypatch):
    spaces = {"occurrence": ("first",), "num_tokens": (1, 2)}, {"occurrence": ("last",)}
    set_space(monkeypatch, "pld", *spaces)
    made_up(float)
    for fixed, tried in (
        ({"occurrence": "last"}, {"pld (occurrence=last)"}),
        ({"occurrence": "first", "num_tokens": 3}, {"pld (occurrence=first, num_tokens=3)"}),
    ):
        seen = {}
        tune_machine(workload, {"pld": MethodVariant("pld", None, fixed)}, True, seen.__setitem__)
        assert {each.name for each in seen["On 2 prompts"]} == tried


@pytest.mark.slow
def test_a_small_target_is_tuned_and_the_choice_loaded(workload, monkeypatch):
    """By `pld-plus`, whose layer was tuned before: the choice keeps it, whatever is tuned later."""
    monkeypatch.setattr(machine, "MIN_GAIN", 0.0)
    monkeypatch.setattr(machine, "NUM_REPEATS", 1)
    set_space(monkeypatch, "pld-plus", {"num_tokens": (5, 0)})
    keep(workload, "specjax.json", {"pld-plus": {"layer": 2, "num_tokens": 9}})
    seen = {}
    choice = tune_machine(workload, {"pld-plus": MethodVariant("pld-plus")}, True, seen.__setitem__)
    assert (choice.method, choice.settings) == ("pld-plus", {"layer": 2, "num_tokens": 5})
    assert choice.break_even >= 0
    assert any(text.startswith("pld-plus is skipped: `num_tokens` must be") for text in seen)
    assert seen["On 2 prompts"][0].accepted_length >= 1
    chosen = load_drafter("pld-plus", workload.target, layer=2, num_tokens=5)[0]
    for later in ({}, {"pld-plus": {"layer": 0, "num_tokens": 6, "min_similarity": 0.9}}):
        keep(workload, "specjax.json", later)
        path = keep(workload, "out.json", {**later, "auto": choice.record()})
        gate, _ = load_drafter("auto", workload.target, tuned=path)
        assert gate == Auto(chosen, choice.break_even)


def test_unavailable_methods_raise_if_named_and_are_skipped_otherwise(workload, made_up):
    made_up(float)
    for method, message in (
        ("eagle2", "needs an EAGLE head"),
        ("lookahead", "cannot be used with auto"),
    ):
        with pytest.raises(SpecjaxError, match=message):
            tune_machine(workload, {method: MethodVariant(method)}, True)
    seen = {}
    tune_machine(workload, report=seen.__setitem__)
    assert any(title.startswith("eagle2 is skipped: method 'eagle2' needs") for title in seen)
    tried = {each.name.split()[0] for each in seen["On 2 prompts"]}
    assert tried == {"pld", "pld-plus", "pld-plus-attention", "recycling"}


def test_search_spaces_hold_settings_that_their_methods_take():
    for method, row in METHODS.items():
        for space in row.search_space:
            for name, values in space.items():
                assert values
                needed = {"tree": "dynamic"} if "tree" in space else {}
                for value in values:
                    METHODS.check(method, needed | {name: value})
    assert not any(METHODS[name].search_space for name in ("plain", "auto", "lookahead"))
