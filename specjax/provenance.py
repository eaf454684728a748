"""What made a result: the versions of the libraries, and the commit of the source."""

import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("specjax", "jax", "flax", "optax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str]:
    """Of Python and of the libraries that results depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def revision() -> str | None:
    """The commit of the source tree that this is, if it is one; changed files are told."""

    def git(*arguments: str) -> str:
        here = Path(__file__)
        return subprocess.run(
            ["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # not somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=40")
    except (OSError, subprocess.CalledProcessError):
        return None
