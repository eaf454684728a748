import json
from pathlib import Path

import pytest

from specjax.cli import main
from tests.cli.target import SHORT
from tests.cli.training import write_chats


@pytest.fixture(scope="session")
def train(tiny, tmp_path_factory):
    """Runs `specjax train METHOD --out OUT` on few texts, and returns the exit code."""
    data = write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")

    def run(method: str, out: Path, *arguments: str) -> int:
        sources = () if "--data" in arguments else ("--data", str(data))
        sources += () if "--target" in arguments else ("--target", str(tiny))
        return main(["train", method, "--out", str(out), *sources, *arguments])

    return run


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
