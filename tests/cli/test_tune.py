"""`specjax tune`, in this process, on a tiny random target."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from specjax.cli import main
from specjax.loading.drafters import load_drafter
from specjax.loading.methods import METHODS
from specjax.loading.targets import load
from specjax.loading.tuned import (
    AutoChoice,
    Tuned,
    auto_choice,
    machine_of,
    tuned_file,
    write_tuned,
)
from specjax.models.fingerprint import fingerprint
from specjax.tuning import machine, settings

FEW = ("--limit", "1", "--max-new-tokens", "24")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache folder, where tuned settings go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tune(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "NUM_TOKENS", (3, 6))
    monkeypatch.setattr(settings, "NUM_HEADS", (2,))
    tasks = tmp_path / "tasks.jsonl"
    text = "the quick brown fox jumps over the lazy dog. 0123456789"  # a head happens to copy
    tasks.write_text(json.dumps({"prompt": text}) + '\n{"prompt": 3}\n')

    def run(what: str, *options: str) -> int:
        return main(["tune", what, "--target", str(tiny), "--tasks", str(tasks), *FEW, *options])

    return run


@pytest.mark.slow
def test_what_is_tuned_is_kept_for_the_target_and_used(tiny, cache, tune, capsys):
    def found():
        return json.loads(tuned_file(load(tiny)).read_text())

    before = sorted(tiny.iterdir())
    assert tune("induction-heads") == 0
    heads = found()["induction_heads"]
    assert heads
    assert all(layer < 2 and head < 4 and times > 0 for layer, head, times in heads)
    assert [times for *_, times in heads] == sorted((times for *_, times in heads), reverse=True)
    assert "tasks.jsonl:2" in capsys.readouterr().err
    assert sorted(tiny.iterdir()) == before, "nothing is written beside the weights"
    assert [path.name[:5] for path in (cache / "specjax" / "tuned").iterdir()] == ["tiny-"]

    assert tune("pld-plus") == 0
    printed = capsys.readouterr().out
    assert "pld-plus: layer=" in printed
    for setting, values in (("layer", (1, 2)), ("num_tokens", (3, 6))):
        assert re.search(rf"{setting} +accepted length +tokens/s", printed)
        assert all(re.search(rf"^ *{value} +[1-9]\.\d\d +\d+", printed, re.M) for value in values)
    assert tune("pld-plus-attention") == 0
    assert found()["induction_heads"] == heads
    hidden, attention = (found()["settings"][name] for name in ("pld-plus", "pld-plus-attention"))
    assert hidden["layer"] in (1, 2)
    assert hidden["num_tokens"] in (3, 6)
    assert attention["heads"] in ([pair[:2] for pair in heads[:count]] for count in (2, len(heads)))

    drafter, _ = load_drafter("pld-plus-attention", load(tiny))
    assert drafter.heads == tuple(map(tuple, attention["heads"]))
    capsys.readouterr()
    ids = ("generate", "--target", str(tiny), "--prompt-ids", "5,6,5", *FEW[2:], "--json")
    assert main([*ids, "--method", "pld-plus-attention", "--compare"]) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


@pytest.mark.slow
def test_what_is_fastest_on_this_machine_is_kept(tiny, tune, cache, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "NUM_REPEATS", 1)
    monkeypatch.setattr(machine, "MIN_GAIN", 0.0)
    one = replace(METHODS["pld"], search_space=({"num_tokens": (3,)},))
    monkeypatch.setitem(METHODS, "pld", one)  # tests/tuning chooses between several
    out = tmp_path / "other.json"
    assert tune("machine", "--methods", "pld", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    for part in ("On 1 prompts", "Behind the gate, on all prompts", "auto: machine=", str(out)):
        assert part in printed
    assert list(json.loads(out.read_text())["settings"]) == ["auto"]
    assert not cache.exists()
    choice = auto_choice(load(tiny), out)
    assert (choice.method, choice.machine) == ("pld", machine_of(load(tiny)))
    assert load_drafter("auto", load(tiny), tuned=out)[0].break_even == choice.break_even


def test_folders_are_kept_by_their_absolute_paths(tune, tmp_path, monkeypatch):
    def choose(workload, variants, *_):
        _, source, given = variants["draft-model"]
        return AutoChoice("here", "draft-model", given, source)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specjax.cli.tune.tune_machine", choose)
    (tmp_path / "runs").mkdir()
    options = ("--drafter", "draft-model=runs", "--set", "draft-model.classifier=runs")
    assert tune("machine", *options, "--out", "out.json") == 0
    kept, folder = (
        json.loads(Path("out.json").read_text())["settings"]["auto"],
        str(tmp_path / "runs"),
    )
    assert (kept["source"], kept["settings"]) == (folder, {"classifier": folder})


def test_generate_says_in_a_line_what_auto_is(tiny, cache, capsys):
    ids = ("generate", "--target", str(tiny), "--prompt-ids", "5,6,5", "--max-new-tokens", "2")
    assert main([*ids, "--method", "auto"]) == 0
    assert "auto is pld, not tuned: `specjax tune machine`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        (("--drafter", "x"), "--drafter 'x' is not METHOD=FOLDER"),
        (("--methods", "pld,none"), "method 'none' is unknown"),
        (("--methods", "plain"), "method 'plain' cannot be used with auto; remove it"),
        (("--methods", "pld,eagle2"), "'eagle2' needs an EAGLE head; name a folder"),
    ],
)
def test_bad_requests_are_rejected_before_the_work(tune, capsys, options, message):
    assert tune("machine", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


@pytest.mark.parametrize("methods", ["long=pld", "pld,all"])
def test_other_names_of_methods_are_rejected_before_the_target_is_read(error_line, methods):
    assert main(["tune", "machine", "--target", "missing", "--methods", methods]) == 2
    assert f"--methods '{methods}' must list methods" in error_line()


def test_a_file_of_another_target_is_rejected(tiny, tmp_path, error_line):
    other, target = tmp_path / "other.json", load(tiny)
    wrong_layer = Tuned({"pld-plus": {"layer": 7}})
    own = fingerprint(target.config, target.params)
    copy = shutil.copytree(tiny, tmp_path / "copy")
    command = ["generate", "--method", "pld-plus", "--prompt-ids", "1,2", "--target"]
    for file, tuned, owner, message in (
        (other, Tuned(), "2x4x32-00000000", "was made for another model"),
        (other, wrong_layer, own, "hidden layer 7 does not exist"),
        (copy / "specjax.json", wrong_layer, own, "hidden layer 7 does not exist"),
    ):
        write_tuned(file, tuned, owner)
        options = ("--tuned", str(other)) if file == other else ()
        assert main([*command, str(tiny if options else copy), *options]) == 2
        assert message in error_line()
