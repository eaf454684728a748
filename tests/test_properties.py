"""Laws that hold for whatever hypothesis thinks of; what breaks one is shrunk first."""

import json
from collections.abc import Sequence
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.core.text import EndingText, decode, token_texts
from specjax.data import datastore
from specjax.data.conversations import Turn, read_conversations
from specjax.decoding.prompt import from_ids
from specjax.decoding.tree import ancestors, merge_paths
from specjax.decoding.verify import follow
from specjax.loading.targets import load_tokenizer
from specjax.models.config import TransformerConfig
from specjax.models.families import config_from, config_values
from specjax.models.io.huggingface import write_weights
from specjax.models.io.weights import stored_tensors
from tests.decoding.test_tree import assert_well_formed, path_of

settings.register_profile("ci", max_examples=40, deadline=None, derandomize=True, database=None)
settings.load_profile("ci")

NODES, LONGEST, PATHS = 8, 4, 3
merge = jax.jit(merge_paths, static_argnums=3)
accept = jax.jit(follow, static_argnums=2)
seen_by = jax.jit(ancestors, static_argnums=1)
token = st.integers(0, 2)  # few, so that paths share prefixes
paths = st.lists(st.lists(token, max_size=LONGEST), min_size=PATHS, max_size=PATHS)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
said = text.filter(str.strip)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("pocket")


def tree_of(drafted: Sequence[Sequence[int]]):
    padded = [[*path, *[0] * (LONGEST - len(path))] for path in drafted]
    lengths = jnp.asarray([[len(path) for path in drafted]])
    return merge(jnp.array([7]), jnp.asarray([padded]), lengths, NODES)


# ---- Trees and verification --------------------------------------------------------------------


@given(paths)
def test_a_merged_tree_holds_each_prefix_once(drafted):
    tree = tree_of(drafted)
    assert_well_formed(tree)
    prefixes = [tuple(path[: n + 1]) for path in drafted for n in range(len(path))]
    expected = list(dict.fromkeys(prefixes))[: NODES - 1]
    found = [
        tuple(int(tree.tokens[0, step]) for step in path_of(tree, 0, node)[1:])
        for node in range(1, int(tree.num_valid()[0]))
    ]
    assert found == expected
    seen = np.asarray(seen_by(tree, LONGEST))[0]
    for node in range(len(found) + 1):
        assert np.flatnonzero(seen[node]).tolist() == path_of(tree, 0, node)


@given(paths, st.lists(token, min_size=NODES, max_size=NODES))
def test_the_accepted_path_is_where_the_target_goes(drafted, wanted):
    tree = tree_of(drafted)
    verification = accept(tree, jnp.asarray([wanted]), LONGEST)
    children = {
        (int(tree.parents[0, node]), int(tree.tokens[0, node])): node
        for node in range(1, int(tree.num_valid()[0]))
    }
    expected = [0]
    while (child := children.get((expected[-1], wanted[expected[-1]]))) is not None:
        expected.append(child)
    accepted = int(verification.num_accepted[0])
    assert verification.path[0, : accepted + 1].tolist() == expected
    assert int(verification.bonus[0]) == wanted[expected[-1]]


# ---- Prompts -----------------------------------------------------------------------------------


@given(text)
def test_a_text_comes_back_from_its_tokens(tokenizer, given_text):
    ids = tokenizer(given_text, add_special_tokens=False)["input_ids"]
    assert decode(tokenizer, ids) == given_text


@given(st.lists(st.integers(0, 1500), max_size=30))
def test_token_by_token_is_the_whole_text(tokenizer, ids):
    assert "".join(token_texts(tokenizer, ids)) == decode(tokenizer, ids)


@given(
    st.lists(st.integers(0, 1500), max_size=30),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 6)), max_size=3),
)
def test_a_text_ends_before_its_stop_texts_and_never_shows_more(tokenizer, ids, places):
    whole = "".join(token_texts(tokenizer, ids))
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


# ---- Configs and files -------------------------------------------------------------------------

size = st.integers(1, 2**20)
configs = st.builds(
    TransformerConfig,
    *[size] * 3,
    st.integers(1, 10_000),
    st.just(12),
    st.sampled_from((1, 2, 3, 4, 6, 12)),
    st.integers(1, 64).map(lambda half: 2 * half),
    max_position_embeddings=size,
    rms_norm_eps=st.floats(1e-12, 1.0),
    tie_word_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
    bos_token_id=st.none() | st.integers(0, 99),
    eos_token_id=st.lists(st.integers(0, 99), unique=True, max_size=3).map(tuple),
)


@given(configs)
def test_a_written_config_is_read_as_it_was(config):
    values = json.loads(json.dumps(config_values(config)))
    assert config_from(values) == config


names = st.text("abc._019", min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.dictionaries(names, shapes, max_size=5), st.sampled_from(["float32", "bfloat16"]))
def test_written_tensors_are_read_as_they_were(wanted, dtype):
    draw = np.random.default_rng(0)
    leaves = {
        name: np.asarray(draw.normal(size=shape), jnp.dtype(dtype))
        for name, shape in wanted.items()
    }
    with TemporaryDirectory() as folder:
        write_weights(place := datastore.expand_user(folder) / "w", {}, leaves, dtype)
        found = {name: each.read() for name, each in stored_tensors(place).items()}
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert found[name].dtype == leaf.dtype and np.array_equal(found[name], leaf)


@settings(max_examples=15)
@given(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=4))
def test_a_datastore_is_read_as_it_was_and_sorted(documents):
    built = datastore.build(documents, vocab_size=3)
    with TemporaryDirectory() as folder:
        datastore.save(built, place := datastore.expand_user(folder) / "store")
        found = datastore.load_datastore(place)
    assert np.array_equal(found.tokens, built.tokens)
    tokens = found.tokens.tolist()
    keys = [(tokens[at : at + 32], at) for at in found.suffixes]
    assert keys == sorted(keys)
    assert len(keys) == sum(map(len, documents))


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
        file = datastore.expand_user(folder) / "chats.jsonl"
        file.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        assert [each.turns for each in read_conversations([file])] == expected
