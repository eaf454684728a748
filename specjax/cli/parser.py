"""Parses command lines with tyro: help from docstrings, errors in one line.

A command is a frozen dataclass: its docstring is its help, its fields are the options, and `run`
does the work. The first paragraph of the docstring is its line in the list of commands.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import reduce
from inspect import getdoc
from operator import or_
from typing import Annotated, Any, get_type_hints

import tyro
from tyro import _errors as events  # tyro's hook for errors; pyproject.toml pins its version
from tyro import conf
from tyro.conf import UseAppendAction, arg, subcommand
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError, check_fields, field_texts

COMPLETION = "--tyro-write-completion"
WIDTH = 76  # of the prose in help
SILENT_DEFAULTS = {"None", "False", "''", ""}
[REPEATABLE] = UseAppendAction[str].__metadata__  # pyright: ignore[reportAttributeAccessIssue]
[POSITIONAL] = conf.Positional[str].__metadata__  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class Group:
    """Several commands under one word; `load` may import slow modules."""

    about: str
    load: Callable[[], "Commands"]


Commands = Mapping[str, "type | Group"]


def parse(arguments: Sequence[str], commands: Commands, about: str = "") -> Any:
    """Returns the command that `arguments` describe; raises SystemExit after printing help."""

    def reject(event: events.ParseErrorEvent) -> None:
        raise SpecjaxError(_complaint(event, *_lookup(arguments, commands)))

    with events.on_parse_error(reject):
        command = tyro.cli(
            _union(commands, arguments),
            prog="specjax",
            description=_wrapped(about),
            args=arguments,
            config=(conf.FlagCreatePairsOff, conf.DisallowNone, conf.OmitArgPrefixes),
            registry=_registry(),
        )
    while hasattr(command, "chosen"):
        command = command.chosen
    try:
        check_fields(command)
    except SettingError as error:
        raise SpecjaxError(_as_option(str(error), type(command))) from None
    return command


def flags_of(command: type) -> list[str]:
    """Returns the options of a command as users type them."""
    flags, hints = [], get_type_hints(command, include_extras=True)
    for field in fields(command):
        if is_dataclass(hints[field.name]):
            flags += flags_of(hints[field.name])
        elif POSITIONAL not in getattr(hints[field.name], "__metadata__", ()):
            name = field.name.replace("_", "-")
            flags.append(f"--no-{name}" if field.default is True else f"--{name}")
    return flags


def _union(commands: Commands, arguments: Sequence[str]) -> Any:
    """Returns the type of the choice between `commands`; loads only the group that is chosen."""
    options = []
    for name, command in commands.items():
        is_chosen = list(arguments[:1]) in ([name], [COMPLETION])
        if isinstance(command, Group):
            chosen = _union(command.load(), arguments[1:]) if is_chosen else None
            field = ("chosen", Annotated[chosen, arg(name="", help="")])
            kind, about = make_dataclass(name.title(), [field]), command.about
        else:
            text = getdoc(command) or ""
            summary = " ".join(text.partition("\n\n")[0].split())
            kind, about = command, _wrapped(text) if is_chosen else summary
        options.append(Annotated[kind, subcommand(name, description=about)])
    return reduce(or_, options)


def _wrapped(text: str) -> str:
    """Wraps the paragraphs of a help text and indents them; tyro joins lines without indent."""
    parts = [
        part if part.startswith(" ") else textwrap.fill(part, WIDTH) for part in text.split("\n\n")
    ]
    return textwrap.indent("\n".join(parts), "  ")


def _registry() -> ConstructorRegistry:
    """Returns tyro's rules, with our reading of the fields of a dataclass."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def read_options(info: Any) -> StructConstructorSpec | None:
        if not is_dataclass(info.type) or getattr(info.type, "__parameters__", ()):
            return None  # tyro wraps a choice of commands in a generic dataclass
        owner: Any = info.type
        hints, texts = get_type_hints(owner, include_extras=True), field_texts(owner)
        options = []
        for field in fields(owner):
            kind, text = hints[field.name], texts.get(field.name, "")
            if "Literal" in str(kind):  # the choices are beside the option already
                text = text.rpartition(" One of ")[0]
            is_repeatable = REPEATABLE in getattr(kind, "__metadata__", ())
            hint = (lambda _: "(repeatable)") if is_repeatable else _default_hint
            annotated: Any = Annotated[kind, arg(help_behavior_hint=hint)]
            if is_dataclass(info.default):
                default = getattr(info.default, field.name)
            elif field.default_factory is not MISSING:
                default = field.default_factory()
            else:
                default = tyro.MISSING_NONPROP if field.default is MISSING else field.default
            options.append(StructFieldSpec(field.name, annotated, default, text))
        return StructConstructorSpec(owner, tuple(options))

    return registry


def _default_hint(default: str) -> str:
    return "" if default in SILENT_DEFAULTS else f"(default: {default})"


def _lookup(arguments: Sequence[str], commands: Commands) -> tuple[str, Any]:
    """Returns the words that name the chosen command, and its class; or a group's commands."""
    words, chosen = "specjax", commands
    for argument in arguments:
        if not isinstance(chosen, Mapping) or argument not in chosen:
            break
        words, chosen = f"{words} {argument}", chosen[argument]
        chosen = chosen.load() if isinstance(chosen, Group) else chosen
    return words, chosen


def _complaint(event: events.ParseErrorEvent, words: str, chosen: Any) -> str:
    """Describes an error in one line; `chosen` is a command, or the commands of a group."""
    is_group = isinstance(chosen, Mapping)
    more = f"`{words} --help` lists the {'commands' if is_group else 'options'}"
    match event:
        case events.UnrecognizedArgs(tokens=[token, *_]):
            name = token.partition("=")[0].replace("_", "-")
            if not is_group and not name.startswith("--"):
                return f"`{words}` has no place for {token!r}; put a text with spaces in quotes"
            kind = "option" if name.startswith("--") else "command"
            names = chosen if is_group else flags_of(chosen)
            nearest = get_close_matches(name, names, 1, cutoff=0.75)
            hint = f"did you mean {nearest[0]}? " if nearest else ""
            return f"`{words}` has no {kind} {name}; {hint}{more}"
        case events.MissingSubcommand():
            return f"`{words}` needs one of {', '.join(chosen)}; {more}"
        case events.MissingArgs(missing_arguments=missing):
            names = [item.arg.get_invocation_text()[1].as_str_no_ansi() for item in missing]
            return f"`{words}` needs {', '.join(names)}; {more}"
        case events.InvalidChoice(argument=option, value=value):
            name = option.display_name()
            return f"{name} {value!r} is not one of {option.lowered.metavar}; {more}"
        case events.InstantiationFailure(argument=option, message=message):
            if option is None:  # an error of the options together
                return _as_option(message, chosen)
            return f"{option.display_name()}: {message}; {more}"
        case events.BadValue(argument=option):
            return f"{option.display_name()} needs a value; {more}"
    return f"`{words}` cannot read its arguments; {more}"


def _as_option(message: str, command: type) -> str:
    """Replaces the name of a field at the start of a message by that of its option."""
    name = message.partition("`")[2].partition("`")[0]
    flag = "--" + name.replace("_", "-")
    return message.replace(f"`{name}`", flag, 1) if flag in flags_of(command) else message
