"""The peers: they say what we say, and their rounds mean what ours mean."""

from dataclasses import replace
from functools import wraps

import jax
import numpy as np
import pytest

from specjax.bench import peers as peers_module
from specjax.bench.measure import Contestant, GeneratedText, Program
from specjax.bench.peers import peers, replayed, until_eos
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.hub import LoadedTarget
from specjax.methods import make_drafter
from specjax.models.config import TransformerConfig
from specjax.models.transformer import Transformer

CONFIG = TransformerConfig(96, 32, 48, 1, 4, 2, 8, max_position_embeddings=512)
NUM_TOKENS = 24
NAMES = ["transformers", "transformers pld", "transformers assisted"]
NUMBERS = np.random.default_rng(0)
# The second repeats itself.
ROWS = [tuple(NUMBERS.integers(2, 96, 9).tolist()), (5, 61, 60, 50, 27, 27) * 4, (7, 8) * 20]
EOS = 83  # the first text ends with it


def tiny(seed):
    """A random model whose weights are large enough for its context to matter."""
    params = Transformer(CONFIG).initialise(jax.random.key(seed))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)
    return LoadedTarget(Transformer(CONFIG), params, None, CONFIG, "tiny")


@pytest.fixture(scope="module")
def target():
    """Torch on one core: tests run side by side, and its threads would wait for each other."""
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers_module, "num_cores", lambda: 1)
        yield tiny(0)


@pytest.fixture(scope="module")
def ours(target):
    """Tokens and rounds of our plain decoding of each row."""
    found = speculative_generate(
        Params(target.params, None),
        from_ids(ROWS),
        jax.random.key(0),
        target=target.model,
        drafter=make_drafter("plain", target.config, {}),
        max_new_tokens=NUM_TOKENS,
    )
    rounds = np.asarray(found.stats.rounds).tolist()
    return list(zip(map(tuple, np.asarray(found.tokens).tolist()), rounds, strict=True))


@pytest.fixture(scope="module")
def contestants(target):
    """The last drafts with another model."""
    return peers(target, NUM_TOKENS, tiny(1))


def said(contestant, *rows):
    """What it says, by the steps of a measurement."""
    prepared = contestant.prepare(rows)
    assert contestant.compile(prepared) == Program()
    return contestant.read(contestant.finish(contestant.start(prepared)))


def test_all_say_what_we_say_and_their_rounds_are_passes_of_the_target(contestants, ours):
    model, num_passes = contestants[0].model, 0
    forward = model.forward

    @wraps(forward)
    def counted(*args, **kwargs):
        nonlocal num_passes
        num_passes += 1
        return forward(*args, **kwargs)

    assert [contestant.name for contestant in contestants] == NAMES
    rounds = {}
    for contestant in contestants:
        assert isinstance(contestant, Contestant)
        assert not contestant.has_prefill
        for row, (tokens, _) in zip(ROWS, ours, strict=True):
            num_passes, model.forward = 0, counted
            try:
                [text] = said(contestant, row)
            finally:
                model.forward = forward
            assert text.tokens == tokens
            assert text.rounds == num_passes == sum(text.accepted_lengths)
            sizes = range(len(text.accepted_lengths))
            assert np.dot(sizes, text.accepted_lengths) == len(tokens)
            rounds.setdefault(contestant.name, []).append(text.rounds)
    assert rounds["transformers"] == [rounds for _, rounds in ours]
    assert rounds["transformers pld"][1] < NUM_TOKENS / 2


def test_plain_serves_ragged_batches_and_the_others_one_row(contestants, ours):
    assert [contestant.max_rows for contestant in contestants] == [None, 1, 1]
    texts = said(contestants[0], *ROWS)
    assert [(text.tokens, text.rounds) for text in texts] == ours


def test_texts_end_with_eos(target, ours):
    ending = replace(target, config=replace(CONFIG, eos_token_id=(EOS, 0)))
    expected = [tuple(until_eos(tokens, (EOS, 0))) for tokens, _ in ours]
    assert expected[0][-1] == EOS
    assert len(expected[0]) < NUM_TOKENS == max(map(len, expected))
    plain, *drafting = peers(ending, NUM_TOKENS, ending)
    assert [(text.tokens, text.rounds) for text in said(plain, *ROWS)] == [
        (tokens, len(tokens)) for tokens in expected
    ]
    for contestant in drafting:
        for row, tokens in zip(ROWS, expected, strict=True):
            [text] = said(contestant, row)
            assert text.tokens == tokens
            assert len(text.from_draft) == len(tokens)


def test_a_perfect_draft_is_always_accepted(target, ours):
    *_, assisted = peers(target, NUM_TOKENS, target)
    [text] = said(assisted, ROWS[0])
    assert text.tokens == ours[0][0]
    assert text.rounds <= NUM_TOKENS / 2
    assert text.from_draft.count(False) == text.rounds  # the token after each draft


def test_without_a_draft_nothing_is_assisted(target):
    assert [contestant.name for contestant in peers(target, 8, None)] == NAMES[:2]


def test_rounds_are_replayed_from_their_drafts():
    drafts = [(3, 4, 9), (), (7, 8, 9)]
    assert replayed((3, 4, 5, 6, 7, 8), drafts) == GeneratedText(
        (3, 4, 5, 6, 7, 8), 3, (0, 1, 1, 1), (True, True, False, False, True, True), 4
    )
    assert replayed((), []) == GeneratedText((), 0, (0,), (), 0)
    with pytest.raises(SpecjaxError, match="2 rounds account for 4 of 6 tokens"):
        replayed((3, 4, 5, 6, 7, 8), drafts[:2])
