"""`specjax chat`: a conversation in the terminal."""

import re
import sys
from dataclasses import dataclass, replace
from io import TextIOWrapper
from signal import SIGINT
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from specjax.cli.decoding_options import DecodingOptions
from specjax.core.errors import SpecjaxError
from specjax.core.interrupts import Stopped, on_signal, stop

if TYPE_CHECKING:
    from specjax.decoding.prompt import Prompt
    from specjax.loading.targets import LoadedTarget

HINT = "/new starts a new conversation, /quit ends; end a line with \\ to continue it"
COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True)
class Chat(DecodingOptions):
    """Chat with a target in the terminal; drafted tokens are shown in green.

    Write a message and press Enter; a backslash at the end of a line continues the message. /new
    starts a new conversation, /quit or Ctrl-D ends, and Ctrl-C drops an answer.

      specjax chat --target FOLDER --system 'Be brief.'
      specjax chat --method eagle2 --temperature 0.7
    """

    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message before the conversation."""

    def run(self) -> None:
        from specjax.cli.generation import timed_text
        from specjax.cli.generation_output import GenerateOutput

        if isinstance(sys.stdin, TextIOWrapper):  # other bytes become a one-line error
            sys.stdin.reconfigure(errors="surrogateescape")
        output = GenerateOutput(is_json=False)
        target, request_for = self.load()
        target.require_tokenizer()
        opening = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages, state, compiled = list(opening), None, set()
        if sys.stdin.isatty():
            output.notes.print(HINT)
        output.legend()
        while (text := _next_message()) is not None:
            if text == "/new":
                messages, state = list(opening), None
                output.notes.print("a new conversation")
                continue
            if COMMAND.fullmatch(text):
                output.notes.print(HINT)
                continue
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            try:
                with on_signal(stop):  # the next answer can be interrupted again
                    request = request_for(_prompt(target, messages))
                    runner = replace(request.runner, seed=self.seed + len(messages))
                    request = replace(request, runner=runner, is_turn=True, earlier=state)
                    request.check()
                    shape = request.prompt.tokens.shape
                    if shape not in compiled:
                        with output.busy("compiling"):
                            request.compile()
                        compiled.add(shape)
                    run = output.stream(request)
                    state, result = run.state, timed_text(request, [run])
            except (SpecjaxError, Stopped) as error:
                if isinstance(error, Stopped) and error.number != SIGINT:
                    raise
                messages.pop()
                output.notes.print(
                    f"no answer kept: {str(error) or 'interrupted'}; /new starts again"
                )
                continue
            messages.append({"role": "assistant", "content": result.text or ""})
            output.notes.print(
                f"{len(result.tokens)} tokens, {result.tokens_per_second:.0f} tokens/s, accepted "
                f"length {result.mean_accepted_length:.2f}",
                style="dim",
            )
            output.warn([result])


def _next_message() -> str | None:
    """Returns the next message of the input, or None at its end."""
    text, prompt = "", "> "
    try:
        while (text := text + input(prompt if sys.stdin.isatty() else "")).endswith("\\"):
            text, prompt = f"{text[:-1]}\n", ". "
    except EOFError:
        return text.strip() or None
    return None if text.strip() == "/quit" else text.strip()


def _prompt(target: "LoadedTarget", messages: list[dict[str, str]]) -> "Prompt":
    from specjax.decoding.prompt import chat_ids, doubled_length, from_ids

    ids = chat_ids(target.tokenizer, messages)
    return from_ids([ids], doubled_length(ids))
