"""Imports point down, and `import specjax` stays light.

    cli -> bench -> hub, pocket -> decoding | training -> models
    inside decoding: generate -> verify, drafter -> tree, sampling

Every import statement counts, also inside functions and under TYPE_CHECKING, and so does
`import_module("specjax....")`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "specjax"

FLOOR = ("pytree", "errors", "files", "provenance", "text")
MODELS = ("models", *FLOOR)
WORDS = ("decoding.tree", "decoding.sampling", "decoding.prompt", *MODELS)
DRAFTER = (
    *("decoding.drafter", "decoding.drafters.length_rules", "decoding.drafters.with_head"),
    *(f"decoding.drafters.{kind}_trees" for kind in ("level", "pool", "depth")),
    *WORDS,
)
ROUND = ("decoding.branches", "decoding.verify", "decoding.state", "decoding.drafter", *WORDS)
UPPER = ("decoding", "training", *MODELS)
TOP = (
    *("hub", "drafting", "drafter_parts", "bench", "tuning", "tuned"),
    *("datastore", "documents", "attribution", "pocket", "chat", "distillation"),
)

# File -> what it may import, without the leading "specjax."; a package stands for all it holds,
# "*" for anything, and "" for a name of specjax itself.
# The first pattern that fits decides. A file that no pattern fits may import nothing of specjax,
# and a new file of decoding gets a row of its own when it needs more than models.
RULES = {
    "__init__": ("*",),
    "__main__": ("cli",),
    "cli": ("", *TOP, *UPPER),
    "cli.*": ("", "cli", *TOP, *UPPER),
    "hub": ("pocket", *MODELS),
    "drafting": (
        *("auto_choice", "drafter_parts", "hub", "tuned", "decoding.drafters", "decoding.drafter"),
        *MODELS,
    ),
    "drafter_parts": ("hub", "datastore", "tuned", "decoding.drafters", *MODELS),
    "auto_choice": FLOOR,
    "datastore": ("", *MODELS),
    "documents": FLOOR,
    "chat": FLOOR,
    "tuned": MODELS,
    "attribution": ("decoding.state", *FLOOR),
    "distillation": ("hub", "tuned", "chat", *UPPER),
    "tuning.*": ("tuning", "hub", "drafting", "bench", *UPPER),
    "bench.*": (
        *("", "hub", "drafting", "drafter_parts", "bench", "pocket", "attribution", "datastore"),
        *("distillation", "tuned", *UPPER),
    ),
    "pocket.*": ("", "pocket", "datastore", *UPPER),
    "training.*": ("", "training", "chat", "documents", *MODELS),
    "decoding.drafters.__init__": ("decoding.drafters", "decoding.drafter", *MODELS),
    "decoding.drafters.parallel_spec": ("decoding.drafters.eagle", *DRAFTER),  # for its tree
    "decoding.drafters.auto": ("decoding.branches", "decoding.drafters.gate_state", *DRAFTER),
    "decoding.drafters.*": DRAFTER,
    "decoding.__init__": ("decoding", *MODELS),
    "decoding.generate": ("decoding.round", "decoding.request", *ROUND),
    "decoding.round": ROUND,
    "decoding.verify": WORDS,
    "decoding.drafter": WORDS,
    "decoding.prompt": ("chat", *MODELS),
    "decoding.request": ("decoding.drafter", *WORDS),
    "decoding.reference": ("decoding.request", "decoding.sampling", "decoding.prompt", *MODELS),
    "decoding.*": MODELS,
    "models.*": MODELS,
    "errors": (),
    "provenance": (),
    "text": (),
    "files": ("errors",),
    "pytree": (),
}


class Arrow(NamedTuple):
    """One import of a specjax module by a specjax file."""

    place: str  # file:line
    source: str  # the file as a dotted name; a package's own file ends in __init__
    target: str  # the module or package; "" is specjax itself
    is_lazy: bool  # does not run when the file is imported
    text: str


def arrows(package: Path) -> Iterator[Arrow]:
    """All imports between the files of `package`, which is a folder named specjax."""
    files = sorted(package.rglob("*.py"))
    sources = {file: ".".join(file.relative_to(package).with_suffix("").parts) for file in files}
    modules = {source.removesuffix("__init__").removesuffix(".") for source in sources.values()}
    for file, source in sources.items():
        tree = ast.parse(file.read_text(encoding="utf-8"), file)
        lazy = set(lazy_nodes(tree))
        for node in ast.walk(tree):
            for name in imported_names(node, source):
                if name != "specjax" and not name.startswith("specjax."):
                    continue
                target = known_module(name.removeprefix("specjax").removeprefix("."), modules)
                place = f"{file.relative_to(package.parent)}:{getattr(node, 'lineno', 0)}"
                yield Arrow(place, source, target, node in lazy, ast.unparse(node))


def lazy_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes inside functions and under `if TYPE_CHECKING:`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from ast.walk(node)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from ast.walk(statement)


def imported_names(node: ast.AST, source: str) -> list[str]:
    """The absolute names that this node, in the file `source`, imports; of any library."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = absolute("." * level + (module or ""), source)
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            is_import = ast.unparse(function).endswith(("import_module", "__import__"))
            return [absolute(name, source)] if is_import else []
    return []


def absolute(name: str, source: str) -> str:
    """`name`, with its leading dots resolved from the file `source`."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    above = ["specjax", *source.split(".")][:-level]
    return ".".join([*above, *filter(None, [name[level:]])])


def known_module(name: str, modules: set[str]) -> str:
    """The module that `name` lies in: `models.cache` for `models.cache.KVCache`.

    A name that no module carries stays as it is, so a missing file is judged by its own name.
    """
    parent = name.rpartition(".")[0]
    return parent if name not in modules and parent in modules else name


def violations(package: Path) -> list[str]:
    """One line for each arrow that the rules do not allow."""
    wrong = []
    for arrow in arrows(package):
        allowed = next((RULES[rule] for rule in RULES if fnmatchcase(arrow.source, rule)), ())
        if not any(lies_in(arrow.target, folder) for folder in allowed):
            may = ", ".join(allowed) or "nothing of specjax"
            wrong.append(f"{arrow.place}: `{arrow.text}` (this file may import {may})")
        elif arrow.source == "__init__" and lies_in(arrow.target, "hub") and not arrow.is_lazy:
            wrong.append(f"{arrow.place}: `{arrow.text}` (hub is imported lazily, in a function)")
    return list(dict.fromkeys(wrong))  # one line for `from x import a, b`


def lies_in(module: str, folder: str) -> bool:
    return folder in ("*", module) or module.startswith(f"{folder}.")


def test_every_import_points_down():
    assert any(PACKAGE.rglob("*.py"))
    wrong = violations(PACKAGE)
    assert not wrong, "\n" + "\n".join(wrong)


FILES = (
    "__init__ cli hub errors pytree bench.__init__ bench.run pocket.__init__ training.__init__ "
    "training.loop models.__init__ models.llama models.cache models.heads.__init__ "
    "models.heads.eagle decoding.__init__ decoding.generate decoding.verify decoding.drafter "
    "decoding.tree decoding.sampling decoding.reference decoding.drafters.__init__ "
    "decoding.drafters.eagle decoding.drafters.eagle2 decoding.drafters.lookahead "
    "decoding.drafters.length_rules"
).split()


@pytest.fixture
def package(tmp_path) -> Path:
    """A tree of empty files with the layout of specjax."""
    for name in FILES:
        path = file_of(tmp_path / "specjax", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return tmp_path / "specjax"


def file_of(package: Path, name: str) -> Path:
    return package.joinpath(*name.split(".")).with_suffix(".py")


@pytest.mark.parametrize(
    "name, line",
    [
        ("models.llama", "from specjax.decoding.tree import DraftTree"),
        ("models.llama", "import specjax.training.loop"),
        ("models.llama", "from specjax import hub"),
        ("models.llama", "from ..decoding import tree"),
        ("models.heads.eagle", "from ...training.loop import train"),
        ("models.__init__", "from ..decoding import sampling"),
        ("models.llama", "import specjax"),
        ("errors", "from specjax.models import llama"),
        ("pytree", "from . import models"),
        ("decoding.generate", "from specjax.training.loop import train"),
        ("decoding.generate", "from specjax.decoding.drafters.eagle import Eagle"),
        ("decoding.generate", "from .drafters import DRAFTERS"),
        ("decoding.verify", "from specjax.decoding.drafter import Drafter"),
        ("decoding.drafter", "from specjax.decoding.verify import verify"),
        ("decoding.tree", "from specjax.decoding.sampling import Sampling"),
        ("decoding.sampling", "from specjax.decoding import verify"),
        ("decoding.reference", "from specjax.decoding.tree import DraftTree"),
        ("decoding.drafters.eagle", "from specjax.decoding.drafters.eagle2 import Eagle2"),
        ("decoding.drafters.lookahead", "from specjax.decoding.drafters.eagle import Eagle"),
        ("decoding.drafters.lookahead", "from specjax.methods import DRAFTERS"),
        ("decoding.drafters.lookahead", "from . import eagle"),
        ("decoding.drafters.lookahead", "from specjax.decoding import DraftTree"),
        ("decoding.drafters.lookahead", "from ..verify import verify"),
        ("decoding.drafters.eagle2", "from specjax.decoding.generate import one_round"),
        ("decoding.drafters.__init__", "from specjax.decoding.generate import one_round"),
        ("training.loop", "from specjax.decoding.generate import speculative_generate"),
        ("training.loop", "def train():\n    import specjax.decoding.generate"),
        ("training.loop", "if TYPE_CHECKING:\n    from specjax.decoding.tree import DraftTree"),
        ("training.loop", "import_module('specjax.decoding')"),
        ("training.loop", "importlib.import_module('..decoding', __package__)"),
        ("bench.run", "from specjax.cli import main"),
        ("pocket.__init__", "from specjax.bench import run"),
        ("hub", "from specjax.training.loop import train"),
        ("hub", "from specjax.decoding.generate import speculative_generate"),
        ("__init__", "from specjax.hub import load"),
        ("__init__", "from . import hub"),
        ("stray", "from specjax.models import llama"),
    ],
)
def test_a_wrong_arrow_is_reported_with_its_file_line_and_import(package, name, line):
    file = file_of(package, name)
    file.write_text(f"import os\n{line}\n")
    [message] = violations(package)
    number = 1 + len(line.splitlines())
    statement = line.splitlines()[-1].strip()
    assert message.startswith(f"{file.relative_to(package.parent)}:{number}: `{statement}`")


@pytest.mark.parametrize(
    "name, line",
    [
        ("models.llama", "from specjax.models.cache import KVCache"),
        ("models.llama", "from .heads.eagle import EagleHead"),
        ("models.cache", "from specjax.core.pytree import pytree"),
        ("models.cache", "from specjax.core.errors import SpecjaxError"),
        ("decoding.generate", "from specjax.decoding.verify import verify"),
        ("decoding.generate", "from . import drafter, tree, sampling"),
        ("decoding.verify", "from .tree import DraftTree"),
        ("decoding.reference", "from specjax.decoding.sampling import Sampling"),
        ("decoding.__init__", "from specjax.decoding.generate import speculative_generate"),
        ("decoding.drafters.__init__", "from specjax.decoding.drafters.eagle import Eagle"),
        ("decoding.drafters.parallel_spec", "from specjax.decoding.drafters.eagle import Eagle"),
        ("decoding.drafters.lookahead", "from specjax.decoding.drafters import length_rules"),
        ("decoding.drafters.lookahead", "from specjax.decoding.drafter import Drafter"),
        ("decoding.drafters.lookahead", "from specjax.models.heads.eagle import EagleHead"),
        ("training.loop", "from specjax.models.transformer import Transformer"
        ("bench.run", "from specjax.decoding.generate import speculative_generate"),
        ("pocket.__init__", "from specjax.training import loop"),
        ("drafting", "from specjax.methods import DRAFTERS"),
        ("hub", "from specjax import pocket"),
        ("cli", "from specjax import bench, hub, pocket"),
        ("__init__", "from specjax.decoding.generate import speculative_generate"),
        ("__init__", "def __getattr__(name):\n    from specjax import hub"),
        ("__init__", "if TYPE_CHECKING:\n    from specjax.hub import load"),
        ("stray", "import jax, specjaxes"),
    ],
)
def test_a_right_arrow_passes(package, name, line):
    file_of(package, name).write_text(f"import os\n{line}\n")
    assert violations(package) == []


def test_import_specjax_leaves_heavy_packages_alone():
    code = """
import sys
import specjax
assert specjax.__file__, "specjax has no __init__.py"
print(*sorted({"grain", "torch", "transformers"} & set(sys.modules)))
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []
