"""Attribution of given texts, and its scores."""

import numpy as np
import pytest

from recipes.papers.attribution import forced_sources, score


def test_forced_sources_take_the_occurrence_with_the_most_similar_state_before_it():
    #        0  1  2  3  4  5  6  7 | 8  9 10 11 12
    text = [5, 9, 1, 2, 6, 9, 3, 4, 6, 9, 3, 8, 7]
    states = np.eye(10)[text]  # equal after the same token
    assert forced_sources(text, 8, states) == [4, 5, 6, -1, -1]
    text[8:] = [0, 9, 1, 2, 3]
    states[8] = states[4]  # what stands before this 9 is like what stands before the second one
    assert forced_sources(text, 8, states) == [-1, -1, 2, 3, -1]
    states[8] = states[0]
    assert forced_sources(text, 8, states) == [-1, 1, 2, 3, -1]


def test_a_source_never_reaches_from_the_prompt_into_the_output():
    text = [1, 2, 3, 2, 3, 2, 3, 2]
    # From 2 only "3" can be copied: what follows it in the text is output.
    assert forced_sources(text, 3, np.ones((8, 2))) == [1, 2, 1, 2, -1]


@pytest.mark.parametrize(
    "found, true, expected",
    [
        ([1, 1, 0, 0], [1, 0, 1, 0], (0.5, 0.5, 0.5)),
        ([0, 0, 0, 0], [1, 1, 0, 0], (1.0, 0.0, 0.0)),
        ([1, 1, 1, 1], [0, 0, 0, 0], (0.0, 1.0, 0.0)),
    ],
)
def test_scores_are_shares_of_tokens(found, true, expected):
    assert score(np.array(found, bool), np.array(true, bool)) == pytest.approx(expected)
