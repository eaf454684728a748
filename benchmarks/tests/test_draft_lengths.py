"""Rules for the draft length: what the oracle drafted, equation 1, and that all are measured."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import draft_lengths
from benchmarks.draft_lengths import LengthOptions
from benchmarks.oracle_file import ORACLE, read_oracle
from specjax import load
from specjax.core.errors import SpecjaxError
from specjax.decoding.widths import DEFAULT_WIDTHS
from specjax.loading.drafters import OTHER_RULES, TUNED_DRAFT, load_draft
from specjax.loading.tuned import Tuned, tuned_file, write_tuned
from specjax.models.fingerprint import fingerprint
from specjax.models.heads.length_classifier import LengthClassifier
from specjax.models.io.classifier import TrainedClassifier, save_classifier
from specjax.models.io.huggingface import save_transformer
from specjax.models.transformer import Transformer
from specjax.run.tasks import Request
from tests.cli.target import CONFIG, write_target


def write_pair(folder: Path) -> dict[str, str]:
    """Saves a tiny target, a draft that is often right, and a random classifier of theirs."""
    paths = {name: folder / name for name in ("target", "drafter", "classifier")}
    write_target(paths["target"])
    model = Transformer(CONFIG)
    own, noise = (model.initialise(jax.random.key(seed)) for seed in (3, 4))
    draft = jax.tree.map(lambda mine, its: mine + 0.3 * its, own, noise)
    save_transformer(paths["drafter"], CONFIG, draft, jnp.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(paths["target"] / name, paths["drafter"] / name)
    trained = TrainedClassifier(
        LengthClassifier(4).initialise(jax.random.key(5)),
        *(4, 0.5, "draft", "overlap"),
        *(fingerprint(CONFIG, params) for params in (own, draft)),
        *({}, {}, "0.1.0"),
    )
    save_classifier(trained, paths["classifier"])
    return {name: str(path) for name, path in paths.items()}


def test_rules_and_oracle_are_measured_side_by_side(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(DEFAULT_WIDTHS, 32, ())  # one width of a pass compiles faster
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "def total(values):"}\n{"prompt": "for value in values:"}\n')
    options = LengthOptions(
        **write_pair(tmp_path),
        tasks=str(tasks),
        limit=2,
        max_new_tokens=20,  # unlike other tests with such a pair, which want all widths
        static_length=3,
        max_length=6,
        runs=1,
        out=str(tmp_path),
    )
    draft_lengths.run(options)
    printed = capsys.readouterr().out
    rules = "plain heuristic static-5 static-opt confidence disco oracle".split()
    for rule in rules:
        assert f"tasks, {rule}" in printed
    assert " NO" not in printed
    assert "equation 1, static-opt of 3" in printed
    kept = read_oracle(tmp_path)
    assert kept is not None
    accepted = {row.rule: row.accepted_length for row in kept.rules}
    assert list(accepted) == rules
    [lengths] = kept.lengths  # the bonus is not drafted
    assert lengths.mean == pytest.approx(accepted["oracle"] - 1, abs=0.3)  # a cut round has none
    assert "static-5" in kept.equation_1[0]


def test_rules_draft_as_long_as_was_tuned_for_each(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target = load("pocket")
    draft = load_draft(target)
    others = {
        "fixed": {"rule": "fixed", "length": 4},
        "confidence": {"rule": "confidence", "max_length": 10},
    }
    tuned = {"rule": "disco", "max_length": 7, OTHER_RULES: others}
    tuned[TUNED_DRAFT] = fingerprint(draft.config, draft.params)
    owner = fingerprint(target.config, target.params)
    write_tuned(tuned_file(target), Tuned({"draft-model": tuned}), owner)

    def longest(**options):
        requests = [Request("x", (5, 6))]
        made = draft_lengths.contestants_of(target, LengthOptions(**options), requests)
        return [each.engine.drafter.max_length for each in made[1:]]

    assert longest() == [20, 5, 4, 10, 7, 20]
    assert longest(static_length=2, max_length=6) == [6, 5, 2, 6, 6, 6]


def test_the_oracles_drafts_are_read_off_the_texts():
    assert draft_lengths.drafted_lengths([]) == []
    yes, no = True, False
    assert draft_lengths.drafted_lengths([no, yes, yes, no, yes, no]) == [0, 2, 1]
    assert draft_lengths.drafted_lengths([no, yes, yes]) == [0, 2]
    found = draft_lengths.oracle_lengths("code", [[4, 2], [0, 40]])
    assert (found.mean, found.histogram) == (11.5, [1, 0, 1, 0, 1, *[0] * 15, 1])
    assert found.course == [2.0, *[None] * 4, 21.0, *[None] * 4]


@pytest.mark.parametrize("rate, length, cost", [(0.8, 5, 0.05), (0.5, 3, 0.0), (1.0, 4, 0.1)])
def test_equation_1_is_the_mean_of_truncated_runs(rate, length, cost):
    """Tokens per round are 1 + rate + rate^2 + ... + rate^length, in 1 + length * cost passes."""
    expected = sum(rate**power for power in range(length + 1)) / (1 + length * cost)
    assert draft_lengths.improvement_factor(rate, length, cost) == pytest.approx(expected)
    tokens = draft_lengths.improvement_factor(rate, length, cost=0.0)
    assert draft_lengths.acceptance_rate(tokens, length) == pytest.approx(rate, abs=1e-6)


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / ORACLE).write_text('{"about": {}, "lengths": [{"task": 1}]}')
    with pytest.raises(SpecjaxError, match=r"oracle\.json is damaged"):
        read_oracle(tmp_path)
    with pytest.raises(SpecjaxError, match="runs 0 must be at least 1"):
        draft_lengths.run(LengthOptions(runs=0))
