"""The provenance of a result: library versions, machine, and the commit of the source."""

import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LIBRARIES = ("specjax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain")


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed libraries that results depend on."""
    installed = {"python": platform.python_version()}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def machine() -> str:
    """Returns the processor's name and the number of cores this process may use."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {num_cores()} core" + "s" * (num_cores() > 1)


def num_cores() -> int:
    """Returns the number of processor cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def command_line() -> str:
    """Returns the command that started this process, as a user types it."""
    program, *arguments = sys.argv
    module = sys.modules["__main__"].__spec__  # None for a script or the installed command
    name = module.name.removesuffix(".__main__") if module else Path(program).name
    if name == "specjax":
        return shlex.join(["specjax", *arguments])
    return shlex.join(["python", *(("-m", name) if module else (program,)), *arguments])


def revision() -> str | None:
    """Returns the last commit that changed the package or its kernels; None outside git.

    Marked `-dirty` if any file of the repository has changed since its last commit.
    """

    def git(*arguments: str) -> str:
        options = {"cwd": package.parent, "capture_output": True, "text": True, "check": True}
        return subprocess.run(["git", *arguments], **options).stdout.strip()

    package = Path(__file__).parents[1]
    try:
        git("ls-files", "--error-unmatch", __file__)  # fails in another repository
        is_dirty = git("describe", "--always", "--dirty").endswith("-dirty")
        return git("log", "-1", "--format=%H", "--", package.name, "native") + "-dirty" * is_dirty
    except (OSError, subprocess.CalledProcessError):
        return None
