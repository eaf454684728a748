import json
from pathlib import Path

import pytest

from specjax.cli import main
from tests.cli.target import SHORT, write_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    write_target(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def generate(tiny, capsys):
    """Runs `specjax generate --json` and returns the object that it prints."""

    def run(*arguments: str, target: Path = tiny) -> dict:
        assert main(["generate", *SHORT, "--target", str(target), "--json", *arguments]) == 0
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1
        return json.loads(captured.out)

    return run


@pytest.fixture
def error_line(capsys):
    """Returns the one line on stderr, having checked that there is nothing else."""

    def read() -> str:
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("specjax: ")
        assert captured.err.count("\n") == 1
        return captured.err.rstrip("\n")

    return read
