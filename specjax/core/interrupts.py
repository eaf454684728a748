"""Stopping at SIGINT and SIGTERM, such as those of Ctrl-C, SLURM, Colab and preempted machines."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised where work stops because of a signal; its text may say how to go on."""

    def __init__(self, number: int, advice: str = ""):
        super().__init__(advice)
        self.number = number

    @property
    def exit_code(self) -> int:
        """130 after SIGINT, 143 after SIGTERM."""
        return 128 + self.number


@contextmanager
def on_signal(react: Callable[[int], object]) -> Iterator[None]:
    """Calls `react` with the number of the first signal; a second one ends the process at once.

    Outside of the main thread, which alone receives signals, it does nothing. Signals that are
    ignored stay so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def first(number: int, _frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        react(number)

    ignored = [each for each in SIGNALS if signal.getsignal(each) == signal.SIG_IGN]  # by nohup
    before = {each: signal.signal(each, first) for each in SIGNALS if each not in ignored}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def stop(number: int) -> None:
    """Raises `Stopped`, wherever the main thread is."""
    raise Stopped(number)
