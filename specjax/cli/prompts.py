"""Reads prompts from options, files and standard input; the default is an embedded example."""

import os
import re
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specjax.core.errors import SpecjaxError
from specjax.core.files import expand_user, reading

if TYPE_CHECKING:
    from specjax.core.chat import Message
    from specjax.decoding.prompt import Prompt
    from specjax.loading.targets import LoadedTarget

MAX_ID = 2**31 - 1
MAX_BYTES = 2**23  # of a prompt: more than models have positions
STDIN = Path("-")

# The edit task that `specjax generate` runs without a prompt; pocket gets it right.
INSTRUCTION = "Rename `value` to `element`."
SOURCE = '''\
def longest_run(values):
    """Return the length of the longest run of equal values."""
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
    """The text, the messages or the ids to continue, before tokenization."""

    prompt: "str | tuple[Message, ...] | tuple[int, ...]"
    is_example: bool = False
    place: str = ""  # the file and line of the prompt

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str) and isinstance(self.prompt[0], dict)


def read_source(
    prompt: str | None,
    file: Path | None,
    ids: str | None,
    chat: bool,
    system: str | None,
    has_example: bool = True,
) -> Source | None:
    """Returns the prompt from the options or standard input, or else the example, if any."""
    if sum(option is not None for option in (prompt, file, ids)) > 1:
        raise SpecjaxError("more than one prompt; pass one of PROMPT, --prompt-file, --prompt-ids")
    is_chat = chat or system is not None
    if ids is not None:
        if is_chat:
            raise SpecjaxError(
                "--chat and --system need text, but --prompt-ids has ids; leave one of them out"
            )
        return Source(_parse_ids(ids))
    if file is not None or prompt == str(STDIN):
        text = _read_file(file or STDIN)
    elif prompt is not None:
        text = prompt
    elif not has_example:
        return None
    elif not (text := _piped_text()):
        return Source(_messages(MESSAGE, system), is_example=True)
    if not text:
        raise SpecjaxError(
            "the prompt is empty; write some text, or leave it out to run an example"
        )
    return Source(_messages(text, system) if is_chat else text)


def read_sources(file: Path, chat: bool, system: str | None = None) -> list[Source]:
    """Reads prompts from a JSONL file: strings, or objects with `prompt` or `messages`."""
    from specjax.data.conversations import read_messages
    from specjax.data.records import read_records

    sources = []
    for place, value, problem in read_records("/dev/stdin" if file == STDIN else file):
        if problem:
            raise SpecjaxError(f"{place} {problem}")
        record = value if isinstance(value, dict) else {"prompt": value}
        prompt = record.get("prompt") or record.get("messages")
        try:
            if not isinstance(prompt, str):
                prompt = _messages(read_messages(prompt), system)
            elif chat or system is not None:
                prompt = _messages(prompt, system)
        except SpecjaxError:
            raise SpecjaxError(
                f'{place} is not a prompt; write {{"prompt": "some text"}}, or messages with role '
                "and content"
            ) from None
        sources.append(Source(prompt, place=place))
    if not sources:
        raise SpecjaxError(f"--prompts {file} has no prompts; write one JSON object per line")
    return sources


def tokenize(source: Source, target: "LoadedTarget") -> "Prompt":
    """Tokenizes the prompt for a target."""
    from specjax.decoding.prompt import chat_ids, encode, from_ids

    prompt = source.prompt
    if isinstance(prompt[0], int):
        return from_ids([prompt])  # pyright: ignore[reportArgumentType]
    if target.tokenizer is None:
        raise SpecjaxError(f"{target.name} has no tokenizer; pass token ids: --prompt-ids 1,2,3")
    if isinstance(prompt, str):
        return encode(target.tokenizer, [prompt])
    return from_ids([chat_ids(target.tokenizer, prompt)])  # pyright: ignore[reportArgumentType]


def _messages(chat: "str | Sequence[Message]", system: str | None) -> "tuple[Message, ...]":
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    opening = [] if system is None else [{"role": "system", "content": system}]
    return (*opening, *messages)


def _parse_ids(text: str) -> tuple[int, ...]:
    ids = []
    for part in map(str.strip, text.split(",")):
        if not re.fullmatch(r"-?[0-9]{1,10}", part) or abs(int(part)) > MAX_ID:
            raise SpecjaxError(
                f"--prompt-ids: {part!r} is not a token id; pass whole numbers such as 1,2,3"
            )
        ids.append(int(part))
    return tuple(ids)


def _read_file(path: Path) -> str:
    name = "standard input" if path == STDIN else f"--prompt-file {path}"
    with (
        reading(name),
        nullcontext(sys.stdin.buffer) if path == STDIN else expand_user(path).open("rb") as file,
    ):
        content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SpecjaxError(f"{name} has more than {MAX_BYTES >> 20} MiB; pass a shorter text")
        if not content and path != STDIN:
            raise SpecjaxError(f"{name} is empty; write some text into it")
        return content.decode("utf-8-sig")


def _piped_text() -> str:
    """Returns the text of standard input if that is a pipe or a file."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # there is none
        return ""
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    if not select.select([sys.stdin], [], [], 1)[0]:
        print("reading the prompt from standard input ...", file=sys.stderr)
    return _read_file(STDIN)
