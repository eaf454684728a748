"""Texts in static batches: every prompt is continued once, as it would be alone."""

import jax
import pytest

from recipes.smollm2.many_texts import continued
from specjax import load


@pytest.mark.slow
def test_every_prompt_is_continued_once_whatever_its_batch(tiny):
    target = load(tiny)
    prompts = [(1, 5, 9), tuple(range(2, 140)), (7, 8), (3, 4, 5, 6)]
    settings = prompts, jax.random.key(0), 0.0, 4
    found = dict(continued(target, *settings, batch=2))
    assert set(found) == {0, 1, 2, 3} and all(0 < len(ids) <= 4 for ids in found.values())
    assert found == dict(continued(target, *settings, batch=3))
