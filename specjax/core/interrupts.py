"""Graceful shutdown on SIGINT and SIGTERM (Ctrl-C, SLURM, preemption), and limits of a block."""

import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

STATM = Path("/proc/self/statm")  # begins with the pages of this process
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Raised where work stops because of a signal; its text may say how to continue."""

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

    It does nothing outside of the main thread. Signals that are ignored stay ignored.
    """
    if not _is_main_thread():
        yield
        return

    def first(number: int, _frame: object) -> None:
        for handled in handlers:
            signal.signal(handled, signal.SIG_DFL)
        react(number)

    ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]  # nohup
    handlers = {number: signal.signal(number, first) for number in SIGNALS if number not in ignored}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def stop(number: int) -> None:
    """Raises `Stopped`, wherever the main thread is."""
    raise Stopped(number)


@contextmanager
def bounded(seconds: float, growth: int) -> Iterator[None]:
    """Raises TimeoutError if the block takes longer, MemoryError if it allocates more bytes.

    It does nothing outside of the main thread. Memory is bounded on Linux only, and allocations
    of other threads count.
    """
    if not _is_main_thread():
        yield
        return

    def expire(_number: int, _frame: object) -> None:
        raise TimeoutError(f"it takes more than {seconds:g} seconds")

    handler = signal.signal(signal.SIGALRM, expire)
    # It expires again if the exception is lost in a callback of the garbage collector.
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, seconds / 10)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if STATM.exists():
        num_bytes = int(STATM.read_text().split()[0]) * resource.getpagesize() + growth
        most = num_bytes if limits[0] < 0 else min(num_bytes, limits[0])
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
