import subprocess

from specjax.core import provenance


def test_a_revision_is_the_last_commit_that_changed_the_package(tmp_path, monkeypatch):
    def git(*arguments):
        user = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *user, *arguments]
        ran = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return ran.stdout.strip()

    source = tmp_path / "specjax" / "core" / "provenance.py"
    source.parent.mkdir(parents=True)
    source.touch()
    (tmp_path / "README.md").touch()
    monkeypatch.setattr(provenance, "__file__", str(source))
    assert provenance.revision() is None
    git("init", "-q")
    git("add", "specjax")
    git("commit", "-qm", "code")
    code = git("rev-parse", "HEAD")
    git("add", ".")
    git("commit", "-qm", "docs")
    assert provenance.revision() == code
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / "kernel.cc").touch()
    git("add", ".")
    git("commit", "-qm", "kernel")
    code = git("rev-parse", "HEAD")
    assert provenance.revision() == code
    (tmp_path / "README.md").write_text("changed")
    assert provenance.revision() == code + "-dirty"
