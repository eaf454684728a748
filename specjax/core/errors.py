"""The one exception type for requests and files that specjax cannot serve, and how programs end."""

import os
import sys
from collections.abc import Callable

USER_ERROR, BROKEN_PIPE, INTERRUPTED = 2, 1, 130  # exit codes


class SpecjaxError(ValueError):
    """A user-facing error: says what is wrong, where, and what to do next, in one line.

    The command line prints the message and exits with code 2; Python callers may catch it as a
    ValueError.
    """


def exit_code(run: Callable[[], None]) -> int:
    """Runs a program's work and returns its exit code, after one line about a `SpecjaxError`."""
    try:
        try:
            run()
        finally:
            sys.stdout.flush()
    except SpecjaxError as error:
        print("specjax:", " ".join(str(error).splitlines()), file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left; what Python flushes at exit must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return 0
