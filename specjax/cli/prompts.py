"""Turns the options of a command into a Prompt: text, a file, token ids, or the example."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.decoding.prompt import Prompt
    from specjax.hub import LoadedTarget

MAX_ID = 2**31 - 1


# The edit task that `specjax generate` runs without a prompt.
INSTRUCTION = "Rename `count` to `run_length`."
SOURCE = '''\
def longest_run(values):
    """How many equal values follow each other at most."""
    best, count = 0, 0
    previous = None
    for value in values:
        if count > 0 and value == previous:
            count += 1
        else:
            count = 1
        previous = value
        best = max(best, count)
    return best'''
MESSAGE = f"{INSTRUCTION}\n{SOURCE}"


@dataclass(frozen=True)
class Source:
    """The text or the ids to continue, before tokenization."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    is_chat: bool = False  # the text is a user message for the chat template
    is_example: bool = False


def read_source(
    prompt: str | None, prompt_file: Path | None, prompt_ids: str | None, chat: bool
) -> Source:
    """Returns the prompt that was given, or else the example as a chat.

    Raises:
        SpecjaxError: if there is more than one prompt, or it is empty, unreadable or malformed.
    """
    if sum(given is not None for given in (prompt, prompt_file, prompt_ids)) > 1:
        raise SpecjaxError("more than one prompt; give one of PROMPT, --prompt-file, --prompt-ids")
    if prompt_ids is not None:
        if chat:
            raise SpecjaxError(
                "--chat needs text, but --prompt-ids gives ids; leave one of them out"
            )
        return Source(ids=_read_ids(prompt_ids))
    if prompt_file is not None:
        return Source(text=_read_file(prompt_file), is_chat=chat)
    if prompt is None:
        return Source(text=MESSAGE, is_chat=True, is_example=True)
    if not prompt:
        raise SpecjaxError(
            "the prompt is empty; write some text, or leave it out to run an example"
        )
    return Source(text=prompt, is_chat=chat)


def tokenize(source: Source, target: "LoadedTarget") -> "Prompt":
    """Tokenizes the prompt for a target.

    Raises:
        SpecjaxError: if the prompt is text and the target has no tokenizer.
    """
    from specjax.decoding.prompt import chat_ids, encode, from_ids

    if source.ids is not None:
        return from_ids([source.ids])
    assert source.text is not None
    if target.tokenizer is None:
        raise SpecjaxError(f"{target.name} has no tokenizer; give token ids: --prompt-ids 1,2,3")
    if not source.is_chat:
        return encode(target.tokenizer, [source.text])
    return from_ids([chat_ids(target.tokenizer, source.text)])


def _read_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"-?[0-9]{1,10}", part) or abs(int(part)) > MAX_ID:
            raise SpecjaxError(
                f"--prompt-ids: {part!r} is not a token id; give whole numbers such as 1,2,3"
            )
    return tuple(int(part) for part in parts)


def _read_file(path: Path) -> str:
    try:
        text = Path(os.path.expanduser(path)).read_bytes().decode("utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SpecjaxError(
            f"--prompt-file {path} cannot be read ({reason}); check the path"
        ) from None
    except UnicodeDecodeError:
        raise SpecjaxError(f"--prompt-file {path} is not UTF-8 text; convert it first") from None
    if not text:
        raise SpecjaxError(f"--prompt-file {path} is empty; write some text into it")
    return text
