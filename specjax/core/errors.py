"""The exception for requests and files that specjax cannot handle, warnings, and exit codes."""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from numbers import Integral
from signal import SIGINT
from typing import Any

from specjax.core.interrupts import Stopped, on_signal, stop
from specjax.core.text import visible

USER_ERROR, BROKEN_PIPE = 2, 1  # exit codes
FULL = (errno.ENOSPC, errno.EDQUOT)
LINE_SECONDS = 30.0  # between lines of a long job without a terminal


class SpecjaxError(ValueError):
    """A user-facing error: what is wrong, where, and what to do next.

    The command line prints its message in one line and exits with code 2.
    """


@contextmanager
def errors_at(place: object) -> Iterator[None]:
    """Puts the place in front of a SpecjaxError of the block."""
    try:
        yield
    except SpecjaxError as error:
        raise SpecjaxError(f"{place}: {error}") from None


def warn(text: str) -> None:
    """Prints a warning to stderr, with control characters made visible."""
    print("specjax:", visible(text), file=sys.stderr)


warn_once = cache(warn)


def throttled() -> Callable[[str], None]:
    """Returns a function that prints its text to stderr, at most once in `LINE_SECONDS`."""
    started = last = time.monotonic()

    def note(text: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= LINE_SECONDS:
            last = now
            print(f"{visible(text)}, {now - started:.0f} s", file=sys.stderr, flush=True)

    return note


def check_characters(name: str, text: str) -> None:
    """Raises SpecjaxError for unpaired surrogates, which tokenizers and files cannot hold."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecjaxError(f"{name} has an unpaired surrogate; pass whole characters")


def check_whole(name: str, value: Any, minimum: int) -> None:
    """Raises SpecjaxError unless `value` is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise SpecjaxError(f"{name} {value!r} is not a whole number; pass one")
    if value < minimum:
        raise SpecjaxError(f"{name} {value} must be at least {minimum}")


def check_ids(name: str, ids: Any, vocab_size: int) -> None:
    """Raises SpecjaxError if any of these token ids is outside the vocabulary."""
    import numpy as np

    ids = np.asarray(ids)
    invalid = ids[(ids < 0) | (ids >= vocab_size)]
    if invalid.size:
        raise SpecjaxError(
            f"{name} holds token id {invalid[0]}, outside the vocabulary of {vocab_size} (0 to "
            f"{vocab_size - 1}); tokenize it with the target's own tokenizer"
        )


def check_type(name: str, value: Any, kind: type | tuple[type, ...], advice: str) -> None:
    """Raises SpecjaxError for a value of another type; `advice` is what to pass."""
    if not isinstance(value, kind):
        raise SpecjaxError(f"{name} is of type {type(value).__name__}; pass {advice}")


def exit_code(run: Callable[[], None]) -> int:
    """Runs a program and returns its exit code; prints one line for a `SpecjaxError`.

    SIGINT and SIGTERM end it like Ctrl-C, with a line on how to continue where that is possible.
    """
    try:
        try:
            with on_signal(stop):
                run()
        finally:
            print(end="", flush=True)  # also without a standard output
    except SpecjaxError as error:
        warn(" ".join(str(error).splitlines()))
        return USER_ERROR
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(SIGINT)
        if advice := str(stopped):
            warn(advice)
        return stopped.exit_code
    except MemoryError as error:
        reason = f" ({error})" if str(error) else ""
        warn(f"there is not enough memory{reason}; use smaller settings")
        return USER_ERROR
    except BrokenPipeError:  # the reader of our output is gone
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        name = f" {error.filename}" if error.filename else ""
        warn(f"cannot write{name} ({error.strerror}); free some space")
        return USER_ERROR
    return 0


def _drop_output() -> None:
    """Gives Python's flush at exit somewhere to write to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
