"""The provenance of results."""

import sys
from types import SimpleNamespace

import pytest

from specjax.core.provenance import command_line


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (None, "specjax --out 'a b'"),
        ("specjax.__main__", "specjax --out 'a b'"),
        ("recipes.smollm2.bench", "python -m recipes.smollm2.bench --out 'a b'"),
        ("benchmarks.gpu.__main__", "python -m benchmarks.gpu --out 'a b'"),
    ],
)
def test_a_result_names_the_command_that_made_it(monkeypatch, module, expected):
    spec = None if module is None else SimpleNamespace(name=module)
    monkeypatch.setattr("sys.argv", ["/some/where", "--out", "a b"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert command_line() == expected
