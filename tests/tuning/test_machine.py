"""The choice of a method for a device: predictions against brute force, noise, and a real run."""

from dataclasses import replace
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.bench.measure import PLAIN, Request, Sample, Text
from specjax.decoding.drafters.auto import Gated
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.hub import LoadedTarget
from specjax.loading import TUNED_HEAD, load_drafter
from specjax.models.fingerprint import fingerprint, params_fingerprint
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.io.formats.medusa import MEDUSA
from specjax.models.io.head_files import save_head
from specjax.models.pass_costs import RowCosts, machine_of
from specjax.tuned import Tuned, read_tuned, write_tuned
from specjax.tuning import costs as costs_module
from specjax.tuning import machine, observation
from specjax.tuning.candidates import COPIED, Family, families
from specjax.tuning.costs import choose_widths, measure_row_costs
from specjax.tuning.machine import Result, best_of, result_of, settings_of, tune_machine
from specjax.tuning.observation import Observed, Round, cut
from specjax.tuning.prediction import (
    Candidate,
    Model,
    finalists,
    model_of,
    optimistic_speed,
    predict,
)
from specjax.tuning.serving import Serving
from tests.decoding.tiny import target

CPU = RowCosts((1, 2, 4, 8, 16), (1.0, 2.0, 2.2, 2.6, 3.4))
GPU = RowCosts((1, 8, 64), (1.0, 1.0, 1.01))


def written(num_tokens: int, wrong: set[int], longest: int) -> tuple[Round, ...]:
    """Rounds that write a text with a drafter that is wrong at certain places, and there only."""
    at, rounds = 0, []
    while at < num_tokens:
        accepted = next((n for n in range(longest) if at + n in wrong), longest)
        committed = min(accepted + 1, num_tokens - at)
        rounds.append(Round(longest, committed))
        at += committed
    return tuple(rounds)


# ---- Rounds ------------------------------------------------------------------------------------


def test_a_chain_that_is_cut_writes_what_a_shorter_one_writes():
    for seed in range(20):
        wrong = set(np.random.default_rng(seed).integers(0, 200, 25).tolist())
        for longest in (6, 50):
            text = written(200, wrong, longest)
            # An error that the bonus of a full round swallows cannot be seen.
            stretches = np.diff([0, *sorted(place + 1 for place in wrong)])
            if any(length % (longest + 1) == 0 for length in stretches):
                continue
            for length in range(1, longest + 1):
                assert cut([text], longest, length) == list(written(200, wrong, length))
    assert cut([text, text], 50, 50) == [*text, *text], "texts are apart"


def test_rounds_that_draft_nothing_stay_alone():
    text = (Round(4, 5), Round(0, 1), Round(4, 5), Round(4, 3), Round(2, 3), Round(0, 1))
    assert cut([text], 4, 2) == [
        *(Round(2, 3), Round(2, 2)),  # the next round had no draft, so nothing goes on
        Round(0, 1),
        *(Round(2, 3), Round(2, 3), Round(2, 2)),
        Round(2, 3),  # shorter than it may be: not known to go on
        Round(0, 1),
    ]


# ---- Widths ------------------------------------------------------------------------------------


def waste(costs: RowCosts, widths: tuple[int, ...], wanted: list[int]) -> float:
    return sum(costs.at(min(w for w in widths if w >= rows)) for rows in wanted)


def test_costs_between_and_beyond_measured_widths_lie_on_lines():
    assert CPU.at(3) == pytest.approx(2.1)
    assert CPU.at(16) == pytest.approx(3.4)
    assert CPU.at(26) == pytest.approx(4.4)


def test_few_widths_that_waste_least():
    numbers = np.random.default_rng(0)
    fine = RowCosts(tuple(range(1, 17)), tuple(1 + 0.2 * n for n in range(16)))
    for _ in range(5):
        wanted = numbers.choice([1, 3, 6, 10], 40, p=numbers.dirichlet([1.0] * 4)).tolist()
        found = choose_widths(fine, wanted, 16)
        assert found[0] == 1
        assert found[-1] == 16
        assert len(found) <= 5
        same_size = [(1, *some, 16) for some in combinations(range(2, 16), len(found) - 2)]
        least = min(waste(fine, widths, wanted) for widths in same_size)
        assert waste(fine, found, wanted) == pytest.approx(least)
    assert choose_widths(fine, [1, 10, 10, 5], 16) == (1, 5, 10, 16)


def test_a_width_that_saves_nothing_is_no_program():
    assert choose_widths(GPU, [1, 3, 5, 64, 64], 64) == (1, 64), "rows cost nothing"
    assert choose_widths(CPU, [16] * 99, 16) == (1, 16), "nothing shorter is drafted"
    assert choose_widths(CPU, [1], 1) == (1,)
    rare = choose_widths(CPU, [16] * 200 + [2], 16)
    assert rare == (1, 16), "too rare to pay"


# ---- Predictions -------------------------------------------------------------------------------


def observed(text: tuple[Round, ...], model: Model, widths: tuple[int, ...]) -> Observed:
    fitting = [min(w for w in widths if w > each.drafted) for each in text]
    pairs = zip(fitting, text, strict=True)
    cost = sum(model.round_cost(width, float(each.drafted)) for width, each in pairs)
    return Observed((text, text), (cost, 1.5 * cost))


@pytest.mark.parametrize("is_sequential", [False, True])
def test_the_predicted_speed_is_that_of_writing_it(is_sequential):
    model = Model(CPU, 0.1, is_sequential)
    wrong = {2, 9, 10, 31, 47, 60, 78, 93}
    longest, widths = 15, (1, 8, 16)
    text = written(100, wrong, longest)
    one = Observed((text,), observed(text, model, widths).costs[:1])
    drafter = PromptLookup(longest)
    found = model_of(one, CPU, drafter, is_sequential)
    assert found.overhead == pytest.approx(0.1)
    family = Family("pld", "chain", {n: {"num_tokens": n} for n in (1, 3, 7, 15)}, is_sequential)
    for size, each in zip((1, 3, 7, 15), predict(family, None, one, drafter, found), strict=True):
        rounds = written(100, wrong, size)
        assert each.num_nodes == each.row_widths[-1] == size + 1
        assert each.accepted_length == pytest.approx(100 / len(rounds))
        assert each.expected == pytest.approx(100 / len(rounds) - 1)
        cost = CPU.at(size + 1) + 0.1 * (size if is_sequential else 1)
        assert each.speed == pytest.approx(100 / len(rounds) / cost)
        assert each.costs == pytest.approx((1.0, *[cost] * (len(each.row_widths) - 1)))
        assert each.asked_cost == pytest.approx(1.1)


def test_rounds_without_a_draft_cost_little_and_count():
    text = (Round(0, 1),) * 30 + (Round(7, 8),) * 10
    model = Model(CPU, 0.0, False)
    drafter = PromptLookup(7)
    family = Family("pld", "chain", {7: {"num_tokens": 7}})
    [each] = predict(family, None, Observed((text,), (0.0,)), drafter, model)
    assert each.expected == 7
    assert each.accepted_length == pytest.approx(110 / 40)
    assert each.speed == pytest.approx(110 / (30 + 10 * 2.6))


def test_half_the_misses_are_granted_to_a_tree():
    text = (Round(2, 3), Round(2, 1), Round(2, 2), Round(2, 3))  # rates 3/4 and 2/3
    chain = Observed((text,), (1.0,))
    expected = 1 + 7 / 8 + 7 / 8 * 5 / 6
    assert optimistic_speed(chain, 2, 2, 2.0) == pytest.approx(expected / 2)
    assert optimistic_speed(chain, 2, 3, 1.0) == pytest.approx(expected + 7 / 8 * 5 / 6)


# ---- The choice --------------------------------------------------------------------------------


def candidate(method: str, num_nodes: int, speed: float) -> Candidate:
    return Candidate(method, {}, None, num_nodes, 2.0, 1.0, (1, num_nodes), (1.0, 2.0), 1.1, speed)


def test_finalists_are_few_and_differ():
    sizes = {("pld", 8): 1.9, ("pld", 9): 1.8, ("pld", 20): 1.7, ("pld", 64): 1.6}
    others = {("eagle", 8): 1.75, ("rest", 8): 0.5}
    made = [candidate(*key, speed) for key, speed in (sizes | others).items()]
    chosen = [(each.method, each.num_nodes) for each in finalists(made, 0.85, 8)]
    assert chosen == [("pld", 8), ("eagle", 8), ("pld", 20)]
    assert [each.method for each in finalists(made, 0.85, 2)] == ["pld", "eagle"]


def result(speed: float) -> Result:
    return Result(candidate("pld", 8, 2.0), speed, (speed, speed), 1.0, 1.0)


def test_a_tie_with_plain_decoding_is_plain_decoding():
    assert best_of([]) is None
    assert best_of([result(1.02), result(0.7)]) is None
    faster = result(1.3)
    assert best_of([result(1.2), faster, result(1.1)]) is faster.candidate


def sample(method: str, number: int, repeat: int, seconds: float) -> Sample:
    text = Text(tuple(range(12)), 4)
    batch = (Request("a", (1, 2)),)
    return Sample(method, "float32", batch, number, repeat, (text,), 0.0, seconds, 0)


def test_one_slow_moment_decides_nothing():
    noise = np.random.default_rng(1).lognormal(0, 0.01, (2, 2, 5))
    noise[0, 0, 3] = 40.0  # plain decoding was held up once: that is no gain
    noise[1, 1, 0] = 40.0
    lengths, gains = (1.0, 3.0), (0.5, 1.5)
    samples = [
        sample(name, number, repeat, noise[which, number, repeat] * lengths[number] / gain)
        for number in range(2)
        for repeat in range(5)
        for which, (name, gain) in enumerate([(PLAIN, 1.0), ("0", gains[number])])
    ]
    found = result_of(candidate("pld", 8, 2.0), "0", samples)
    assert found.speed == pytest.approx(4 / (1 / 0.5 + 3 / 1.5), rel=0.05)
    assert found.tokens_per_second == pytest.approx(24 / 4, rel=0.05)
    assert found.accepted_length == 3
    assert best_of([found]) is None


# ---- For real ----------------------------------------------------------------------------------


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setattr(costs_module, "NUM_REPEATS", 2)
    monkeypatch.setattr(costs_module, "WIDTHS", (1, 4, 16))
    monkeypatch.setattr(observation, "PLAIN_ROUNDS", 4)
    monkeypatch.setattr(machine, "NUM_RUNS", 1)
    monkeypatch.setattr(machine, "LEAST_SPEED", 0.0)
    monkeypatch.setattr(machine, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(machine, "MOST_FINALISTS", 1)
    model, params = target()
    numbers = np.random.default_rng(5)
    rows = [tuple(numbers.integers(0, 6, 12).tolist()) for _ in range(2)]
    requests = [Request(kind, ids) for kind, ids in zip("ab", rows, strict=True)]
    return Serving(LoadedTarget(model, params, None, model.config, "tiny"), requests, 16)


def test_families_have_members_that_their_methods_take(serving):
    own = machine.methods_of(serving)
    assert "pld" in own
    assert "eagle2" not in own
    assert "eagle2" in machine.methods_of(replace(serving, sources={"eagle2": "folder"}))
    names = machine.methods_of(replace(serving, target=replace(serving.target, name="pocket")))
    assert not {"plain", machine.AUTO} & set(names)
    found = families(names)
    assert {family.method for family in found} == set(names)
    for family in found:
        for settings in family.members.values():
            machine.METHODS[family.method].drafter(**settings)
    trees = [family.has_tree for family in found]
    assert trees == sorted(trees), "chains first"


def test_a_small_target_is_tuned_and_the_file_read(serving, tmp_path):
    seen: dict[str, list] = {"costs": [], "families": [], "results": []}
    report = machine.Report(
        costs=seen["costs"].append,
        family=lambda family, outcome: seen["families"].append((family.method, outcome)),
        results=seen["results"].extend,
    )
    found = tune_machine(serving, ("pld", "pld-plus", "lookahead"), report)
    [costs] = seen["costs"]
    assert costs.costs[0] == 1.0
    assert list(costs.costs) == sorted(costs.costs)
    tried = dict(seen["families"])
    assert len(tried["pld"]) == len(tried["pld-plus"]) == len(COPIED)
    assert "probe rows" in tried["lookahead"]
    [measured] = seen["results"]
    assert measured.speed > 0
    assert measured.candidate.method == found["method"]
    assert len(found["row_widths"]) == len(found["costs"]) <= 5

    path, owner = (
        tmp_path / "specjax.json",
        fingerprint(serving.target.config, serving.target.params),
    )
    write_tuned(path, Tuned({"pld": {"num_tokens": 4}, machine.AUTO: found}), owner)
    read = read_tuned(path, owner).settings
    assert read["pld"] == {"num_tokens": 4}
    assert dict(read["auto"]) == found
    drafter, _ = load_drafter("auto", serving.target, tuned=path)
    assert isinstance(drafter, Gated)
    assert drafter.row_widths == found["row_widths"]
    assert drafter.num_nodes == measured.candidate.num_nodes


def test_nothing_that_pays_is_plain_decoding(serving, tmp_path):
    path, target = tmp_path / "specjax.json", serving.target
    found = settings_of(None, serving, CPU)
    assert (found["method"], found["device"]) == ("plain", machine_of(target.params))
    write_tuned(path, Tuned({machine.AUTO: found}), fingerprint(target.config, target.params))
    assert load_drafter("auto", target, tuned=path) == (Autoregressive(), None)


def test_a_choice_stands_whatever_is_tuned_for_its_method_later(serving, tmp_path):
    """What is tuned beside the target is written into the choice, wherever that is kept."""
    target = replace(serving.target, name=str(tmp_path))
    owner = fingerprint(target.config, target.params)
    beside, other = tmp_path / "specjax.json", tmp_path / "other.json"
    write_tuned(beside, Tuned({"pld-plus": {"layer": 2, "num_tokens": 9}}), owner)
    found = Candidate(
        "pld-plus", {"num_tokens": 3}, None, 4, 2.0, 1.0, (1, 4), (1.0, 2.0), 1.1, 2.0
    )
    kept = settings_of(found, replace(serving, target=target), CPU)
    assert kept["settings"] == {"layer": 2, "num_tokens": 3}
    for tuned in ({}, {"pld-plus": {"layer": 0, "num_tokens": 5, "min_similarity": 0.9}}):
        write_tuned(beside, Tuned(tuned), owner)
        write_tuned(other, Tuned({**tuned, machine.AUTO: kept}), owner)
        drafter, _ = load_drafter("auto", target, tuned=other)
        assert drafter == Gated(
            PromptLookupPlus(layer=2, num_tokens=3), (1, 4), (1.0, 2.0), 1.0, 1.1, CPU
        )


def test_a_choice_with_a_head_holds_what_was_tuned_for_that_head(serving, tmp_path):
    target = replace(serving.target, name=str(tmp_path))
    heads = MedusaHeads(MedusaConfig.for_target(target.config, num_heads=2))
    lm_head = jax.random.normal(jax.random.key(0), (40, 32))
    about = {"target": target.config, "target_params": target.params, "layout": "specjax"}
    params = heads.initialise(jax.random.key(0), lm_head=lm_head)
    save_head(tmp_path / "head", MEDUSA, heads, params, jnp.float32, **about)
    tuned = {"choices": ((0,), (1,), (0, 0)), TUNED_HEAD: params_fingerprint(params)}
    owner = fingerprint(target.config, target.params)
    write_tuned(tmp_path / "specjax.json", Tuned({"medusa": tuned}), owner)
    widths = (1, 4), (1.0, 2.0)
    found = Candidate("medusa", {}, str(tmp_path / "head"), 4, 2.0, 1.0, *widths, 1.1, 2.0)
    kept = settings_of(found, replace(serving, target=target), CPU)
    assert kept["settings"] == {"choices": ((0,), (1,), (0, 0))}
    write_tuned(tmp_path / "other.json", Tuned({machine.AUTO: kept}), owner)
    drafter, _ = load_drafter("auto", target, tuned=tmp_path / "other.json")
    assert isinstance(drafter, Gated)
    assert drafter.num_nodes == 4


def test_wide_passes_are_measured_within_the_cache(serving):
    found = measure_row_costs(serving.target, 20, 24)
    assert found.widths == (1, 4)
