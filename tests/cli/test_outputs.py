"""Every path that a command writes to is checked before the work, here before the target loads."""

import pytest

from specjax.cli import main

WRITING = {
    "bench": ("bench", "--out"),
    "train a head": ("train", "eagle", "--out"),
    "train disco": ("train", "disco", "--out"),
    "tune": ("tune", "machine", "--out"),
    "datastore": ("datastore", "build", __file__, "--out"),
    "convert a head": ("convert", "nosuch", "--head-of", "nosuch"),
    "convert": ("convert", "nosuch"),
}


@pytest.mark.parametrize(
    "command, blocked",
    [*((command, "file/x") for command in WRITING), ("tune", "/proc/x/y"), ("tune", "n" * 300)],
)
def test_a_path_that_cannot_be_written_is_rejected_first(
    command, blocked, tmp_path, monkeypatch, error_line
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    target = () if command.startswith("convert") else ("--target", "nosuch")
    assert main([*WRITING[command], blocked, *target]) == 2
    assert "cannot write" in (line := error_line()) and line.endswith("choose another path")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file"]


def test_a_folder_instead_of_a_file_is_rejected_first(tmp_path, error_line):
    assert main([*WRITING["tune"], str(tmp_path), "--target", "nosuch"]) == 2
    assert f"cannot write {tmp_path} (Is a directory)" in error_line()
    page = tmp_path / "page"
    page.write_text("old")
    assert main([*WRITING["tune"], str(page), "--target", "nosuch"]) == 2
    assert "nosuch" in error_line()
    assert [path.name for path in tmp_path.iterdir()] == ["page"] and page.read_text() == "old"
