"""The folder of a run: one process, one set of settings, and lines that survive a kill."""

import json
import subprocess
import sys

import pytest

from specjax.core.errors import SpecjaxError
from specjax.core.folder import RunFolder

HOLD = """
import sys, time
from pathlib import Path
from specjax.core.folder import RunFolder

with RunFolder(Path(sys.argv[1])).lock():
    print("locked", flush=True)
    time.sleep(600)
"""


def test_the_lock_lasts_as_long_as_its_process(tmp_path):
    folder = RunFolder(tmp_path / "run")
    command = [sys.executable, "-c", HOLD, str(folder.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"locked\n"
        with pytest.raises(SpecjaxError, match="run is in use by another run; wait"), folder.lock():
            pass
        first.kill()
    with folder.lock():
        pass


def test_a_run_resumes_under_the_same_settings_only(tmp_path):
    folder = RunFolder(tmp_path)
    settings = {"rate": 0.1, "shape": (1, 2), "data": {"seed": 0}, "command": "a"}
    folder.claim(settings, resume=False)
    folder.claim(settings)
    folder.claim({**settings, "command": "b"}, ignored=["command"])
    with pytest.raises(SpecjaxError, match="already holds a run; add --resume"):
        folder.claim(settings, resume=False)
    with pytest.raises(
        SpecjaxError, match=r"another run \(seed was 0, now 1, extra was None, now 2"
    ):
        folder.claim({**settings, "data": {"seed": 1}, "extra": 2})
    RunFolder(tmp_path, "other.json").claim({"rate": 2})
    assert json.loads((tmp_path / "config.json").read_text())["rate"] == 0.1


def test_a_cut_last_line_is_ignored_and_removed(tmp_path):
    folder = RunFolder(tmp_path)
    assert list(folder.records("lines.jsonl")) == []
    folder.truncate("lines.jsonl")
    for number in range(3):
        folder.append("lines.jsonl", {"number": number})
    file = tmp_path / "lines.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"numb')
    assert list(folder.records("lines.jsonl", lambda line: line["number"])) == [0, 1, 2]
    folder.truncate("lines.jsonl")
    assert file.read_bytes() == whole
    folder.truncate("lines.jsonl", 1)
    assert file.read_bytes() == whole.splitlines(True)[0]


@pytest.mark.parametrize("line", ["nothing", "[1]", '{"other": 1}', "\x00"])
def test_a_damaged_line_is_named(tmp_path, line):
    (tmp_path / "lines.jsonl").write_text(f'{{"number": 1}}\n{line}\n')
    with pytest.raises(SpecjaxError, match=r"lines\.jsonl:2 is damaged .*; delete that line"):
        list(RunFolder(tmp_path).records("lines.jsonl", lambda line: line["number"]))
