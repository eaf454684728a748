"""The provenance of results."""

import sys
from types import SimpleNamespace

import pytest

from specjax.core.provenance import command_line


@pytest.mark.parametrize(
    ("module", "program", "expected"),
    [
        (None, "/usr/bin/specjax", "specjax --out 'a b'"),
        (None, "mine.py", "python mine.py --out 'a b'"),
        ("specjax.__main__", "/lib/specjax/__main__.py", "specjax --out 'a b'"),
        ("benchmarks.gpu.__main__", "/gpu/__main__.py", "python -m benchmarks.gpu --out 'a b'"),
        ("recipes.heads", "/recipes/heads.py", "python -m recipes.heads --out 'a b'"),
    ],
)
def test_a_result_names_the_command_that_made_it(monkeypatch, module, program, expected):
    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setattr("sys.argv", [program, "--out", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert command_line() == expected
