"""The small commands, and tests that need a separate process."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from specjax.bench.measure import GeneratedText, Program, Sample
from specjax.bench.results import ROWS, open_results
from specjax.bench.summary import summarise
from specjax.cli import main
from specjax.loading.methods import METHODS
from specjax.loading.targets import load
from specjax.run.tasks import TaskPrompt
from tests.cli.target import CONFIG, write_target

ROOT = Path(__file__).resolve().parents[2]


def test_a_converted_target_is_the_same(tiny, tmp_path, capsys, error_line):
    folder = tmp_path / "new" / "target"
    assert main(["convert", str(tiny), str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    before, after = load(tiny), load(folder)
    assert after.config == before.config
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = "model.embed_tokens.weight"  # which the code of EAGLE looks up in the index
    with safe_open(folder / index["weight_map"][name], "numpy") as file:
        assert file.get_slice(name).get_shape() == [CONFIG.vocab_size, CONFIG.hidden_size]
    for source, message in ((str(tiny), "delete it or choose another name"), ("nope", "a target")):
        out = folder if source != "nope" else tmp_path / "out"
        assert main(["convert", source, str(out)]) == 2
        assert message in error_line()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["new", "target"]


def test_both_versions_of_transformers_read_the_tokenizer_of_a_converted_target(tiny, tmp_path):
    """Version 4 has no class TokenizersBackend, and takes extra tokens as an object only."""
    source, folder = shutil.copytree(tiny, tmp_path / "source"), tmp_path / "target"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").write_text('{"eos_token_id": 1}')
    assert main(["convert", str(source), str(folder)]) == 0
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(settings.get("extra_special_tokens"), list)
    again = AutoTokenizer.from_pretrained(folder)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again.chat_template == tokenizer.chat_template
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": 1}


def test_convert_keeps_the_dtype_of_the_source(tiny, tmp_path, capsys):
    folder, again = tmp_path / "half", tmp_path / "again"
    assert main(["convert", str(tiny), str(folder), "--dtype", "bfloat16"]) == 0
    assert main(["convert", str(folder), str(again)]) == 0
    assert capsys.readouterr().out.endswith(f"to {again} in bfloat16\n")
    assert json.loads((again / "config.json").read_text())["dtype"] == "bfloat16"
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_methods_lists_every_method_within_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"\n  {name} " in out for name in METHODS)
    assert main(["methods", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_shows_the_meaning_and_default_of_every_setting(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["methods", name]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["methods", name, "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert list(settings) == list(METHODS[name].settings)
    for setting, values in settings.items():
        assert f"\n  {setting} " in out and values["meaning"].endswith(".")


def test_methods_says_what_works_with_a_target(tiny, tmp_path, capsys, error_line):
    assert main(["methods", "--target", str(tiny)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tiny: llama, 2 layers, texts of up to 320 tokens" in out
    assert "train it: specjax train hass" in out
    assert main(["methods", "pld-plus", "--target", str(tiny)]) == 0
    assert "for 32 layers" not in capsys.readouterr().out
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": 128}')
    assert main(["methods", "--target", str(tmp_path)]) == 2
    assert "config.json: num_experts 128: experts are not supported" in error_line()
    assert main(["methods", "psychic"]) == 2
    assert "'psychic' is unknown; choose one of plain, pld" in error_line()


def test_attribute_scores_a_quotesum_file(tiny, tmp_path, capsys):
    fields = {"question": "what?", "title1": "one", "source1": "a total of values", "source2": ""}
    good, other = "It is [ 1 a total of values ] .", "[ 1 total ]"
    rows = [json.dumps(fields | {"summary": summary}) for summary in (good, other)]
    path = tmp_path / "quotes.jsonl"
    path.write_text("\n".join([rows[0], "{", rows[1], '{"a": 1}']))
    assert main(["attribute", str(path), "--target", str(tiny)]) == 0
    captured = capsys.readouterr()
    assert "quotes.jsonl:2 is not JSON" in captured.err
    assert "quotes.jsonl:4" in captured.err
    assert "averaged over 2 examples" in captured.out
    assert [line.split()[0] for line in captured.out.splitlines()[1:4]] == ["2", "5", "8"]
    assert main(["attribute", str(path), "--target", str(tiny), "--layer", "9"]) == 2
    assert "layer 9" in capsys.readouterr().err


def test_pages_are_written_beside_the_results_or_nothing_is(tmp_path, capsys, error_line):
    text = GeneratedText((1, 2), 2, (0, 2), (False, False))
    sample = Sample("plain", "float32", (TaskPrompt("code", (5,)),), 0, 0, (text,), 0.1, 0.2, 0)
    results, page = tmp_path / "results", tmp_path / "results" / "report.md"
    page.mkdir(parents=True)
    open_results(results, {"target": "tiny"}).write_rows(summarise([sample], {"plain": Program()}))
    for folder, message in ((results, "cannot write"), (tmp_path / "none", "holds no benchmark")):
        assert main(["report", str(folder)]) == 2
        assert message in error_line()
    assert not list(results.glob("*.png"))
    page.rmdir()
    assert main(["report", str(results)]) == 0
    assert capsys.readouterr().out == f"written to {page}\n"
    assert "T=0, batch 1" in page.read_text()
    (results / ROWS).unlink()
    assert main(["report", str(results)]) == 2
    assert "has no results yet; repeat its command" in error_line()


def test_a_command_runs_without_a_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["methods"]) == 0


# ---- In a separate process ----------------------------------------------------------------------


def specjax(*arguments: str, stdout: int = subprocess.PIPE, environment: dict | None = None):
    return subprocess.run(
        [sys.executable, "-m", "specjax", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_failing_process_shows_one_line_and_no_traceback(tmp_path):
    """And none if its reader has left."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    run = specjax("methods", stdout=write_end)
    os.close(write_end)
    assert (run.returncode, run.stderr) == (1, "")
    run = specjax("generate", "best value", "--target", "nope")
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("specjax: 'nope' is not a target")
    with open("/dev/full", "w") as full:
        run = specjax("methods", stdout=full.fileno())
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "cannot write (No space left on device); free some space" in run.stderr
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    folder = str(tmp_path / "out")
    train = "train", "eagle", "--out", folder
    for command in (("generate",), ("methods",), ("convert", "pocket", folder), train):
        run = specjax(*command, environment=environment)
        assert (run.returncode, run.stderr.count("\n")) == (2, 1)
        assert "JAX finds no device for JAX_PLATFORMS=cuda" in run.stderr


@pytest.mark.slow
def test_a_process_keeps_its_compiled_programs_and_is_quiet(tmp_path):
    """And says what plain decoding says when it is compiled as users' programs are."""
    target = tmp_path / "target"
    write_target(target, replace(CONFIG, num_hidden_layers=1))
    chosen_by_tests = ("JAX_COMPILATION_CACHE_DIR", "JAX_NUMPY_RANK_PROMOTION", "XLA_FLAGS")
    environment = {name: os.environ[name] for name in os.environ if name not in chosen_by_tests}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    arguments = ("generate", "--target", str(target), "best value", "--json", "--compare")
    run = specjax(*arguments, environment=environment)
    assert run.returncode == 0
    assert json.loads(run.stdout)["identical"] is True
    assert run.stderr == ""
    assert any((tmp_path / "specjax" / "jax").iterdir())
