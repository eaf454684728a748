"""Every notebook runs from top to bottom on this interpreter, and is stored without outputs.

All run in this process, so they share what is compiled, at settings smaller than their own.
"""

from dataclasses import replace
from pathlib import Path

import jax
import pytest

from specjax import notebook
from specjax.bench import bandwidth
from specjax.decoding import widths
from specjax.loading.methods import METHODS

nbformat = pytest.importorskip("nbformat")
interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
config = pytest.importorskip("traitlets.config")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TRAINING = """--limit 40 --num-steps 2 --eval-every 2 --log-every 1 --packing --longest 256
    --batch-size 2 --accumulate 1 --learning-rate 6e-3 --eval-prompts 1 --eval-tokens 8"""
SMALL = {
    "01_quickstart": {"MAX_NEW_TOKENS": 48, "NUM_RUNS": 1},
    "02_pld_plus": {"MAX_NEW_TOKENS": 48, "METHODS": ("plain", "pld-plus")},
    "03_train_a_head": {"OPTIONS": TRAINING, "METHODS": ("eagle",)},
    "04_parallel_spec": {"MAX_NEW_TOKENS": 24, "METHODS": ("plain", "parallel-eagle")},
    "05_disco": {"LIMIT": 2, "MAX_NEW_TOKENS": 48, "NUM_STEPS": 20, "RULES": ("disco",)},
    "06_lossless": {"MAX_NEW_TOKENS": 48, "NUM_TEXTS": 1, "METHODS": ("pld",)},
    "07_your_own_model": {
        "METHODS": "pld",
        "MAX_NEW_TOKENS": 48,
        "OPTIONS": "--limit 1 --runs 1",
        "TUNE": "--limit 1",
    },
    "08_several_devices": {"MAX_NEW_TOKENS": 48, "NUM_DEVICES": 1},
}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module", autouse=True)
def _one_width():
    """Compiles each target pass at its full width only; later tests start without these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widths, "DEFAULT_WIDTHS", ())
        yield
    jax.clear_caches()


def code_cells(path: Path) -> list:
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def test_all_are_run_smaller_than_they_are():
    assert [path.stem for path in NOTEBOOKS] == list(SMALL)


def test_the_first_cell_of_all_is_the_same():
    first = {code_cells(path)[0].source for path in NOTEBOOKS}
    assert len(first) == 1 and "%pip install" in first.pop()


@each_notebook
def test_it_is_stored_without_outputs(path):
    cells = code_cells(path)
    assert [cell.id for cell in cells if cell.outputs or cell.execution_count] == []


@pytest.mark.slow
@each_notebook
def test_it_runs(path, monkeypatch, tmp_path):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    one = replace(METHODS["pld"], search_space=({"num_tokens": (10,)},))
    monkeypatch.setitem(METHODS, "pld", one)  # all that `tune machine` tries
    monkeypatch.setattr(bandwidth, "NUM_BYTES", 2**20)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # `tune` needs what `bench` compiled
    settings = config.Config(HistoryManager={"enabled": False})
    shell = interactiveshell.InteractiveShell(config=settings)
    for cell in code_cells(path):
        result = shell.run_cell(cell.source, store_history=False)
        result.raise_error()
        if "parameters" in cell.metadata.get("tags", ()):
            assert SMALL[path.stem].keys() <= shell.user_ns.keys()
            shell.user_ns.update(SMALL[path.stem])


def test_the_largest_target_that_fits_is_taken():
    assert notebook.fitting(None) == ("pocket", None)
    t4, l4, a100 = (notebook.fitting(gigabytes * 10**9) for gigabytes in (11, 17, 40))
    assert t4 == ("HuggingFaceTB/SmolLM2-1.7B-Instruct", None)
    assert l4 == ("Qwen/Qwen2.5-7B-Instruct", "int8")
    assert a100 == ("Qwen/Qwen2.5-7B-Instruct", None)
