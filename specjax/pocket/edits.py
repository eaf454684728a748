"""Edit tasks: an instruction and a piece of code go in, the edited code comes out.

The instruction always determines the answer, so a task has one right result and greedy decoding
can be scored by equality. Most of an answer is a copy of the prompt, as in real code editing.
"""

import ast
import builtins
import functools
import io
import keyword
import random
import re
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specjax.pocket.tokenizer import ASSISTANT, BEGIN, END, USER

KINDS = ("rename", "constant", "fix", "add-docstring", "strip-docstring")
SNIPPET_LENGTH = 60  # longest code quoted in an instruction, in characters
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
_PLAIN_STRING = re.compile(r"""'[^'"`\\]+'|"[^"'`\\]+\"""")
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
# What a seeded bug writes for each operator.
_SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "/"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


@dataclass(frozen=True)
class EditTask:
    """One edit: `instruction` applied to `source` gives exactly `result`."""

    kind: str
    instruction: str
    source: str
    result: str


class CodeToken(NamedTuple):
    """A lexical token: its `tokenize` type, its text and the character where it starts."""

    type: int
    text: str
    start: int


class Bug(NamedTuple):
    """A way to break a piece: at `start`, write `wrong` where the piece has `right`."""

    start: int
    right: str
    wrong: str


def prompt_text(task: EditTask) -> str:
    """The text a model is given for `task`, up to where its answer begins."""
    return f"{BEGIN}{USER}{task.instruction}\n{task.source}{ASSISTANT}"


def answer_text(task: EditTask) -> str:
    """The text a model should continue `prompt_text` with, end token included."""
    return task.result + END


def code_tokens(source: str) -> list[CodeToken]:
    """The tokens of `source`. An f-string is one STRING token on every Python version."""
    starts = _line_starts(source)
    opening, closing = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))
    tokens, depth, outer = [], 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = starts[token.start[0] - 1] + token.start[1]
        if token.type == opening:
            outer = start if depth == 0 else outer
            depth += 1
        elif token.type == closing:
            depth -= 1
            if depth == 0:
                end = starts[token.end[0] - 1] + token.end[1]
                tokens.append(CodeToken(tokenize.STRING, source[outer:end], outer))
        elif depth == 0:
            tokens.append(CodeToken(token.type, token.string, start))
    return tokens


def rename_tokens(source: str, old: str, new: str) -> str:
    """`source` with every name token `old` replaced by `new`; strings and comments stay."""
    starts = [t.start for t in code_tokens(source) if t.type == tokenize.NAME and t.text == old]
    return _replace_at(source, starts, old, new)


def make_edit(kind: str, piece: str, rng: random.Random) -> EditTask | None:
    """A task of `kind` made from `piece`, or None where the piece does not allow one.

    The result of a task always parses and differs from its source.
    """
    task = _MAKERS[kind](piece, rng)
    if task is None or task.result == task.source:
        return None
    return task if _parses(task.source) and _parses(task.result) else None


def held_out_tasks(
    count: int, seed: int = 0, kinds: Sequence[str] = KINDS, max_characters: int = 600
) -> tuple[EditTask, ...]:
    """`count` tasks from held-out modules only: the test set.

    The kinds take turns. No piece longer than `max_characters` is used, and none is used twice
    for as long as there are fresh ones that allow the kind whose turn it is.
    """
    from specjax.pocket import corpus  # here, as corpus builds its rows from edits

    rng = random.Random(seed)
    pieces = [piece for piece in corpus.pieces(held_out=True) if len(piece) <= max_characters]
    rng.shuffle(pieces)
    fresh, tasks = list(pieces), []
    for index in range(count):
        kind = kinds[index % len(kinds)]
        first = _first_edit(kind, fresh, rng) or _first_edit(kind, pieces, rng)
        if first is None:
            raise ValueError(f"no held-out piece allows {kind!r}: raise max_characters.")
        used, task = first
        fresh = [piece for piece in fresh if piece != used]
        tasks.append(task)
        pieces = pieces[1:] + pieces[:1]  # reuse, where needed, starts somewhere else each time
    return tuple(tasks)


def _first_edit(
    kind: str, pieces: Sequence[str], rng: random.Random
) -> tuple[str, EditTask] | None:
    for piece in pieces:
        task = make_edit(kind, piece, rng)
        if task is not None:
            return piece, task
    return None


def _rename(piece: str, rng: random.Random) -> EditTask | None:
    names = _renamable(piece)
    if not names:
        return None
    old, is_function, starts = rng.choice(names)
    new = _new_name(old, is_function, rng)
    if _has_word(piece, new):
        return None
    instruction = rng.choice(_RENAME_PHRASES).format(old=old, new=new)
    return EditTask("rename", instruction, piece, _replace_at(piece, starts, old, new))


def _constant(piece: str, rng: random.Random) -> EditTask | None:
    literals = _changeable(piece)
    if not literals:
        return None
    start, old = rng.choice(literals)
    new = _new_string(old, rng) if old[0] in "\"'" else _new_number(old, rng)
    if new == old or _has_word(piece, new):
        return None
    instruction = rng.choice(_CONSTANT_PHRASES).format(old=old, new=new)
    return EditTask("constant", instruction, piece, _replace_at(piece, [start], old, new))


def _fix(piece: str, rng: random.Random) -> EditTask | None:
    bugs = _bugs(piece)
    if not bugs:
        return None
    start, right, wrong = rng.choice(bugs)
    instruction = rng.choice(_FIX_PHRASES).format(old=wrong, new=right)
    return EditTask("fix", instruction, _replace_at(piece, [start], right, wrong), piece)


def _add_docstring(piece: str, rng: random.Random) -> EditTask | None:
    source, docstring = _split_docstring(piece)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    if ast.get_docstring(definition) is not None:
        return None  # it could not be taken out: nothing but a docstring, or code on its line
    first = definition.body[0]
    lines = source.split("\n")
    line = min([first.lineno] + [d.lineno for d in getattr(first, "decorator_list", ())]) - 1
    if line < definition.lineno or not lines[line - 1].endswith(":"):
        return None  # a body on the line of its header, or a comment in between
    text = _summary(docstring) or _invented_docstring(definition.name, rng)
    added = f'{" " * first.col_offset}"""{text}"""'
    result = "\n".join([*lines[:line], added, *lines[line:]])
    instruction = rng.choice(_ADD_PHRASES).format(text=text, name=definition.name)
    return EditTask("add-docstring", instruction, source, result)


def _strip_docstring(piece: str, rng: random.Random) -> EditTask | None:
    result, docstring = _split_docstring(piece)
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


@functools.cache
def _renamable(source: str) -> tuple[tuple[str, bool, tuple[int, ...]], ...]:
    """(name, is a function, where it starts) for every name that only means one thing.

    Out go names that also occur as an attribute, a keyword of a call, an import, or as a word in
    a string or comment: for what remains, renaming tokens and renaming words agree.
    """
    defined, barred = _defined_names(ast.parse(source))
    places: dict[str, list[int]] = {}
    prose = []
    before = ""
    for token in code_tokens(source):
        if token.type == tokenize.NAME:
            places.setdefault(token.text, []).append(token.start)
            if before == ".":
                barred.add(token.text)
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            prose.append(token.text)
        before = token.text
    barred |= set(re.findall(r"\w+", " ".join(prose)))
    return tuple(
        (name, defined[name], tuple(places[name])) for name in sorted(defined) if name not in barred
    )


def _defined_names(tree: ast.AST) -> tuple[dict[str, bool], set[str]]:
    """The names that `tree` defines (is it a function?) and those that must keep their name."""
    defined: dict[str, bool] = {}
    barred = {"self", "cls", "_", *keyword.kwlist, *keyword.softkwlist}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined[name] = True
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                defined.setdefault(name, False)
            case ast.keyword(arg=str(name)):
                barred.add(name)
            case ast.alias(name=name, asname=other):
                barred |= {*name.split("."), other or ""}
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                barred |= set(names)
    barred |= {name for name in defined if name.startswith("__")}
    return defined, barred


@functools.cache
def _changeable(source: str) -> tuple[tuple[int, str], ...]:
    """(start, text) of every number or plain short string that occurs once in the whole text."""
    docstrings = {
        _span(source, node.value)[0]  # only indentation comes before it, so bytes are characters
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = []
    for token in code_tokens(source):
        if token.type == tokenize.NUMBER and re.fullmatch(r"\d{1,6}(\.\d{1,4})?", token.text):
            once = len(re.findall(rf"(?<![\w.]){re.escape(token.text)}(?![\w.])", source)) == 1
        elif token.type == tokenize.STRING and _PLAIN_STRING.fullmatch(token.text):
            once = source.count(token.text) == 1 and len(token.text) <= 30
        else:
            continue
        if once and token.start not in docstrings:
            found.append((token.start, token.text))
    return tuple(found)


@functools.cache
def _bugs(source: str) -> tuple[Bug, ...]:
    """Every bug that can be seeded so that its wrong code occurs once, hence names its place."""
    if not source.isascii():
        return ()  # the columns of `ast` count bytes
    found = []
    for node in _outside_strings(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            found += _swap(source, node, node.left, node.ops[0], node.comparators[0])
        elif isinstance(node, ast.BinOp):
            found += _swap(source, node, node.left, node.op, node.right)
        elif isinstance(node, ast.BoolOp):
            found += _swap(source, node, node.values[0], node.op, node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            found += _wrong_constants(source, node)
    return tuple(bug for bug in found if _names_its_place(source, bug))


def _swap(
    source: str, node: ast.expr, left: ast.expr, operator: ast.AST, right: ast.expr
) -> Iterator[Bug]:
    good, bad = _SWAPS.get(type(operator), ("", ""))
    (start, end), (_, gap_start), (gap_end, _) = (_span(source, n) for n in (node, left, right))
    if good and good in source[gap_start:gap_end]:
        gap = source[gap_start:gap_end].replace(good, bad, 1)
        wrong = source[start:gap_start] + gap + source[gap_end:end]
        yield Bug(start, source[start:end], wrong)


def _wrong_constants(source: str, node: ast.Constant) -> Iterator[Bug]:
    """True for False, or one off; the whole line is quoted, as the constant alone says little."""
    start, end = _span(source, node)
    text = source[start:end]
    others = [str(not node.value)]
    if type(node.value) is int:
        if not text.isdecimal() or node.value > 100:
            return
        others = [str(node.value + step) for step in (-1, 1) if node.value + step >= 0]
    line_start = source.rfind("\n", 0, start) + 1
    line_end = source.find("\n", start)
    line = source[line_start : line_end if line_end >= 0 else len(source)]
    first = line_start + len(line) - len(line.lstrip())
    right = line.strip()
    for other in others:
        yield Bug(first, right, right[: start - first] + other + right[end - first :])


def _names_its_place(source: str, bug: Bug) -> bool:
    quotable = not set("\n`#") & set(bug.right) and len(bug.right) <= SNIPPET_LENGTH
    if not quotable:
        return False
    broken = _replace_at(source, [bug.start], bug.right, bug.wrong)
    return broken.count(bug.wrong) == 1


def _outside_strings(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, without the insides of f-strings, whose columns depend on the version."""
    if not isinstance(node, ast.JoinedStr):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_strings(child)


def _split_docstring(piece: str) -> tuple[str, str | None]:
    """The piece without the docstring of its definition, and that docstring."""
    definition = ast.parse(piece).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first, lines = definition.body[0], piece.split("\n")
    docstring = ast.get_docstring(definition)
    on_own_lines = first.lineno > definition.lineno and len(definition.body) > 1
    on_own_lines &= lines[(first.end_lineno or 0) - 1].rstrip().endswith(("'", '"'))
    if docstring is None or not on_own_lines:
        return piece, None
    rest = lines[first.end_lineno :]
    while rest and not rest[0].strip():
        rest = rest[1:]
    return "\n".join(lines[: first.lineno - 1] + rest), docstring


def _summary(docstring: str | None) -> str | None:
    """The first paragraph of a docstring on one line, where that is short and quotable."""
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


def _has_word(source: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source) is not None


def _replace_at(source: str, starts: Sequence[int], old: str, new: str) -> str:
    parts, end = [], 0
    for start in starts:
        parts += [source[end:start], new]
        end = start + len(old)
    return "".join([*parts, source[end:]])


def _line_starts(source: str) -> list[int]:
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _span(source: str, node: ast.expr) -> tuple[int, int]:
    """Where the text of `node` starts and ends, in bytes."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    starts = _line_starts(source)
    start = starts[node.lineno - 1] + node.col_offset
    return start, starts[node.end_lineno - 1] + node.end_col_offset


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
