"""Folders that appear whole or not at all."""

import pytest

from specjax.core.files import new_folder


def test_a_new_folder_appears_only_when_it_is_complete(tmp_path):
    for error in (KeyboardInterrupt, RuntimeError):
        with pytest.raises(error), new_folder(tmp_path / "out") as unfinished:
            (unfinished / "file").write_text("half")
            raise error
        assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "out") as unfinished:
        (unfinished / "file").write_text("done")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "file"]
