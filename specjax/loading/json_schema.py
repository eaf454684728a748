"""JSON schemas as regular expressions: the texts of JSON that a schema allows.

Objects have their properties in the order of the schema and no others; a space may stand wherever
JSON writers put one. Each keyword that the expression would not follow is an error.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from specjax.core.errors import SpecjaxError
from specjax.decoding.byte_automaton import DEAD, byte_automaton

DESCRIBING = (
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
)
KEYWORDS = {  # by type
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
    **{name: set() for name in ("number", "integer", "boolean", "null")},
}
SPACE = " ?"
COMMA = f"{SPACE},{SPACE}"
CHARACTER = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'
INTEGER = "-?(0|[1-9][0-9]*)"
JSON_TYPES = {  # that a Python value has
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
}
SCALARS = {
    "integer": INTEGER,
    "number": rf"{INTEGER}(\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "boolean": "true|false",
    "null": "null",
}
MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
DATE = f"[12][0-9]{{3}}-({MONTHS}|02-(0[1-9]|1[0-9]|2[0-8]))"
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f"{DATE}T{TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[a-z0-9_-]+(\.[a-z0-9_-]+)*@[a-z0-9]+(-[a-z0-9]+)*(\.[a-z0-9]+(-[a-z0-9]+)*)+",
}
ANY_DEPTH = 2  # of objects and arrays in a value without a schema
# As JSON schemas have them; by themselves they hold digits and letters of all scripts.
ASCII_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}
MAX_LENGTH = 2**21  # characters of all parts' expressions
MAX_PATTERNS = 16  # different ones; each is built in a process, which takes its time


def schema_regex(schema: Mapping[str, Any]) -> str:
    """Returns a regular expression for the JSON of a schema.

    Raises:
        SpecjaxError: for the first part that is invalid or not supported.
    """
    try:
        return _Reader(schema).regex(schema, "#")
    except RecursionError:
        raise _error("#", "it is nested too deeply; make it flatter") from None


def literal(text: str) -> str:
    """Returns the regular expression of one text."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


class _Reader:
    """Reads one schema; `place` is where a part of it stands, as `$ref` writes it."""

    def __init__(self, root: Mapping[str, Any]):
        self._root = root
        self._open: list[str] = []  # references that are being followed
        self._written = 0  # characters so far: references multiply what they lead to
        self._patterns: set[str] = set()  # that are checked

    def regex(self, schema: Any, place: str) -> str:
        regex = self._regex(schema, place)
        self._written += len(regex)
        if self._written > MAX_LENGTH:
            raise _error(place, "it is too large; use fewer references and optional properties")
        return regex

    def _regex(self, schema: Any, place: str) -> str:
        if not isinstance(schema, Mapping):
            raise _error(place, f"{schema!r} is not an object")
        used = {key: value for key, value in schema.items() if key not in DESCRIBING}
        alone = {"$ref": self._reference} | dict.fromkeys(("anyOf", "oneOf"), self._alternatives)
        if name := next((name for name in alone if name in used), None):
            self._check_keywords(used, {name}, place)
            return f"({alone[name](used[name], f'{place}/{name}')})"
        if not used:
            return f"({self._any(ANY_DEPTH)})"
        types = used.get("type", ())
        types = [types] if isinstance(types, str) else types
        are_known = isinstance(types, (list, tuple)) and all(t in list(KEYWORDS) for t in types)
        if name := next((name for name in ("enum", "const") if name in used), None):
            if not are_known:
                problem = f"{used['type']!r} is not one or more of {', '.join(KEYWORDS)}"
                raise _error(f"{place}/type", problem)
            self._check_keywords(used, {name, "type"}, place)
            return f"({self._values(used[name], types, f'{place}/{name}')})"
        if not types or not are_known:
            raise _error(place, f"it needs a type of {', '.join(KEYWORDS)}, beside {sorted(used)}")
        self._check_keywords(used, {"type"}.union(*(KEYWORDS[name] for name in types)), place)
        readers = {"string": self._string, "array": self._array, "object": self._object}
        return f"({'|'.join(SCALARS.get(n) or readers[n](used, place) for n in types)})"

    def _check_keywords(self, used: Iterable[str], known: set[str], place: str) -> None:
        for keyword in used:
            if keyword not in known:
                raise _error(place, f"{keyword!r} is not supported beside {sorted(known)}")

    def _reference(self, name: Any, place: str) -> str:
        if name in self._open:
            raise _error(place, f"{name!r} leads back to itself, which is not supported")
        start, *keys = unquote(str(name)).split("/")  # a JSON pointer
        schema = self._root if start == "#" else None
        for key in keys:
            if isinstance(schema, list):
                number = int(key) if re.fullmatch("[0-9]{1,9}", key) else len(schema)
                schema = schema[number] if number < len(schema) else None
                continue
            key = key.replace("~1", "/").replace("~0", "~")
            schema = schema.get(key) if isinstance(schema, Mapping) else None
        if schema is None:
            raise _error(place, f"there is no {name!r}")
        self._open.append(name)
        regex = self.regex(schema, name)
        self._open.pop()
        return regex

    def _alternatives(self, schemas: Any, place: str) -> str:
        schemas = _checked(schemas, list, place)
        return "|".join(self.regex(part, f"{place}/{n}") for n, part in enumerate(schemas))

    def _values(self, values: Any, types: Sequence[str], place: str) -> str:
        values = _checked(values, list, place) if place.endswith("enum") else [values]
        values = [value for value in values if not types or _is_of(value, types)]
        if not values:
            raise _error(place, f"no value is of type {' or '.join(types)}")
        try:
            texts = [json.dumps(value, ensure_ascii=False, allow_nan=False) for value in values]
        except ValueError:
            raise _error(place, "it holds NaN or infinity, which JSON lacks") from None
        return "|".join(map(literal, texts))

    def _string(self, used: Mapping[str, Any], place: str) -> str:
        keys = used.keys() & KEYWORDS["string"]
        if len({"length" if key.endswith("Length") else key for key in keys}) > 1:
            raise _error(place, "a string may have one of pattern, format, and limits of length")
        if "format" in used:
            if used["format"] not in list(FORMATS):  # it may be unhashable
                raise _error(place, f"the format {used['format']!r} is not {', '.join(FORMATS)}")
            return f'"({FORMATS[used["format"]]})"'
        if "pattern" in used:
            return f'"({self._pattern(used["pattern"], f"{place}/pattern")})"'
        return f'"{CHARACTER}{_count(used, "minLength", "maxLength", place)}"'

    def _pattern(self, pattern: Any, place: str) -> str:
        """Returns a pattern for the inside of a string, whose texts are valid there."""
        pattern = re.sub(r"^\^|(?<!\\)\$$", "", _checked(pattern, str, place))
        pattern = re.sub(r"\\.", lambda escape: ASCII_CLASSES.get(escape[0], escape[0]), pattern)
        if pattern not in self._patterns:
            self._patterns.add(pattern)
            if len(self._patterns) > MAX_PATTERNS:
                raise _error(place, f"a schema may have {MAX_PATTERNS} patterns; use fewer")
            _check_pattern(pattern, place)
        return pattern

    def _array(self, used: Mapping[str, Any], place: str) -> str:
        if "prefixItems" in used:
            keys = [key for key in used if key in KEYWORDS["array"]]
            self._check_keywords(keys, {"prefixItems"}, place)
            items = _checked(used["prefixItems"], list, place)
            items = [self.regex(item, f"{place}/prefixItems/{n}") for n, item in enumerate(items)]
            return rf"\[{SPACE}{COMMA.join(items)}{SPACE}\]"
        item = self.regex(used["items"], f"{place}/items") if "items" in used else self._any(1)
        return _listed(r"\[", f"({item})", used, place, r"\]")

    def _object(self, used: Mapping[str, Any], place: str) -> str:
        properties = _checked(used.get("properties", {}), Mapping, place)
        required = _checked(used.get("required", ()), (list, tuple), place)
        if invalid := [key for key in required if not isinstance(key, str)]:
            raise _error(place, f"`required` holds {invalid[0]!r}, which is not a text")
        required = set(required)
        if missing := sorted(required - properties.keys()):
            raise _error(place, f"`required` holds {missing[0]!r}, which `properties` lacks")
        others = used.get("additionalProperties", True)
        if not properties and others is not False:
            value = self._any(1) if others is True else self.regex(others, f"{place}/*")
            return _listed(r"\{", f'"{CHARACTER}*"{SPACE}:{SPACE}({value})', {}, place, r"\}")
        members = [
            f"{literal(json.dumps(key, ensure_ascii=False))}{SPACE}:{SPACE}"
            + self.regex(part, f"{place}/properties/{key}")
            for key, part in properties.items()
        ]
        is_required = [key in required for key in properties]
        after = [
            f"{COMMA}{member}" if must else f"({COMMA}{member})?"
            for member, must in zip(members, is_required, strict=True)
        ]
        # One alternative for each property that may come first.
        num_first = is_required.index(True) + 1 if any(is_required) else len(members)
        if num_first * sum(map(len, after)) > MAX_LENGTH:
            raise _error(place, "it is too large; use fewer optional properties")
        starts = [members[n] + "".join(after[n + 1 :]) for n in range(num_first)]
        starts += [] if any(is_required) else [""]
        return rf"\{{{SPACE}({'|'.join(starts)}){SPACE}\}}"

    def _any(self, depth: int) -> str:
        """Returns the expression of any JSON, up to a depth of nested values."""
        kinds = [*SCALARS.values(), f'"{CHARACTER}*"']
        if depth > 0:
            inner = self._any(depth - 1)
            kinds.append(_listed(r"\[", f"({inner})", {}, "#", r"\]"))
            member = f'"{CHARACTER}*"{SPACE}:{SPACE}({inner})'
            kinds.append(_listed(r"\{", member, {}, "#", r"\}"))
        return "|".join(kinds)


def _listed(start: str, item: str, used: Mapping[str, Any], place: str, end: str) -> str:
    """Returns items separated by commas, as many as `minItems` and `maxItems` allow."""
    _count(used, "minItems", "maxItems", place)
    least, most = used.get("minItems") or 0, used.get("maxItems")
    if most == 0:
        return f"{start}{SPACE}{end}"
    fewer = {"minItems": max(least - 1, 0), "maxItems": most and most - 1}
    count = _count(fewer, "minItems", "maxItems", place)
    items = f"{item}({COMMA}{item}){count}"
    return f"{start}{SPACE}{items if least else f'({items})?'}{SPACE}{end}"


def _count(used: Mapping[str, Any], least: str, most: str, place: str) -> str:
    """Returns how often something may come."""
    low, high = used.get(least), used.get(most)
    low = 0 if low is None else low
    for name, value in ((least, low), (most, high)):
        if value is not None and (type(value) is not int or value < 0):
            raise _error(place, f"{name} must be a whole number of at least 0, got {value!r}")
    if high is not None and high < low:
        raise _error(place, f"{most} {high} is below {least} {low}")
    return f"{{{low},{'' if high is None else high}}}"


def _check_pattern(pattern: str, place: str) -> None:
    try:
        table = byte_automaton(pattern)
    except SpecjaxError as error:
        raise _error(place, str(error)) from None
    if (table[:, [*range(0x20), *b'"\\']] != DEAD).any():
        raise _error(
            place,
            f"the pattern {pattern!r} allows quotes, backslashes or control characters, which JSON "
            r'escapes; exclude them, as [^"\\\x00-\x1F] does',
        )


def _checked(value: Any, kind: Any, place: str) -> Any:
    if not isinstance(value, kind) or (kind is list and not value):
        raise _error(place, f"{value!r} is of the wrong type or empty")
    return value


def _error(place: str, problem: str) -> SpecjaxError:
    return SpecjaxError(f"the JSON schema at {place}: {problem}; see docs/guides/structured-output")


def _is_of(value: Any, types: Sequence[str]) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return bool(
        (JSON_TYPES.get(type(value), set()) | ({"integer"} if is_whole else set())) & {*types}
    )
