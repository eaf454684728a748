"""Laws that hold for whatever hypothesis thinks of; what breaks one is shrunk first."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.text import EndingText, decode, token_texts
from specjax.data.conversations import Turn, read_conversations
from specjax.decoding.prompt import from_ids
from specjax.loading.targets import load_tokenizer

settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("ci")

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
said = text.filter(str.strip)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


# ---- Prompts -----------------------------------------------------------------------------------


@given(text)
def test_a_text_comes_back_from_its_tokens(tokenizer, given_text):
    ids = tokenizer(given_text, add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, ids) == given_text


@given(
    st.lists(st.integers(0, 1500), max_size=30),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=3),
)
def test_a_text_ends_before_its_stop_texts_and_never_shows_more(tokenizer, ids, places):
    whole = "".join(token_texts(tokenizer, ids))
    assert whole == decode(tokenizer, ids)
    stops = [stop for start, length in places if (stop := whole[start : start + length])]
    ending, shown = EndingText(tokenizer, stops), ""
    for token in ids:
        ending.add(token)
        assert ending.text[: ending.num_settled].startswith(shown)
        shown = ending.text[: ending.num_settled]
    ending.finish()
    assert ending.text.startswith(shown)
    assert ending.is_stopped == bool(stops)
    assert not any(stop in ending.text for stop in stops)
    assert whole.startswith(ending.text)
    if stops:
        assert any(whole[len(ending.text) :].startswith(stop) for stop in stops)
        assert 0 < ending.num_tokens <= len(ids)
    else:
        assert ending.text == whole


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), min_size=1, max_size=4),
    st.integers(1, 16),
)
def test_a_prompt_keeps_its_rows(rows, bucket):
    prompt = from_ids(rows, bucket)
    longest = max(map(len, rows))
    assert longest <= prompt.tokens.shape[1] < longest + bucket
    assert prompt.tokens.shape[1] % bucket == 0
    assert [
        row[:length].tolist()
        for row, length in zip(np.asarray(prompt.tokens), prompt.length, strict=True)
    ] == rows


# ---- Files -------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(said, said), min_size=1, max_size=3), min_size=1, max_size=3))
def test_conversations_are_read_as_they_were_written(chats):
    expected = [
        tuple(
            turn for asked, told in chat for turn in (Turn("user", asked), Turn("assistant", told))
        )
        for chat in chats
    ]
    rows = [{"messages": [{"role": r, "content": t} for r, t in turns]} for turns in expected]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "chats.jsonl"
        file.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        assert [each.turns for each in read_conversations([file])] == expected
