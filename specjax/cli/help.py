"""Prints the help of a command: its usage, its options in sections, and examples.

Everything comes from the dataclass of the command: its docstring, the docstrings below its fields,
and two class variables. `sections` maps the first field of each section to its title, in the order
in which they are shown; `examples` are command lines.
"""

import ast
import inspect
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, UseAppendAction

MAX_WIDTH = 100
COLUMN = 24  # where the descriptions begin
MAX_CHOICES = 36  # characters of alternatives that are shown beside the option
[_, POSITIONAL] = (*get_args(Positional[str]),)
[_, REPEATABLE] = (*get_args(UseAppendAction[str]),)
METAVARS = {int: "N", float: "X", Path: "FILE"}

Sections = dict[str, list[tuple[str, str]]]  # of each title: options, and what they mean


def command_help(words: str, command: type) -> str:
    """Returns the help of a command; `words` are those that call it."""
    summary, _, rest = (inspect.getdoc(command) or "").partition("\n\n")
    sections = _sections(command)
    positional = [
        name if text.endswith("(required)") else f"[{name}]"
        for name, text in sections.get("arguments", ())
    ]
    parts = [fill(" ".join(["usage:", words, *positional, "[options]"]), 7), fill(summary)]
    parts += [fill(paragraph) for paragraph in rest.split("\n\n") if paragraph]
    parts += [listing(title, rows) for title, rows in sections.items()]
    return "\n\n".join([*parts, *_examples(command)])


def overview(words: str, about: str, name: str, commands: Mapping[str, type], end: str) -> str:
    """Returns the help of a program, or of a command that only has subcommands.

    Args:
        words: that call it.
        about: a description.
        name: of the choice, in capitals.
        commands: to choose from.
        end: printed last.
    """
    rows = [(each, _summary(command)) for each, command in commands.items()]
    parts = [f"usage: {words} {name} [options]", *map(fill, about.split("\n\n"))]
    more = f"`{words} {name} --help` shows the options of {name}."
    return "\n\n".join([*parts, listing(name, rows), more, *filter(None, [end])])


def flags_of(command: type) -> list[str]:
    """Returns the options of a command as they are typed, without their values."""
    rows = [row for some in _sections(command).values() for row in some]
    return [flag for option, _ in rows if (flag := option.split()[0]).startswith("--")]


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a class, inherited ones included."""
    found: dict[str, str] = {}
    for each in reversed(owner.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):  # it was not written in a file
            continue
        body = getattr(tree.body[0], "body", [])
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                value = getattr(text.value, "value", None)
                if isinstance(value, str) and isinstance(field.target, ast.Name):
                    found[field.target.id] = " ".join(value.split())
    return found


def _summary(command: type) -> str:
    return " ".join((inspect.getdoc(command) or "").partition("\n\n")[0].split())


def _sections(command: Any, defaults: Any = None) -> Sections:
    """Returns the options of a command by section; `defaults` is an instance that has others."""
    titles = getattr(command, "sections", {})
    sections: Sections = {title: [] for title in ("", *titles.values(), "other options")}
    title = "other options" if titles else "options"
    for field, kind, marks in _fields(command):
        title = titles.get(field.name, title)
        place = "" if POSITIONAL in marks else title
        default = getattr(defaults, field.name, field.default)
        if is_dataclass(kind):  # its options are flags of the command
            rows = [row for some in _sections(kind, default).values() for row in some]
        else:
            rows = [_row(command, field, kind, marks, default)]
        sections.setdefault(place, []).extend(rows)
    sections = {title: rows for title, rows in sections.items() if rows}
    first = sections.pop("", [])
    return {"arguments": first, **sections} if first else sections


def _fields(command: Any) -> list[tuple[Field, Any, tuple]]:
    """Returns each field with its type, without None, and the marks of its annotation."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for field in fields(command):
        hint, marks = hints[field.name], ()
        if get_origin(hint) is Annotated:
            hint, marks = hint.__origin__, hint.__metadata__
        if get_origin(hint) in (Union, UnionType):
            [hint] = [each for each in get_args(hint) if each is not NoneType]
        found.append((field, hint, marks))
    return found


def _row(command: type, field: Field, kind: Any, marks: tuple, default: Any) -> tuple[str, str]:
    """Returns an option as it is typed, and what it means."""
    text = field_docs(command).get(field.name, "")
    metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
    name = field.name.rpartition("_")[2].upper()
    if get_origin(kind) is Literal:
        choices = "|".join(get_args(kind))
        metavar = metavar or (choices if len(choices) <= MAX_CHOICES else name)
        if metavar != choices:
            text += f" One of {', '.join(get_args(kind))}."
    many = get_origin(kind) is tuple and REPEATABLE not in marks
    inner = get_args(kind)[0] if get_origin(kind) is tuple else kind
    metavar = (metavar or METAVARS.get(inner, name)) + " ..." * many
    hint = _hint(default, marks)
    if POSITIONAL in marks:
        return metavar, f"{text} {hint}".strip()
    flag = "--" + field.name.replace("_", "-")
    if default is True:
        flag = f"--no-{flag[2:]}"
    return (flag if kind is bool else f"{flag} {metavar}"), f"{text} {hint}".strip()


def _hint(default: Any, marks: tuple) -> str:
    """Returns what follows a description: the default, unless that means "none"."""
    if default is MISSING:
        return "(required)"
    if REPEATABLE in marks:
        return "(repeatable)"
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    is_silent = default is None or isinstance(default, bool) or default == ""
    return "" if is_silent else f"(default: {default})"


def listing(title: str, rows: list[tuple[str, str]]) -> str:
    """Returns a section; descriptions begin in one column."""
    lines = [f"{title}:"]
    for option, text in rows:
        head = fill(f"  {option}", 6)
        wrapped = fill(text, COLUMN, COLUMN)
        fits = len(option) <= COLUMN - 4 and "\n" not in head
        lines.append(head.ljust(COLUMN) + wrapped[COLUMN:] if fits else f"{head}\n{wrapped}")
    return "\n".join(lines)


def _examples(command: type) -> list[str]:
    examples = getattr(command, "examples", ())
    return ["\n".join(["examples:", *(f"  {line}" for line in examples)])] if examples else []


def fill(text: str, later: int = 0, first: int = 0) -> str:
    """Wraps a paragraph; never within a word or an option."""
    width = min(shutil.get_terminal_size().columns, MAX_WIDTH)
    lead = text[: len(text) - len(text.lstrip())] or " " * first
    return textwrap.fill(
        " ".join(text.split()),
        max(width, COLUMN + 20),
        initial_indent=lead,
        subsequent_indent=" " * later,
        break_long_words=False,
        break_on_hyphens=False,
    )
