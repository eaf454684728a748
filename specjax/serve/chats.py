"""Formats chats in another process, so that a template's limits do not affect the server."""

import signal
import threading
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from specjax.core.chat import MAX_SECONDS, Message, chat_ids
from specjax.core.errors import SpecjaxError

START_SECONDS = 20.0  # for a new process, beside the seconds of a template


class ChatFormatter:
    """Formats chats in a process that it starts with the first chat; any thread may call it."""

    def __init__(self, tokenizer: Any):
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self._process: Any = None

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Returns the tokens of a chat as `chat_ids` does, and raises its errors."""
        with self._lock:
            try:
                if self._process is None:
                    self._start()
                self._pipe.send(messages)
                if not self._pipe.poll(MAX_SECONDS + START_SECONDS):
                    raise EOFError
                ids = self._pipe.recv()
            except (EOFError, OSError):
                self.stop()
                raise SpecjaxError(
                    "the process that formats chats crashed or took too long; try again"
                ) from None
        if isinstance(ids, SpecjaxError):
            raise ids
        return ids

    def stop(self) -> None:
        """Ends the process; another chat would start a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _start(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, self._tokenizer
        process = context.Process(target=_format_chats, args=arguments, daemon=True)
        process.start()
        self._process = process
        theirs.close()


def _format_chats(pipe: Connection, tokenizer: Any) -> None:
    """Answers messages with their tokens, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal goes to all processes
    while True:
        try:
            messages = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(chat_ids(tokenizer, messages))
        except SpecjaxError as error:
            pipe.send(error)
