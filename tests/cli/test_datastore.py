"""`specjax datastore`, and `generate --method rest`, which reads one."""

import json

import pytest

from specjax.cli import main
from tests.cli.target import SHORT


@pytest.fixture
def datastore(tiny, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("for value in values:\n    total = total + value\n" * 3)
    folder = tmp_path / "store"
    command = ["datastore", "build", str(text), "--target", str(tiny), "--out", str(folder)]
    assert main(command) == 0
    assert "of 1 documents" in capsys.readouterr().out
    return folder


def test_rest_reads_the_datastore(tiny, datastore, capsys):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2,3", *SHORT, "--compare"]
    command += ["--method", "rest", "--set", "max_drafted=6", "--drafter", str(datastore), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


def test_rest_without_a_datastore_says_how_to_make_one(tiny, error_line):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2", "--method"]
    assert main([*command, "rest"]) == 2
    assert "needs a datastore, which `specjax datastore build` makes; name a folder" in error_line()
    assert main([*command, "pld", "--drafter", "x"]) == 2
    assert "method 'pld' takes no drafter" in error_line()


def test_a_datastore_of_another_tokenizer_is_rejected(tiny, datastore, error_line):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2", "--method", "rest"]
    metadata = datastore / "datastore.json"
    values = json.loads(metadata.read_text()) | {"fingerprint": "0" * 16}
    metadata.write_text(json.dumps(values))
    assert main([*command, "--drafter", str(datastore)]) == 2
    assert "was built with tokenizer 0000000000000000, but the target's is" in error_line()
