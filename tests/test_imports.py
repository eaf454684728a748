"""Checks beside import-linter: imports are cheap, and no two classes share a name."""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


ABSENT = {
    "specjax": {"flax", "jax", "numpy", "torch"},
    "specjax.data.datastore": {"jax", "torch"},
    "specjax.loading.targets": {"torch", "transformers", "orbax"},
}


def test_importing_a_module_imports_no_library_that_it_seldom_needs():
    lines = [
        f"import {name}; print(*{names!r} & set(sys.modules))" for name, names in ABSENT.items()
    ]
    command = [sys.executable, "-c", "\n".join(["import sys", *lines])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [""] * len(ABSENT)


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in sorted((ROOT / "specjax").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice
