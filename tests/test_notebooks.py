"""Every notebook runs from top to bottom on this interpreter, and is stored without outputs."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
POCKET = ROOT / "specjax" / "pocket" / "weights" / "target" / "model.safetensors"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


class OwnKernel(AsyncKernelManager):
    """The interpreter that runs this test, whatever kernels are installed."""

    @property
    def kernel_spec(self) -> KernelSpec:
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=command, display_name="Python 3", language="python")


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_it_is_stored_without_outputs(path):
    cells = nbformat.read(path, as_version=4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code
    assert [cell.id for cell in code if cell.outputs or cell.execution_count] == []


@pytest.mark.skipif(not POCKET.is_file(), reason="pocket has no weights yet")
@each_notebook
def test_it_runs(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    client = NotebookClient(
        nbformat.read(path, as_version=4),
        kernel_manager_class=OwnKernel,
        kernel_name="python3",
        timeout=600,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()  # raises on the first cell that does
