"""The one exception type for requests and files that specjax cannot serve."""


class SpecjaxError(ValueError):
    """A user-facing error: says what is wrong, where, and what to do next, in one line.

    The command line prints the message and exits with code 2; Python callers may catch it as a
    ValueError.
    """
