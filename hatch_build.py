"""Builds the native kernels into the wheel, or leaves them out where nothing can compile them."""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import (  # pyright: ignore[reportMissingImports]
    BuildHookInterface,
)

ROOT = Path(__file__).parent
LIBRARY = "specjax/kernels.bin"


def builder() -> Any:
    """Returns the module `native/build.py`."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "native" / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class KernelsHook(BuildHookInterface):
    """Compiles with the system's compiler or else with zig's; `SPECJAX_NATIVE=0` skips it."""

    def _is_wanted(self) -> bool:
        is_unix = sys.platform in ("linux", "darwin")
        return self.target_name == "wheel" and is_unix and os.environ.get("SPECJAX_NATIVE") != "0"

    def dependencies(self) -> list[str]:
        if not self._is_wanted():
            return []
        return ["jaxlib>=0.10.1,!=0.10.2"] + ([] if builder().compiler() else ["ziglang"])

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        try:
            (ROOT / LIBRARY).unlink(missing_ok=True)
            if not self._is_wanted():
                return
            builder().build(ROOT / LIBRARY)
        except (RuntimeError, OSError, ImportError) as error:
            self.app.display_warning(f"specjax is installed without native kernels: {error}")
            return
        build_data["artifacts"].append(LIBRARY)
        build_data["pure_python"] = False
        if version == "standard":  # one library for every Python, but for this platform alone
            machine = platform.machine()
            system = "linux" if sys.platform == "linux" else "macosx_11_0"
            build_data["tag"] = f"py3-none-{system}_{machine}"
