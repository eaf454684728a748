"""Pocket's code: its split, its pieces, its edit tasks, and the files that ship."""

import ast
import re
import sys
import tokenize as python_tokens
from functools import cache

import numpy as np
import pytest
from transformers import AutoTokenizer

from recipes.pocket import corpus
from recipes.pocket import tasks as shipped
from recipes.pocket.edits import KINDS, EditTask, answer_text, prompt_text
from recipes.pocket.source import code_tokens, replace_at
from specjax.core.errors import SpecjaxError
from specjax.data.conversations import conversation_of
from specjax.data.task_files import TASKS as FOLDER
from specjax.loading.hub import pocket_folder
from specjax.training.examples import tokenize

KNOWN_SIDES = {
    "argparse.py": False,
    "email/__init__.py": True,
    "json/decoder.py": False,
    "secrets.py": True,
    "traceback.py": True,
    "typing.py": False,
}


@cache
def held_out_tasks() -> tuple[EditTask, ...]:
    return corpus.held_out_tasks(100, max_characters=500)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="what ships is of Python 3.11")
def test_the_recipe_makes_what_ships(tmp_path):
    shipped.write(shipped.Options(tmp_path, num_conversations=200))
    for name in ("test.jsonl", "validation.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    made = (tmp_path / "conversations.jsonl").read_bytes()
    assert (FOLDER / "conversations.jsonl").read_bytes().startswith(made)


@pytest.mark.slow
def test_split_is_disjoint_stable_and_about_five_percent():
    """The pocket weights were trained on this split: a change would leak the test set."""
    assert {path: corpus.is_held_out(path) for path in KNOWN_SIDES} == KNOWN_SIDES
    assert 0.02 < np.mean([corpus.is_held_out(path) for path in corpus.module_paths()]) < 0.09
    assert not set(corpus.pieces(held_out=False)) & set(corpus.pieces(held_out=True))


def test_cutting_dedents_and_keeps_decorators_comments_and_docstrings():
    body = '"""Say it."""\n        # loudly\n        return "x" * 40  # forty times, at once'
    module = f"class A:\n    @property\n    def b(self):\n        {body}\n"
    pieces = list(corpus.cut_pieces(module))
    assert pieces[0] == module.rstrip()
    assert pieces[1].startswith('@property\ndef b(self):\n    """Say it."""\n    # loudly\n')


# ---- Edit tasks ----------------------------------------------------------------------------------


def quoted(task: EditTask) -> tuple[str, str]:
    """The two snippets an instruction quotes: what is there, and what should be."""
    old, new = re.findall(r"`([^`]+)`", task.instruction)
    return old, new


def of_kind(kind: str) -> list[EditTask]:
    return [task for task in held_out_tasks() if task.kind == kind]


@pytest.mark.slow
def test_held_out_tasks_are_deterministic_held_out_and_of_fresh_pieces():
    tasks, training = held_out_tasks(), set(corpus.pieces(held_out=False))
    assert corpus.held_out_tasks(20, max_characters=500) == tasks[:20]
    assert corpus.held_out_tasks(20, seed=1, max_characters=500) != tasks[:20]
    assert not training & {code for task in tasks for code in (task.source, task.result)}
    assert len({task.source for task in tasks if task.kind in ("rename", "constant")}) == 40
    with pytest.raises(SpecjaxError, match="up to 5 characters allows the edit 'fix'"):
        corpus.held_out_tasks(1, kinds=("fix",), max_characters=5)


@pytest.mark.parametrize("kind", KINDS)
def test_tasks_parse_and_differ_in_several_phrasings(kind):
    tasks = of_kind(kind)
    assert len(tasks) == 100 // len(KINDS)
    assert len({task.instruction.split("`")[0] for task in tasks}) > 1
    for task in tasks:
        ast.parse(task.source)
        ast.parse(task.result)
        assert task.source != task.result


def test_rename_renames_the_tokens_and_nothing_else():
    for task in of_kind("rename"):
        old, new = quoted(task)
        names = (t for t in code_tokens(task.source) if t.type == python_tokens.NAME)
        starts = [token.start for token in names if token.text == old]
        assert replace_at(task.source, starts, old, new) == task.result
        assert re.sub(rf"\b{old}\b", new, task.source) == task.result


@pytest.mark.parametrize("kind", ["constant", "fix"])
def test_quoted_code_names_its_place(kind):
    for task in of_kind(kind):
        old, new = quoted(task)
        places = [m.start() for m in re.finditer(re.escape(old), task.source)]
        if kind == "constant" and len(places) > 1:  # digits inside a longer number or name
            places = [m.start() for m in re.finditer(rf"(?<![\w.]){old}(?![\w.])", task.source)]
        (start,) = places
        assert task.source[:start] + new + task.source[start + len(old) :] == task.result


def test_docstring_tasks_change_the_docstring_alone():
    for task in of_kind("add-docstring"):
        (text,) = re.findall(r'"(.*)"', task.instruction)
        (added,) = [line for line in task.result.split("\n") if line.strip() == f'"""{text}"""']
        assert ast.get_docstring(ast.parse(task.result).body[0], clean=False) == text
        assert task.result.replace(added + "\n", "", 1) == task.source
    for task in of_kind("strip-docstring"):
        before, after = ast.parse(task.source).body[0], ast.parse(task.result).body[0]
        assert ast.get_docstring(before) is not None
        assert [ast.dump(node) for node in before.body[1:]] == [ast.dump(n) for n in after.body]


# ---- Conversations -------------------------------------------------------------------------------


def test_a_task_has_the_tokens_that_pocket_was_trained_on():
    tokenizer = AutoTokenizer.from_pretrained(pocket_folder())
    for task in held_out_tasks()[: len(KINDS)]:
        prompt, answer = (tokenizer(text(task))["input_ids"] for text in (prompt_text, answer_text))
        record = {"prompt": task.message, "response": task.result}
        example = tokenize(conversation_of(record), tokenizer, 9999)
        assert example.tokens.tolist() == prompt + answer
        assert example.is_answer.tolist() == [False] * len(prompt) + [True] * len(answer)


def test_conversations_are_decided_by_seed_and_number_and_use_no_held_out_code():
    made = list(corpus.conversation_records(30, seed=1))
    assert made[:7] == list(corpus.conversation_records(7, seed=1))
    assert not [each for each in corpus.conversation_records(30, seed=2) if each in made]
    edited = [each["prompt"] for each in made if "prompt" in each]
    assert 18 <= len(edited) <= 29
    sources = {prompt.split("\n", 1)[1] for prompt in edited}
    assert not sources & set(corpus.pieces(held_out=True))
    code = [each["text"] for each in made if "text" in each]
    assert all(
        any(text in module for module in corpus.module_texts(held_out=False)) for text in code
    )
