"""Edit tasks have valid code on both sides, and an instruction that determines the change."""

import ast
import random
import re

import pytest

from specjax.pocket import corpus, edits
from specjax.pocket.edits import KINDS, EditTask, make_edit

TASKS = corpus.held_out_tasks(100, max_characters=500)


def quoted(task: EditTask) -> tuple[str, str]:
    """The two snippets an instruction quotes: what is there, and what should be."""
    old, new = re.findall(r"`([^`]+)`", task.instruction)
    return old, new


def of_kind(kind: str) -> list[EditTask]:
    return [task for task in TASKS if task.kind == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_parse_and_differ(kind):
    tasks = of_kind(kind)
    assert len(tasks) == 100 // len(KINDS)
    for task in tasks:
        ast.parse(task.source)
        ast.parse(task.result)
        assert task.source != task.result


def test_every_kind_has_several_phrasings():
    for kind in KINDS:
        assert len({task.instruction.split("`")[0] for task in of_kind(kind)}) > 1


def test_rename_renames_the_tokens_and_nothing_else():
    for task in of_kind("rename"):
        old, new = quoted(task)
        assert edits.rename_tokens(task.source, old, new) == task.result
        assert re.sub(rf"\b{old}\b", new, task.source) == task.result
        assert edits.rename_tokens(task.result, new, old) == task.source


@pytest.mark.parametrize("kind", ["constant", "fix"])
def test_quoted_code_names_its_place(kind):
    for task in of_kind(kind):
        old, new = quoted(task)
        places = [m.start() for m in re.finditer(re.escape(old), task.source)]
        if kind == "constant" and len(places) > 1:  # digits inside a longer number or name
            places = [m.start() for m in re.finditer(rf"(?<![\w.]){old}(?![\w.])", task.source)]
        (start,) = places
        assert task.source[:start] + new + task.source[start + len(old) :] == task.result


def test_add_docstring_inserts_the_quoted_text_as_one_line():
    for task in of_kind("add-docstring"):
        assert ast.get_docstring(ast.parse(task.source).body[0]) is None
        (text,) = re.findall(r'"(.*)"', task.instruction)
        assert ast.get_docstring(ast.parse(task.result).body[0], clean=False) == text
        added = [line for line in task.result.split("\n") if line.strip() == f'"""{text}"""']
        assert len(added) == 1
        without = task.result.replace(added[0] + "\n", "", 1)
        assert without == task.source


def test_strip_docstring_keeps_all_other_code():
    for task in of_kind("strip-docstring"):
        before, after = ast.parse(task.source).body[0], ast.parse(task.result).body[0]
        assert ast.get_docstring(before) is not None
        assert [ast.dump(node) for node in before.body[1:]] == [ast.dump(n) for n in after.body]


def test_a_piece_that_does_not_allow_a_kind_gives_none():
    piece = "def f(self):\n    return self"
    rng = random.Random(0)
    assert make_edit("constant", piece, rng) is None
    assert make_edit("strip-docstring", piece, rng) is None
    assert make_edit("fix", piece, rng) is None


def test_names_with_a_second_meaning_are_left_alone():
    piece = (
        "def load(path, mode, name):\n"
        '    """Open with mode."""\n'
        "    self.path = path\n"
        "    total = read(path, name=name)\n"
        "    return total"
    )
    names = {quoted(t)[0] for s in range(40) if (t := make_edit("rename", piece, random.Random(s)))}
    assert names == {"load", "total"}


def test_tokens_of_f_strings_are_one_string():
    tokens = [t.text for t in edits.code_tokens("x = f\"{a + f'{b}'} c\" + d\n")]
    assert "f\"{a + f'{b}'} c\"" in tokens
    assert "a" not in tokens


def test_text_form():
    task = EditTask("fix", "Do it.", "a", "b")
    assert edits.prompt_text(task) == "<|begin|><|user|>Do it.\na<|assistant|>"
    assert edits.answer_text(task) == "b<|end|>"
