"""The one exception type for requests and files that specjax cannot handle, and exit codes."""

import os
import sys
from collections.abc import Callable
from functools import cache
from signal import SIGINT

from specjax.core.interrupts import Stopped, on_signal, stop

USER_ERROR, BROKEN_PIPE = 2, 1  # exit codes


class SpecjaxError(ValueError):
    """A user-facing error whose message says what is wrong, where, and what to do next.

    The command line prints the message in one line and exits with code 2; Python callers may catch
    it as a ValueError.
    """


def warn(text: str) -> None:
    """Prints a warning to stderr."""
    print("specjax:", text, file=sys.stderr)


warn_once = cache(warn)


def check_at_least(name: str, value: float | int, minimum: int, why: str = "") -> None:
    """Raises SpecjaxError if the setting `name` is below its minimum."""
    if value < minimum:
        reason = f": {why}" if why else ""
        raise SpecjaxError(f"{name} {value} must be at least {minimum}{reason}")


def exit_code(run: Callable[[], None]) -> int:
    """Runs a program and returns its exit code; prints one line for a `SpecjaxError`.

    At SIGINT or SIGTERM it ends as at Ctrl-C, and says how to go on where that is possible.
    """
    try:
        try:
            with on_signal(stop):
                run()
        finally:
            sys.stdout.flush()
    except SpecjaxError as error:
        print("specjax:", " ".join(str(error).splitlines()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Stopped) else Stopped(SIGINT)
        if advice := str(stopped):
            warn(advice)
        return stopped.exit_code
    except BrokenPipeError:
        # The reader of our output is gone; give Python's flush at exit somewhere to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0
