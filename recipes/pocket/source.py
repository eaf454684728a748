"""Reads source code: its tokens, names, literals and docstring, and the bugs it could have.

A place is the index of the character where something starts; an edit replaces what starts there.
"""

import ast
import functools
import io
import keyword
import re
import tokenize
from collections.abc import Iterator, Sequence
from typing import NamedTuple

SNIPPET_LENGTH = 60  # longest code quoted in an instruction, in characters

_PLAIN_STRING = re.compile(r"""'[^'"`\\]+'|"[^"'`\\]+\"""")
# The right and the wrong spelling of each operator in a seeded bug.
_SWAPS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "/"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip


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


def code_tokens(source: str) -> list[CodeToken]:
    """Returns the tokens of `source`. An f-string is one STRING token in every Python version."""
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


@functools.cache
def renamable_names(source: str) -> tuple[tuple[str, bool, tuple[int, ...]], ...]:
    """Returns (name, is a function, its places) for every name with a single meaning.

    Names that also occur as an attribute, a keyword of a call, an import, or as a word in a string
    or comment are left out: for the rest, renaming tokens and renaming words agree.
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
    """Returns the names that `tree` defines (is it a function?), and those that must stay."""
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
def changeable_literals(source: str) -> tuple[tuple[int, str], ...]:
    """Returns (start, text) of every number or plain short string that occurs exactly once."""
    docstrings = {
        _span(source, node.value)[0]  # only indentation comes before it, so bytes are characters
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    results = []
    for token in code_tokens(source):
        if token.type == tokenize.NUMBER and re.fullmatch(r"\d{1,6}(\.\d{1,4})?", token.text):
            once = len(re.findall(rf"(?<![\w.]){re.escape(token.text)}(?![\w.])", source)) == 1
        elif token.type == tokenize.STRING and _PLAIN_STRING.fullmatch(token.text):
            once = source.count(token.text) == 1 and len(token.text) <= 30
        else:
            continue
        if once and token.start not in docstrings:
            results.append((token.start, token.text))
    return tuple(results)


@functools.cache
def seedable_bugs(source: str) -> tuple[Bug, ...]:
    """Returns every bug whose wrong code occurs exactly once in the broken source."""
    if not source.isascii():
        return ()  # the columns of `ast` count bytes
    results = []
    for node in _outside_strings(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            results += _swap(source, node, node.left, node.ops[0], node.comparators[0])
        elif isinstance(node, ast.BinOp):
            results += _swap(source, node, node.left, node.op, node.right)
        elif isinstance(node, ast.BoolOp):
            results += _swap(source, node, node.values[0], node.op, node.values[1])
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            results += _wrong_constants(source, node)
    return tuple(bug for bug in results if _names_its_place(source, bug))


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
    """Yields True for False, or off by one, and quotes the whole line."""
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
    broken = replace_at(source, [bug.start], bug.right, bug.wrong)
    return broken.count(bug.wrong) == 1


def _outside_strings(node: ast.AST) -> Iterator[ast.AST]:
    """Walks the tree without the insides of f-strings, whose columns depend on the version."""
    if not isinstance(node, ast.JoinedStr):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _outside_strings(child)


def split_docstring(piece: str) -> tuple[str, str | None]:
    """Returns the piece without the docstring of its definition, and that docstring."""
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


def has_word(source: str, word: str) -> bool:
    """Returns whether `word` occurs in the text, strings and comments included."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", source) is not None


def replace_at(source: str, starts: Sequence[int], old: str, new: str) -> str:
    """Returns `source` with `new` in place of the `old` at each of `starts`, which are sorted."""
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
    """Returns where the text of `node` starts and ends, in bytes."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    starts = _line_starts(source)
    start = starts[node.lineno - 1] + node.col_offset
    return start, starts[node.end_lineno - 1] + node.end_col_offset


def parses(source: str) -> bool:
    """Returns whether this is valid Python."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
