"""The corpus: its split, its pieces, held-out tasks, and conversations for training."""

import ast
import random

import numpy as np
import pytest
from transformers import AutoTokenizer

from specjax.core.errors import SpecjaxError
from specjax.loading.targets import pocket_folder
from specjax.pocket import corpus
from specjax.pocket.corpus import as_conversation, held_out_tasks, pocket_conversations
from specjax.pocket.edits import KINDS, answer_text, make_edit, prompt_text
from specjax.training.examples import tokenize

KNOWN_SIDES = {
    "argparse.py": False,
    "ast.py": False,
    "email/__init__.py": True,
    "json/decoder.py": False,
    "opcode.py": True,
    "secrets.py": True,
    "traceback.py": True,
    "typing.py": False,
}
TASKS = held_out_tasks(100, max_characters=500)


def test_split_is_disjoint_and_about_five_percent():
    paths = corpus.module_paths()
    assert list(paths) == sorted(set(paths)) and len(paths) > 200
    assert 0.02 < np.mean([corpus.is_held_out(path) for path in paths]) < 0.09
    assert not set(corpus.pieces(held_out=False)) & set(corpus.pieces(held_out=True))


def test_split_is_stable():
    """The pocket weights were trained on this split: a change would leak the test set."""
    known = {path: corpus.is_held_out(path) for path in KNOWN_SIDES}
    assert known == KNOWN_SIDES


def test_pieces_are_whole_definitions_of_moderate_size():
    pieces = corpus.pieces(held_out=True)
    assert len(pieces) > 100
    for piece in pieces:
        (node,) = ast.parse(piece).body
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        assert 3 <= piece.count("\n") + 1 <= 40
        assert 80 <= len(piece) <= 900


def test_cutting_dedents_and_keeps_decorators_comments_and_docstrings():
    body = '"""Say it."""\n        # loudly\n        return "x" * 40  # forty times, at once'
    module = f"class A:\n    @property\n    def b(self):\n        {body}\n"
    pieces = list(corpus.cut_pieces(module))
    assert pieces[0] == module.rstrip()
    assert pieces[1].startswith('@property\ndef b(self):\n    """Say it."""\n    # loudly\n')


# ---- Held-out tasks ----------------------------------------------------------------------------


def test_openings_are_the_first_lines_of_held_out_modules():
    openings = corpus.held_out_openings(5, seed=3)
    assert len(set(openings)) == 5
    for opening in openings:
        assert 400 < len(opening) <= corpus.OPENING_CHARACTERS
        assert opening.endswith("\n")
        assert any(module.startswith(opening) for module in corpus.module_texts(held_out=True))
    assert corpus.held_out_openings(5, seed=3) == openings != corpus.held_out_openings(5, seed=4)


def test_pieces_too_short_for_an_edit_are_refused():
    with pytest.raises(SpecjaxError, match="up to 5 characters allows the edit 'fix'; raise max_c"):
        held_out_tasks(1, kinds=("fix",), max_characters=5)


def test_held_out_tasks_are_deterministic_and_held_out():
    assert held_out_tasks(20, max_characters=500) == TASKS[:20]
    assert held_out_tasks(20, seed=1, max_characters=500) != TASKS[:20]
    training = set(corpus.pieces(held_out=False))
    assert not training & {task.source for task in TASKS} | training & {t.result for t in TASKS}


def test_held_out_tasks_use_fresh_pieces_and_then_old_ones():
    pieces = {task.source for task in TASKS if task.kind in ("rename", "constant")}
    assert len(pieces) == 2 * 100 // len(KINDS)
    many = held_out_tasks(400, kinds=("strip-docstring", "rename"), max_characters=300)
    assert len(many) == 400


# ---- Conversations for training ----------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(pocket_folder())


def test_a_task_has_the_tokens_that_pocket_was_trained_on(tokenizer):
    rng, seen = random.Random(0), set()
    while seen < set(KINDS):
        task = make_edit(rng.choice(KINDS), rng.choice(corpus.pieces(held_out=False)), rng)
        if task is None:
            continue
        seen.add(task.kind)
        asked, said = (tokenizer(text(task))["input_ids"] for text in (prompt_text, answer_text))
        example = tokenize(as_conversation(task), tokenizer, 9999)
        assert example.tokens.tolist() == asked + said
        assert example.is_answer.tolist() == [False] * len(asked) + [True] * len(said)


def test_conversations_are_decided_by_the_seed_and_their_number():
    made = pocket_conversations(30, seed=1)
    assert made[:7] == pocket_conversations(7, seed=1)
    assert not set(made) & set(pocket_conversations(30, seed=2))
    assert len(set(made)) == 30
    assert 18 <= sum(bool(each.turns) for each in made) <= 29


def test_conversations_use_no_held_out_code(monkeypatch):
    modules, pieces = corpus.module_texts, corpus.pieces
    sides = []
    for name, whole in (("module_texts", modules), ("pieces", pieces)):
        monkeypatch.setattr(
            corpus,
            name,
            lambda held_out, whole=whole: sides.append(held_out) or whole(held_out=held_out),
        )
    made = pocket_conversations(40, edit_share=0.5, max_characters=300)
    assert set(sides) == {False}
    texts = [each.text for each in made if each.text]
    known = modules(held_out=False)
    assert texts and all(any(text in module for module in known) for text in texts)
    held_out = pieces(held_out=True)
    for each in made:
        if each.turns:
            source = each.turns[0].text.split("\n", 1)[1]
            assert source not in held_out and each.turns[1].text not in held_out


def test_the_share_of_edit_tasks_can_be_chosen():
    assert all(each.turns for each in pocket_conversations(5, edit_share=1.0))
    assert all(each.text for each in pocket_conversations(5, edit_share=0.0))
