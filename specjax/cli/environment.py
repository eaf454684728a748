"""Sets up the process of a command: fewer warnings, and a cache of compiled programs."""

import logging
import os
import sys
from pathlib import Path

from specjax.core.errors import SpecjaxError
from specjax.core.files import cache_folder

MIN_COMPILE_SECONDS = 0.5  # programs that compile faster are not cached


def quiet() -> None:
    """Silences the libraries; environment variables that the user has set win."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):  # do not fail on characters the terminal lacks
            output.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def use_compilation_cache() -> Path | None:
    """Keeps compiled programs in the user's cache folder, so that the second start is fast.

    Starts the backend first. Does nothing if a cache is already set (`JAX_COMPILATION_CACHE_DIR`)
    or the folder cannot be created. Returns the folder if this call set it.

    Raises:
        SpecjaxError: if there is no such device as JAX_PLATFORMS asks for.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked = os.environ.get("JAX_PLATFORMS")
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise SpecjaxError(
            f"JAX finds no device for JAX_PLATFORMS={asked}{reason}; unset it, or install JAX for "
            "that device: pip install 'jax[cuda12]' or 'jax[tpu]'"
        ) from None
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    try:
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, SpecjaxError):  # SpecjaxError: there is no home folder
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    return folder
