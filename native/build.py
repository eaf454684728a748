"""Compiles the kernels into a shared library: `python native/build.py FILE [FLAGS]`."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from multiprocessing.pool import ThreadPool
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=fast", "-fPIC", "-Wall", "-Wextra"]
# The names of `kernels.h`, with the flags that switch their instructions on.
INSTRUCTIONS = {"Portable": []}
if platform.machine() in ("aarch64", "arm64"):
    INSTRUCTIONS = {"Neon": []}
if platform.machine() in ("x86_64", "AMD64"):
    avx512 = ["-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"]
    bf16 = [*avx512, "-mavx512bf16"]
    INSTRUCTIONS |= {
        "Avx2": ["-mavx2", "-mfma", "-mf16c"],
        "Avx512": avx512,
        "Avx512Bf16": bf16,
        "Amx": [*bf16, "-mamx-tile", "-mamx-bf16"],
    }


def compiler() -> list[str] | None:
    """Returns the command of a C++ compiler, or None: $CXX, g++, clang++, or zig's.

    One that is too old for the instructions is passed over.
    """
    *_, flags = INSTRUCTIONS.values()
    for name in (os.environ.get("CXX", ""), "g++", "clang++"):
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            probe = [*command, *FLAGS, *flags, "-E", "-x", "c++", os.devnull]
            if subprocess.run(probe, capture_output=True).returncode == 0:
                return command
    try:
        import ziglang  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return [sys.executable, "-m", "ziglang", "c++"]


def build(library: Path, flags: list[str] | None = None) -> None:
    """Compiles the library; `flags` are added to every command, such as those of a sanitizer.

    Raises:
        RuntimeError: without a compiler, or with the output of one that fails.
    """
    import jaxlib

    command = compiler()
    if command is None:
        raise RuntimeError("no C++ compiler found; install g++ or clang++, or set CXX")
    with tempfile.TemporaryDirectory() as folder:
        handlers = Path(folder) / "handlers.o"
        headers = ["-isystem", str(Path(jaxlib.__file__).parent / "include")]
        objects = {handlers: [*headers, str(HERE / "handlers.cc")]}
        for name, features in INSTRUCTIONS.items():
            options = [f"-DINSTRUCTIONS={name}", *features, "-Wno-psabi"]
            objects[Path(folder) / f"{name}.o"] = [*options, str(HERE / "kernels.cc")]
        common = [*command, *FLAGS, *(flags or []), "-c", "-o"]
        with ThreadPool(os.cpu_count()) as pool:
            pool.map(lambda item: _run([*common, str(item[0]), *item[1]]), objects.items())
        link = ["-shared"] + ["-s"] * (sys.platform == "linux")  # -s leaves out the symbols' names
        _run([*command, *(flags or []), *link, *map(str, objects), "-o", str(library)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")


if __name__ == "__main__":
    build(Path(sys.argv[1]), sys.argv[2:])
