"""The public names, with their signatures, are those of `tests/api.txt`.

A change of the list is a change for users. After one, describe it in CHANGELOG.md and run
`PYTHONPATH=. python tests/test_api.py > tests/api.txt`.
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = "specjax specjax.decoding specjax.models specjax.training".split()
LISTED = Path(__file__).with_name("api.txt")
CONSTANTS = (bool, int, float, str, type(None))


def default_of(value: Any) -> str:
    is_constant = isinstance(value, CONSTANTS) or value == ()
    return repr(value) if is_constant else "..."


def signature_of(function: Any) -> str:
    """Names, kinds and defaults of the parameters; annotations differ between Pythons."""
    if inspect.isclass(function) and issubclass(function, Exception):
        return "(message)"
    if getattr(function, "_is_protocol", False):
        return ""
    parts, is_keyword = [], False
    for name, each in inspect.signature(function).parameters.items():
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        is_keyword = is_keyword or each.kind is each.VAR_POSITIONAL
        default = "" if each.default is each.empty else f"={default_of(each.default)}"
        parts.append(f"{stars}{name}{default}")
    return f"({', '.join(parts)})"


def members_of(kind: type) -> Iterator[str]:
    for name, member in inspect.getmembers(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not owner.__module__.startswith("specjax"):
            continue
        kept = vars(owner)[name]
        if isinstance(kept, property):
            yield f".{name}"
        elif callable(member):
            yield f".{name}{signature_of(getattr(member, 'function', member))}"


def listing() -> list[str]:
    lines = []
    for place in MODULES:
        for name in sorted((module := import_module(place)).__all__):
            value = getattr(module, name)
            if place != "specjax" and name in import_module("specjax").__all__:
                continue  # listed above
            lines.append(f"{place}.{name}{signature_of(value)}")
            if inspect.isclass(value):
                lines += [f"{place}.{name}{each}" for each in members_of(value)]
    return lines


def test_the_public_api_is_the_listed_one():
    assert listing() == LISTED.read_text().splitlines(), __doc__


if __name__ == "__main__":
    print("\n".join(listing()))
