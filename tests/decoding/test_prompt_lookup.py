"""Prompt lookup against slow readings of the published algorithm, on many short random texts."""

from functools import partial

import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from tests.decoding.lookup import compare


def published(drafter: PromptLookup, text: list[int], states=None) -> list[int]:
    """The published search, step by step."""
    length, count = len(text), drafter.num_tokens
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        for i in range(length - n + 1):
            has_all = i + n + count <= length and i + n < length - n
            if text[i : i + n] == text[length - n :] and has_all:
                return text[i + n : i + n + count]
    return []


def first_with_a_continuation(drafter: PromptLookup, text: list[int], states=None) -> list[int]:
    """As our docstring says: the longest n-gram first, then the first occurrence of it."""
    length = len(text)
    least = 1 if drafter.allow_shorter else drafter.num_tokens
    for n in range(drafter.max_ngram, drafter.min_ngram - 1, -1):
        for i in range(length - n - least + 1):
            if text[i : i + n] == text[max(length - n, 0) :]:
                return text[i + n : i + n + drafter.num_tokens]
    return []


@pytest.mark.parametrize(
    "settings",
    [(10, 3, 1), (4, 3, 1), (5, 4, 2), (7, 2, 2), (3, 1, 1)],
    ids=lambda settings: "tokens={},ngrams={}..{}".format(*settings),
)
def test_pld_drafts_what_the_published_algorithm_drafts(settings):
    drafter = PromptLookup(*settings)
    compare(drafter, partial(published, drafter))


@pytest.mark.parametrize("settings", [(1, 3, 1), (2, 4, 2)])
def test_pld_of_few_tokens_drafts_the_first_occurrence_of_the_longest_ngram(settings):
    drafter = PromptLookup(*settings)
    compare(drafter, partial(first_with_a_continuation, drafter))


@pytest.mark.parametrize("settings", [(10, 3, 1), (2, 3, 2), (6, 5, 3)])
def test_pld_that_allows_shorter_drafts_goes_on_to_the_end_of_the_text(settings):
    drafter = PromptLookup(*settings, allow_shorter=True)
    compare(drafter, partial(first_with_a_continuation, drafter))


def test_pld_defaults_are_those_published():
    assert PromptLookup() == PromptLookup(10, 3, 1, False)
    assert PromptLookup().num_probes == 0


@pytest.mark.parametrize("settings", [(0, 3, 1), (-1, 3, 1), (5, 0, 0), (5, 2, 3), (5, 3, 0)])
def test_pld_refuses_settings_that_draft_nothing(settings):
    with pytest.raises(SpecjaxError, match=r"must be at least 1|use 1 <= min_ngram <= max_ngram"):
        PromptLookup(*settings)
