"""Pocket's tokenizer, and the packed rows it is trained on."""

import numpy as np
import pytest

from recipes.pocket import corpus
from recipes.pocket import data as pocket_data
from recipes.pocket import tokenizer as pocket_tokenizer
from recipes.pocket.edits import ASSISTANT, BEGIN, END, SPECIAL_TOKENS, USER

REPEATS, EDITS = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
HARD_TEXTS = (
    "",
    " ",
    "def f(x):\n    return x\n\n\n  # odd   spacing \t\r\n",
    "naïve Ünïcode — ≤ λ 🙂 日本語 e\u0301 \u00a0 \x00 \x7f",
    "_a __b__ 0x1F 12.50 if x:iffy  not in\n \n        y",
    "".join(map(chr, range(0x20, 0x250))),
)


MODULES = "argparse inspect ipaddress pickle subprocess tarfile threading typing zipfile/__init__"


@pytest.fixture(scope="module")
def modules():
    """Modules of the standard library; to read them all takes long."""
    paths = [corpus.standard_library() / f"{name}.py" for name in MODULES.split()]
    return [path.read_text(encoding="utf-8") for path in paths if path.is_file()]


@pytest.fixture(scope="module")
def pieces(modules):
    return [piece for module in modules for piece in corpus.cut_pieces(module)]


@pytest.fixture(scope="module")
def tokenizer(pieces):
    return pocket_tokenizer.train_tokenizer(pieces, 1024)


@pytest.fixture(scope="module")
def data(tokenizer, modules, pieces):
    return pocket_data.TrainingData.build(tokenizer, 3, pieces[:600], modules[:5])


def test_special_tokens_come_first_and_nothing_is_added(tokenizer):
    assert [tokenizer.token_to_id(text) for text in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert tokenizer.encode(BEGIN + USER + ASSISTANT + END).ids == [0, 2, 3, 1]
    assert not {0, 1, 2, 3} & set(tokenizer.encode("x = 1").ids)
    assert tokenizer.get_vocab_size() == 1024


def test_code_is_split_for_copying(tokenizer):
    counts = [len(tokenizer.encode(text).ids) for text in ("\n    ", "\n        ", "2048")]
    assert counts == [1, 1, 4]
    name = tokenizer.encode("old_name").ids
    for text in ("return old_name", "f(old_name)", "x = old_name + 1", "`old_name`"):
        ids = tokenizer.encode(text).ids
        assert any(ids[i : i + len(name)] == name for i in range(len(ids))), text


def test_saved_tokenizer_loads_with_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    pocket_tokenizer.save(tokenizer, tmp_path)
    assert pocket_tokenizer.load(tmp_path).to_str() == tokenizer.to_str()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in HARD_TEXTS:
        ids = loaded(text)["input_ids"]
        assert ids == tokenizer.encode(text).ids
        assert loaded.decode(ids, skip_special_tokens=False) == text
    assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 1)
    assert loaded.model_max_length == 2048
    messages = [{"role": "user", "content": "Hi.\nx"}, {"role": "assistant", "content": "y"}]
    chat = loaded.apply_chat_template(messages, tokenize=False)
    assert chat == f"{BEGIN}{USER}Hi.\nx{ASSISTANT}y{END}"
    prompt = loaded.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == f"{BEGIN}{USER}Hi.\nx{ASSISTANT}"


def test_batches_have_their_shape_and_repeat_exactly(data):
    mixture = (0.3, 0.5, 0.2)
    tokens, weights = data.batch(7, 6, 128, mixture)
    assert tokens.shape == weights.shape == (6, 128)
    assert tokens.dtype == np.int32 and weights.dtype == np.float32
    assert tokens.min() >= 0 and tokens.max() < 1024
    assert (tokens[:, 0] == 0).all() and (weights[:, 0] == 0).all()
    data.batch(8, 6, 128, mixture)
    again = data.batch(7, 6, 128, mixture)
    np.testing.assert_array_equal(tokens, again[0])
    np.testing.assert_array_equal(weights, again[1])
    assert (data.batch(8, 6, 128, mixture)[0] != tokens).any()


def test_full_weight_in_repeats_means_seen_before(data):
    tokens, weights = data.batch(0, 8, 256, REPEATS)
    assert 0.2 < np.mean(weights == 1) < 0.8
    for row, row_weights in zip(tokens.tolist(), weights, strict=True):
        pairs = [(row[t - 2], row[t - 1], row[t]) for t in range(2, 256)]
        for t in np.flatnonzero(row_weights == 1):
            assert pairs[t - 2] in pairs[: t - 2]


def test_full_weight_in_edits_means_answer(data):
    tokens, weights = data.batch(0, 8, 256, EDITS)
    assert np.mean(tokens == 1) > 1 / 256  # whole tasks fit, to their end token
    for row, row_weights in zip(tokens, weights, strict=True):
        answering = False
        for token, weight in zip(row[1:], row_weights[1:], strict=True):
            assert weight == pytest.approx(1.0 if answering else pocket_data.PROMPT_WEIGHT)
            answering = (answering or token == 3) and token != 1


def test_mixture_holds_within_a_batch(data):
    tokens, weights = data.batch(5, 20, 64, (0.25, 0.5, 0.25))
    assert np.sum((weights[:, 1:] == 1).all(axis=1)) == 5  # code rows
    assert np.sum(tokens[:, 1] == 2) == 10  # edit rows begin with BEGIN, USER
