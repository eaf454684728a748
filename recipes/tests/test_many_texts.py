"""Texts in static batches: every prompt is continued once, as it would be alone."""

import json

import jax

from recipes.smollm2.many_texts import continued, opening_of_question, record_of
from specjax import load
from specjax.data.conversations import USER, Conversation, Turn


def test_every_prompt_is_continued_once_whatever_its_batch():
    target = load("pocket")
    prompts = [(1, 5, 9), tuple(range(2, 140)), (7, 8), (3, 4, 5, 6)]
    settings = prompts, jax.random.key(0), 0.0, 4
    found = dict(continued(target, *settings, batch=2))
    assert set(found) == {0, 1, 2, 3} and all(0 < len(ids) <= 4 for ids in found.values())
    assert found == dict(continued(target, *settings, batch=3))


def test_a_record_tells_whole_answers_from_cut_ones():
    target = load("pocket")
    assert len(opening_of_question(target)) > 1
    question = Conversation((Turn(USER, "Why?"),))
    whole = json.loads(record_of(target, question, [5, 6, target.eos[0]]))
    cut = json.loads(record_of(target, question, [5, 6]))
    assert whole["messages"] == cut["messages"] and cut["is_cut"] and "is_cut" not in whole
