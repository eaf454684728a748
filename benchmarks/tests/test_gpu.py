"""The GPU report: scripts set the accepted length and nothing else, and no report is lost.

Nothing here asserts how long anything took.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.gpu import measure as gpu_measure
from benchmarks.gpu.__main__ import GpuOptions, report
from benchmarks.gpu.methods import PAPER_METHODS
from benchmarks.gpu.record import markdown
from benchmarks.gpu.scripted import Scripted, pattern_of, script_of
from specjax.core.errors import SpecjaxError
from specjax.data.datastore import build
from specjax.data.datastore import params as datastore_params
from specjax.decoding import widths
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.decoding.engine import Engine
from specjax.decoding.generate import speculative_generate
from specjax.decoding.reference import reference_generate
from tests.decoding.heads import EAGLE2
from tests.decoding.tiny import prompt, target

PAGES = Path(__file__).parents[2] / "docs" / "results"
SMALL = {  # one program per method, for one text
    "sizes": ("tiny",),
    "size": "tiny",
    "context": 24,
    "contexts": (40,),
    "batches": (2,),
    "new_tokens": 12,
    "repeats": 1,
}


FEW = Retrieval(num_tokens=4, max_drafted=6, longest_query=8)
DATASTORE = datastore_params(build([[1, 2, 3, 1, 2, 4]], 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "params", "asked"),
    [
        (PromptLookup(num_tokens=4), EAGLE2.request._replace(drafter=None), 3.5),
        (EAGLE2.drafter, EAGLE2.request, 3.5),
        (FEW, EAGLE2.request._replace(drafter=DATASTORE), 2.25),
    ],
    ids=["chain", "tree", "tree of few valid nodes"],
)
def test_a_script_sets_the_accepted_length_and_not_the_text(inner, params, asked):
    model = target()[0]
    new_tokens = 63  # whole rounds, 18 or 28 of them
    plain, _ = reference_generate(
        params.target, prompt(2), jax.random.key(0), target=model, max_new_tokens=new_tokens
    )
    script = script_of(inner, params.drafter, plain, asked)
    found = speculative_generate(
        Params(params.target, script),
        prompt(2),
        jax.random.key(0),
        target=model,
        drafter=Scripted(inner),
        max_new_tokens=new_tokens,
    )
    np.testing.assert_array_equal(found.tokens, plain)
    lengths = 1 + pattern_of(asked)[: round(new_tokens / asked)]
    expected = np.bincount(lengths, minlength=inner.max_depth + 2)
    np.testing.assert_array_equal(found.stats.accepted_lengths, [expected] * 2)
    assert found.stats.mean_accepted_length == pytest.approx(asked)


@pytest.mark.slow
def test_a_report_has_all_its_files_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(widths, "DEFAULT_WIDTHS", ())  # one width of a pass compiles faster
    some = GpuOptions(tmp_path, methods=("pld", "pld-plus"), parts=("bandwidth", "rounds"), **SMALL)
    monkeypatch.setattr(gpu_measure, "NUM_BYTES", {"cpu": 2**12})
    monkeypatch.setattr(gpu_measure, "MANY_BYTES", 2**12)

    def reported(options):
        report(options)
        rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
        return {row["method"]: row for row in rows}, (tmp_path / "gpu.md").read_text()

    named, told = reported(replace(some, minutes=0.0))
    assert named == {}
    assert "- rounds, tiny, context 24, batch 1: pld-plus" in told and "- bandwidth: copy" in told

    def out_of_memory(base):
        raise RuntimeError("RESOURCE_EXHAUSTED: 9 bytes")

    failing = PAPER_METHODS["pld-plus"]._replace(make=out_of_memory)
    with monkeypatch.context() as patched:
        patched.setattr(gpu_measure, "PAPER_METHODS", {**PAPER_METHODS, "pld-plus": failing})
        named, told = reported(replace(some, minutes=9.0))
    assert set(named) == {"copy", "read", "pld-plus", "pld"}
    assert named["pld-plus"]["failed"] == "out of memory"
    assert named["pld"]["matches_plain"] and named["pld"]["rows"] == 11
    assert named["pld"]["accepted_length"] == pytest.approx(11 / 6)  # 6 whole rounds
    assert "rounds, tiny, context 24, batch 1: pld-plus: out of memory" in told

    again, told = reported(some)
    assert again["pld"] == named["pld"] and again["pld-plus"]["speed_over_plain"] > 0
    assert "| pld-plus, tiny, context 24, batch 1 |   71 |            3." in told
    assert "Not measured" not in told and "TOKENS DIFFER" not in told


def test_what_fails_is_told_and_ends_in_an_error(tmp_path, monkeypatch, capsys):
    def broken(engine, *rest):
        raise ValueError("no such kernel\nat line 3")

    monkeypatch.setattr(Engine, "lower", broken)
    options = GpuOptions(tmp_path, parts=("plain",), **SMALL)
    with pytest.raises(SpecjaxError, match=r"1 measurements failed.*ValueError: no such kernel'"):
        report(options)
    assert "Traceback" in capsys.readouterr().err
    assert "ValueError: no such kernel" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("speed",)}, "part 'speed'"),
        ({"methods": ("eagle3",)}, "method 'eagle3'"),
        ({"sizes": ("8t",)}, "size '8t'"),
        ({"size": "1b"}, "size '1b'"),
        ({"batches": (4, -1)}, "batches"),
        ({"minutes": float("nan")}, "minutes"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    with pytest.raises(SpecjaxError, match=message):
        report(GpuOptions(tmp_path / "new", **{**SMALL, **options}))
    assert not (tmp_path / "new").exists()


def test_a_report_of_another_device_is_kept(tmp_path):
    (tmp_path / "gpu.json").write_text('{"device": "abacus"}')
    with pytest.raises(SpecjaxError, match=r"holds another run \(device was 'abacus', now"):
        report(GpuOptions(tmp_path, **SMALL))


def test_the_page_is_that_of_the_kept_figures():
    kept = json.loads((PAGES / "gpu.json").read_text())
    rows, missing = kept.pop("rows"), kept.pop("not_measured")
    assert markdown(kept, rows, missing) == (PAGES / "gpu.md").read_text()
