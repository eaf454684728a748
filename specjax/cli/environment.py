"""What the command line sets for its own process: fewer warnings, and a cache of compiled code."""

import logging
import os
import sys
from pathlib import Path

from specjax.core.errors import SpecjaxError
from specjax.core.files import cache_folder

LEAST_COMPILE_SECONDS = 0.5  # what compiles faster is not worth a file


def quiet() -> None:
    """Hushes the libraries; what the user has set in the environment stays."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):  # a character that the terminal lacks is no failure
            output.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def use_compilation_cache() -> Path | None:
    """Keeps compiled programs in the user's cache folder, so that the second start is fast.

    Leaves a cache that is already chosen (`JAX_COMPILATION_CACHE_DIR`) alone, and does without
    where the folder cannot be made. Returns the folder, if this call chose one.
    """
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    try:
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, SpecjaxError):  # SpecjaxError: there is no home
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_COMPILE_SECONDS)
    return folder
