"""What drafters for pocket learn from: the same tokens as pocket itself, no held-out code."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from specjax import pocket
from specjax.pocket import corpus
from specjax.pocket.conversations import as_conversation, pocket_conversations
from specjax.pocket.edits import KINDS, answer_text, make_edit, prompt_text
from specjax.training.examples import tokenize


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(Path(pocket.__path__[0]) / "weights" / "target")


def test_a_task_has_the_tokens_that_pocket_was_trained_on(tokenizer):
    rng, seen = random.Random(0), set()
    while seen < set(KINDS):
        task = make_edit(rng.choice(KINDS), rng.choice(corpus.pieces(False)), rng)
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


def test_held_out_code_is_not_used(monkeypatch):
    modules, pieces = corpus.module_texts, corpus.pieces
    sides = []
    for name, whole in (("module_texts", modules), ("pieces", pieces)):
        monkeypatch.setattr(
            corpus, name, lambda held_out, whole=whole: sides.append(held_out) or whole(held_out)
        )
    made = pocket_conversations(40, edit_share=0.5, max_characters=300)
    assert set(sides) == {False}
    texts = [each.text for each in made if each.text]
    assert texts and all(any(text in module for module in modules(False)) for text in texts)
    for each in made:
        if each.turns:
            source = each.turns[0].text.split("\n", 1)[1]
            assert source not in pieces(True) and each.turns[1].text not in pieces(True)


def test_the_share_of_edit_tasks_can_be_chosen():
    assert all(each.turns for each in pocket_conversations(5, edit_share=1.0))
    assert all(each.text for each in pocket_conversations(5, edit_share=0.0))
