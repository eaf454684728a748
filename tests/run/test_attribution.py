"""Sources of copied tokens, and their spans."""

import jax
import numpy as np

from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.state import NO_SOURCE
from specjax.run.attribution import Span, sources_in_prompt, spans_of
from tests.decoding.tiny import target


def test_spans_are_runs_of_neighbouring_sources():
    source = [-1, 4, 5, 6, 9, -1, 2, 4]
    assert spans_of(source) == [Span(1, 4, 4), Span(4, 5, 9), Span(6, 7, 2), Span(7, 8, 4)]
    assert spans_of(source, min_tokens=2) == [Span(1, 4, 4)]
    assert spans_of([]) == spans_of([-1, -1]) == []


def test_sources_in_the_output_are_followed_to_the_prompt():
    # Prompt of 10 tokens; output 2 copies output 0, which copies prompt 3; output 1 is new.
    assert sources_in_prompt([3, NO_SOURCE, 10, 11, 12], 10) == [3, -1, 3, -1, 3]


def test_generated_tokens_know_their_source():
    """Every source holds the token that it is the source of, and drafted tokens have one."""
    model, params = target()
    rows = [[1, 2, 3, 4, 5, 6, 1, 2], [7, 8, 9, 7, 8, 9, 7], [5, 4]]
    out = speculative_generate(
        Params(params),
        from_ids(rows),
        jax.random.key(0),
        target=model,
        drafter=PromptLookup(num_tokens=4, allow_shorter=True),
        max_new_tokens=120,
    )
    out = jax.device_get(out)
    assert out.from_draft.sum() > 30
    assert (out.source[out.from_draft] >= 0).all()
    for row, ids in enumerate(rows):
        text = [*ids, *out.tokens[row].tolist()]
        for at, source in enumerate(out.source[row]):
            if source >= 0:
                assert source < len(ids) + at
                assert text[source] == text[len(ids) + at]
        lone = np.flatnonzero((out.source[row] >= 0) & ~out.from_draft[row])
        assert out.from_draft[row, lone + 1].all(), "a root is attributed with what follows it"
