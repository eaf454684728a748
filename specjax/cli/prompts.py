"""Turns the options of a command into prompts: text, files, standard input, ids, or the example."""

import json
import os
import re
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from specjax.core.errors import SpecjaxError

if TYPE_CHECKING:
    from specjax.core.chat import Message
    from specjax.decoding.prompt import Prompt
    from specjax.loading.targets import LoadedTarget

MAX_ID = 2**31 - 1
MAX_BYTES = 2**23  # of a prompt: more than models have positions
MAX_FILE_BYTES = 2**28  # of many prompts
STDIN = "-"


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
    place: str = ""  # file and line that it comes from

    @property
    def is_ids(self) -> bool:
        """Whether it holds token ids."""
        return isinstance(self.prompt[0], int)


def read_source(
    prompt: str | None,
    prompt_file: Path | None,
    prompt_ids: str | None,
    chat: bool,
    system: str | None = None,
    is_needed: bool = True,
) -> Source | None:
    """Returns the prompt that was given, or that of standard input, or else the example as a chat.

    Unless `is_needed`, returns None if none of the options gives one.

    Raises:
        SpecjaxError: if there is more than one prompt, or it is empty, unreadable or malformed.
    """
    if sum(given is not None for given in (prompt, prompt_file, prompt_ids)) > 1:
        raise SpecjaxError("more than one prompt; give one of PROMPT, --prompt-file, --prompt-ids")
    if prompt_ids is not None:
        if chat or system is not None:
            raise SpecjaxError(
                "--chat and --system need text, but --prompt-ids gives ids; leave one of them out"
            )
        return Source(_read_ids(prompt_ids))
    if prompt_file is not None or prompt == STDIN:
        text = _read_file(prompt_file or Path(STDIN))
    elif prompt is not None:
        text = prompt
    elif not is_needed:
        return None
    else:
        text = _piped_text()
        if not text:
            return Source(_messages(MESSAGE, system), is_example=True)
    if not text:
        raise SpecjaxError(
            "the prompt is empty; write some text, or leave it out to run an example"
        )
    return Source(_messages(text, system) if chat or system is not None else text)


def read_sources(file: Path, chat: bool, system: str | None = None) -> list[Source]:
    """Reads prompts from the lines of a JSONL file: texts, or objects with `prompt` or `messages`.

    Raises:
        SpecjaxError: for a file that cannot be read or holds none, or a line of another form.
    """
    sources = []
    for number, line in enumerate(_read_file(file, "--prompts", MAX_FILE_BYTES).splitlines(), 1):
        if not line.strip():
            continue
        place = f"{file}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        row = {"prompt": row} if isinstance(row, str) else row
        found = (row.get("prompt") or row.get("messages")) if isinstance(row, dict) else None
        if isinstance(found, list) and all(map(_is_message, found)):
            sources.append(Source(_with_system(tuple(found), system), place=place))
        elif isinstance(found, str):
            prompt = _messages(found, system) if chat or system is not None else found
            sources.append(Source(prompt, place=place))
        else:
            raise SpecjaxError(
                f'{place} is no prompt; write {{"prompt": "some text"}}, or messages with role and '
                "content"
            )
    if not sources:
        raise SpecjaxError(f"--prompts {file} holds no prompts; write one JSON object a line")
    return sources


def tokenize(source: Source, target: "LoadedTarget", bucket: int | None = None) -> "Prompt":
    """Tokenizes the prompt for a target; `bucket` as in `from_ids`.

    Raises:
        SpecjaxError: if the prompt is text and the target has no tokenizer.
    """
    from specjax.decoding.prompt import BUCKET, chat_ids, encode, from_ids

    bucket = bucket or BUCKET
    if source.is_ids:
        return from_ids([source.prompt], bucket)  # pyright: ignore[reportArgumentType]
    if target.tokenizer is None:
        raise SpecjaxError(f"{target.name} has no tokenizer; give token ids: --prompt-ids 1,2,3")
    if isinstance(source.prompt, str):
        return encode(target.tokenizer, [source.prompt], bucket)
    return from_ids([chat_ids(target.tokenizer, source.prompt)], bucket)  # pyright: ignore[reportArgumentType]


def _messages(text: str, system: str | None) -> "tuple[Message, ...]":
    return _with_system(({"role": "user", "content": text},), system)


def _with_system(messages: "tuple[Message, ...]", system: str | None) -> "tuple[Message, ...]":
    return messages if system is None else ({"role": "system", "content": system}, *messages)


def _is_message(row: Any) -> bool:
    return isinstance(row, dict) and all(isinstance(row.get(k), str) for k in ("role", "content"))


def _read_ids(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"-?[0-9]{1,10}", part) or abs(int(part)) > MAX_ID:
            raise SpecjaxError(
                f"--prompt-ids: {part!r} is not a token id; give whole numbers such as 1,2,3"
            )
    return tuple(int(part) for part in parts)


def _read_file(path: Path, option: str = "--prompt-file", max_bytes: int = MAX_BYTES) -> str:
    try:
        if str(path) == STDIN:
            return _text_of(sys.stdin.buffer, "standard input", max_bytes)
        with Path(os.path.expanduser(path)).open("rb") as file:
            text = _text_of(file, f"{option} {path}", max_bytes)
    except OSError as error:
        reason = error.strerror or error
        raise SpecjaxError(f"{option} {path} cannot be read ({reason}); check the path") from None
    if not text:
        raise SpecjaxError(f"{option} {path} is empty; write some text into it")
    return text


def _text_of(file: BinaryIO, name: str, max_bytes: int) -> str:
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise SpecjaxError(f"{name} holds more than {max_bytes >> 20} MiB; give a shorter text")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise SpecjaxError(f"{name} is not UTF-8 text; convert it first") from None


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
    return _read_file(Path(STDIN))
