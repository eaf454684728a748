"""Makes edit tasks: an instruction and a piece of code go in, the edited code comes out.

The instruction determines the answer, so greedy decoding can be scored by equality. Most of an
answer is a copy of the prompt, as in real code editing.
"""

import ast
import builtins
import keyword
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from recipes.pocket.source import (
    changeable_literals,
    has_word,
    parses,
    renamable_names,
    replace_at,
    seedable_bugs,
    split_docstring,
)

BEGIN, END, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BEGIN, END, USER, ASSISTANT)  # tokens 0, 1, 2, 3

KINDS = ("rename", "constant", "fix", "add-docstring", "strip-docstring")
DOCSTRING_LENGTH = 90

_RENAME_PHRASES = (
    "Rename `{old}` to `{new}`.",
    "Replace the name `{old}` with `{new}`.",
    "Change the name `{old}` to `{new}` everywhere.",
    "`{old}` should be called `{new}`.",
)
_CONSTANT_PHRASES = (
    "Change `{old}` to `{new}`.",
    "Replace `{old}` with `{new}`.",
    "Instead of `{old}` use `{new}`.",
)
_FIX_PHRASES = (
    "Fix the bug: `{old}` should be `{new}`.",
    "There is a bug: `{old}` should be `{new}`.",
    "Correct `{old}` to `{new}`.",
)
_ADD_PHRASES = (
    'Add the docstring "{text}" to `{name}`.',
    'Document `{name}`: "{text}"',
    'Give `{name}` this docstring: "{text}"',
)
_STRIP_PHRASES = (
    "Remove the docstring of `{name}`.",
    "Delete the docstring from `{name}`.",
    "Strip the docstring.",
)
_NOUNS = (
    "account amount batch block bound buffer cell channel chunk column count cursor depth digit "
    "element entry event field flag folder frame group handle header height index item kernel key "
    "label layer length level limit line link list marker mask message mode module name node "
    "number object offset option order owner packet page parent part path pattern piece point port "
    "prefix query queue range rank ratio reader record region request result root row rule sample "
    "scale scope score section segment series server shape signal size slot source stack stage "
    "start state status step stream suffix table tag target task term text time title token total "
    "tree unit user value vector version weight width window word worker writer zone"
).split()
_QUALIFIERS = (
    "active base best cached child clean common current default extra final first fixed full given "
    "global inner input large last left local main max min new next old open outer output pending "
    "plain previous public raw real ready right safe second shared short simple single small "
    "sorted special static temp total unique upper valid visible"
).split()
_VERBS = (
    "add apply build check clear close collect compute copy count create drop emit fetch fill find "
    "format get handle insert join load lookup make mark match merge move open pack parse pick "
    "prepare print process pull push read reduce remove render reset resolve run save scan select "
    "send set show sort split start store take test update use validate visit wrap write"
).split()


@dataclass(frozen=True)
class EditTask:
    """One edit: `instruction` applied to `source` gives exactly `result`."""

    kind: str
    instruction: str
    source: str
    result: str

    @property
    def message(self) -> str:
        """The user's message, whose answer is `result`."""
        return f"{self.instruction}\n{self.source}"


def prompt_text(task: EditTask) -> str:
    """Returns the prompt of a task, up to where the answer begins."""
    return f"{BEGIN}{USER}{task.message}{ASSISTANT}"


def answer_text(task: EditTask) -> str:
    """Returns the right continuation of `prompt_text`, end token included."""
    return task.result + END


def make_edit(kind: str, piece: str, rng: random.Random) -> EditTask | None:
    """Returns a task of this kind, or None if the piece does not allow one.

    Source and result parse, and differ.
    """
    task = _MAKERS[kind](piece, rng)
    if task is None or task.result == task.source:
        return None
    return task if parses(task.source) and parses(task.result) else None


def _rename(piece: str, rng: random.Random) -> EditTask | None:
    names = renamable_names(piece)
    if not names:
        return None
    old, is_function, starts = rng.choice(names)
    new = _new_name(old, is_function, rng)
    if has_word(piece, new):
        return None
    instruction = rng.choice(_RENAME_PHRASES).format(old=old, new=new)
    return EditTask("rename", instruction, piece, replace_at(piece, starts, old, new))


def _constant(piece: str, rng: random.Random) -> EditTask | None:
    literals = changeable_literals(piece)
    if not literals:
        return None
    start, old = rng.choice(literals)
    new = _new_string(old, rng) if old[0] in "\"'" else _new_number(old, rng)
    if new == old or has_word(piece, new):
        return None
    instruction = rng.choice(_CONSTANT_PHRASES).format(old=old, new=new)
    return EditTask("constant", instruction, piece, replace_at(piece, [start], old, new))


def _fix(piece: str, rng: random.Random) -> EditTask | None:
    bugs = seedable_bugs(piece)
    if not bugs:
        return None
    start, right, wrong = rng.choice(bugs)
    instruction = rng.choice(_FIX_PHRASES).format(old=wrong, new=right)
    return EditTask("fix", instruction, replace_at(piece, [start], right, wrong), piece)


def _add_docstring(piece: str, rng: random.Random) -> EditTask | None:
    source, docstring = split_docstring(piece)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if ast.get_docstring(definition) is not None:
        return None  # the docstring cannot be removed: it is the whole body, or shares its line
    first = definition.body[0]
    lines = source.split("\n")
    line = min([first.lineno] + [d.lineno for d in getattr(first, "decorator_list", ())]) - 1
    if line < definition.lineno or not lines[line - 1].endswith(":"):
        return None  # the body is on the line of its header, or a comment stands in between
    text = _summary(docstring) or _invented_docstring(definition.name, rng)
    added = f'{" " * first.col_offset}"""{text}"""'
    result = "\n".join([*lines[:line], added, *lines[line:]])
    instruction = rng.choice(_ADD_PHRASES).format(text=text, name=definition.name)
    return EditTask("add-docstring", instruction, source, result)


def _strip_docstring(piece: str, rng: random.Random) -> EditTask | None:
    result, docstring = split_docstring(piece)
    if docstring is None:
        return None
    definition = ast.parse(piece).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    instruction = rng.choice(_STRIP_PHRASES).format(name=definition.name)
    return EditTask("strip-docstring", instruction, piece, result)


_MAKERS: dict[str, Callable[[str, random.Random], EditTask | None]] = {
    "rename": _rename,
    "constant": _constant,
    "fix": _fix,
    "add-docstring": _add_docstring,
    "strip-docstring": _strip_docstring,
}


def _summary(docstring: str | None) -> str | None:
    """Returns the first paragraph of a docstring on one line, if that is short and quotable."""
    text = " ".join((docstring or "").strip().split("\n\n")[0].split())
    fits = 8 <= len(text) <= DOCSTRING_LENGTH and text.isprintable()
    return text if fits and not set('"\\`') & set(text) else None


def _invented_docstring(name: str, rng: random.Random) -> str:
    words = " ".join(re.findall(r"[A-Z]?[a-z]+", name)).lower() or rng.choice(_NOUNS)
    return rng.choice(
        (
            f"{rng.choice(_VERBS).capitalize()} the {rng.choice(_NOUNS)}: {words}.",
            f"Helper for {words} of the {rng.choice(_QUALIFIERS)} {rng.choice(_NOUNS)}.",
            f"{words.capitalize()} with a {rng.choice(_QUALIFIERS)} {rng.choice(_NOUNS)}.",
            f"{rng.choice(_VERBS).capitalize()} every {rng.choice(_NOUNS)} of the "
            f"{rng.choice(_QUALIFIERS)} {rng.choice(_NOUNS)}.",
        )
    )


def _new_name(old: str, is_function: bool, rng: random.Random) -> str:
    if is_function:
        words = [rng.choice(_VERBS), rng.choice(_NOUNS)]
    elif rng.random() < 0.1:
        words = [rng.choice("abcdefghijkmnpqrstuvwxyz")]
    else:
        words = [rng.choice(_QUALIFIERS)] * (rng.random() < 0.5) + [rng.choice(_NOUNS)]
    name = "_".join(words)
    if keyword.iskeyword(name) or name in dir(builtins):
        name += "_" + rng.choice(_NOUNS)
    return ("_" if old.startswith("_") else "") + (name.upper() if old.isupper() else name)


def _new_number(old: str, rng: random.Random) -> str:
    if "." in old:
        return f"{rng.uniform(0, 10):.{len(old.split('.')[1])}f}"
    value = int(old)
    return str(rng.choice((value + 1, value * 2 + 1, rng.randrange(100), rng.randrange(1000))))


def _new_string(old: str, rng: random.Random) -> str:
    words = rng.choice(
        (
            [rng.choice(_NOUNS)],
            [rng.choice(_QUALIFIERS), rng.choice(_NOUNS)],
            [rng.choice(_VERBS), rng.choice(_QUALIFIERS), rng.choice(_NOUNS)],
        )
    )
    return old[0] + rng.choice(" _-").join(words) + old[0]
