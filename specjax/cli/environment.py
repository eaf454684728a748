"""Sets up the process of a command: logging, the compilation cache, distributed runs."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any

from specjax.core.errors import USER_ERROR, SpecjaxError, warn
from specjax.core.files import cache_folder, writable_folder

MIN_COMPILE_SECONDS = 0.02  # programs that compile faster are not cached
HEARTBEAT_SECONDS = 30  # the other processes end when one is silent for this long


def quiet() -> None:
    """Silences the libraries; environment variables that the user has set win."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # they slow down lowering
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    for output in (sys.stdout, sys.stderr):
        if hasattr(output, "reconfigure"):  # do not fail on characters the terminal lacks
            output.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]


def use_compilation_cache() -> None:
    """Keeps compiled programs in the user's cache folder, so that the second start is fast.

    It does nothing if `JAX_COMPILATION_CACHE_DIR` is set or the folder cannot be written.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = os.environ.get("JAX_PLATFORMS")
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        cause = f" for JAX_PLATFORMS={platforms}" if platforms else ""
        advice = "unset it, or " if platforms else ""
        raise SpecjaxError(
            f"JAX finds no device{cause}{reason}; {advice}install JAX for your device: "
            "pip install 'jax[cuda12]' or 'jax[tpu]'"
        ) from None
    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    try:
        folder = writable_folder(cache_folder() / "jax")
    except SpecjaxError:  # it cannot be written, or there is no home folder
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


@contextmanager
def distributed(processes: str | None) -> Iterator[None]:
    """Connects the processes of a run; ends this one with one line if another is lost.

    Only the first process prints results. `processes` is None for a single process.
    """
    if processes is None:
        yield
        return
    import jax

    try:
        cluster: list[Any] = []
        if processes != "auto":
            address, count, rank = processes.split(",")
            cluster = [address, int(count), int(rank)]
    except ValueError:
        raise SpecjaxError(
            f"--distributed {processes!r} is neither auto nor HOST:PORT,N,RANK; write "
            "10.0.0.1:9000,2,0"
        ) from None
    try:
        jax.distributed.initialize(
            *cluster,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        raise SpecjaxError(
            f"--distributed {processes}: the processes cannot connect "
            f"({str(error).splitlines()[0]}); pass HOST:PORT,N,RANK, with N processes of rank 0 to "
            "N - 1, and the address of rank 0"
        ) from None
    is_first = jax.process_index() == 0
    try:
        with nullcontext() if is_first else redirect_stdout(open(os.devnull, "w")):
            yield
    except (jax.errors.JaxRuntimeError, SpecjaxError) as error:
        reason = " ".join(str(error).splitlines())
        if not isinstance(error, SpecjaxError):
            reason = f"this or another process failed ({reason}); start all again with --resume"
        warn(reason)
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(USER_ERROR)  # a normal exit would wait for the others
