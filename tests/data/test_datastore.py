"""Datastores: their order against Python's own, files and texts good and bad."""

import json
import os
import re
import sys
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.core.errors import SpecjaxError
from specjax.data import datastore, documents
from specjax.data.datastore import (
    ARRAYS,
    METADATA,
    SORTED_TOKENS,
    Metadata,
    build,
    load_datastore,
    save,
    tokenizer_fingerprint,
)
from specjax.data.documents import read_documents

DOCUMENTS = [[5, 1, 2], [], [1, 2, 3, 70_000], [5, 1, 2]]
FLAT = [5, 1, 2, -1, 1, 2, 3, 70_000, -1, 5, 1, 2, -1]


class Characters:
    """A tokenizer whose ids are code points."""

    def __call__(self, texts, add_special_tokens, verbose):
        assert not add_special_tokens and not verbose
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


def read(*sources) -> list[str]:
    return ["".join(map(chr, ids)) for ids in read_documents(sources, Characters())]


# ---- Build -------------------------------------------------------------------------------------


def test_documents_stand_one_after_the_other_with_separators():
    shown = []

    def watch(steps, doing, count=None):
        shown.append(doing)
        return steps

    made = build(DOCUMENTS, 70_001, "abc", ["a.txt", "b.txt"], watch=watch)
    assert len(set(shown)) == 2  # the progress of each part
    assert made.tokens.tolist() == FLAT
    assert made.tokens.dtype == made.suffixes.dtype == np.int32
    assert made.metadata == Metadata(70_001, "abc", 3, 10, ("a.txt", "b.txt"))
    assert made.suffixes.tolist() == [10, 1, 4, 11, 2, 5, 6, 9, 0, 7]


@pytest.mark.parametrize("seed", range(5))
def test_suffixes_are_in_the_order_of_their_first_tokens(seed):
    numbers = np.random.default_rng(seed)
    lengths = numbers.integers(0, 90, numbers.integers(1, 9))
    documents = [numbers.integers(0, 1 + seed % 5, length).tolist() for length in lengths]
    documents += [[0], *documents[:3], documents[0] + documents[-1], [0, 1] * (seed % 3) * 40]
    made = build(iter(documents), 6)
    flat = [token for document in documents if document for token in [*document, -1]]
    ended = flat + [-1] * SORTED_TOKENS
    expected = sorted(
        (at for at, token in enumerate(flat) if token >= 0),
        key=lambda at: ended[at : at + SORTED_TOKENS],
    )
    assert made.suffixes.tolist() == expected


@pytest.mark.parametrize("document", [[2, 5], [-1], [0.5], ["a"], [[1, 2]], [2**70]])
def test_documents_that_are_not_ids_of_the_vocabulary_are_rejected(document):
    with pytest.raises(SpecjaxError, match=r"document 2 (holds token id|is not a list of whole)"):
        build([[1], np.array(document)], 5)


def test_no_tokens_and_too_many_are_rejected(monkeypatch):
    with pytest.raises(SpecjaxError, match="there is no text to store; give a document"):
        build([[]], 5)
    monkeypatch.setattr(datastore, "MAX_TOKENS", 5)
    build([[1], [1, 1]], 5)
    with pytest.raises(SpecjaxError, match=r"document 2 would take .* past its limit of 5 tokens"):
        build([[1], [1, 1, 1]], 5)


# ---- Save and load -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    save(build(DOCUMENTS, 70_001, "abc", ["a.txt"]), tmp_path / "store")
    return tmp_path / "store"


def test_a_saved_datastore_loads_unchanged_and_is_not_overwritten(folder):
    loaded = load_datastore(str(folder))
    assert sorted(path.name for path in folder.iterdir()) == [METADATA, ARRAYS]
    assert loaded.metadata == build(DOCUMENTS, 70_001, "abc", ["a.txt"]).metadata
    with pytest.raises(SpecjaxError, match=r"store already exists .* choose another name"):
        save(build([[0]], 1), folder)
    assert load_datastore(folder).tokens.tolist() == FLAT


def failure(folder) -> str:
    """Returns the message, of one line, of a load that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        load_datastore(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_a_datastore_is_rejected(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        assert failure(path).startswith(f"{path} is not a datastore: it has no {METADATA}; ")


DAMAGED = r"json is damaged or .* build the datastore again"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *((text, METADATA) for text in ("{", "[]", "{}")),
        *((changes, DAMAGED) for changes in ({"format": "2"}, {"vocab_size": "x"}, {"more": 1})),
        ({"num_tokens": 9}, r"arrays are .* expected"),
        ({"num_tokens": 11, "num_documents": 2}, "arrays are"),
        ({"num_tokens": 0, "num_documents": 13}, "`num_tokens` must be at least 1"),
        ({"vocab_size": 70_000}, "values from -1 to 70000 are outside -1 to 69999"),
    ],
    ids=str,
)
def test_metadata_that_is_damaged_or_contradicts_the_arrays_is_rejected(folder, changes, message):
    path = folder / METADATA
    is_text = isinstance(changes, str)
    path.write_text(changes if is_text else json.dumps(json.loads(path.read_text()) | changes))
    assert re.search(message, failure(folder))


def test_a_truncated_file_is_rejected(folder):
    whole = (folder / ARRAYS).read_bytes()
    for kept in (-4, 0):
        (folder / ARRAYS).write_bytes(whole[:kept])
        message = f"{folder / ARRAYS} is damaged or does not match {METADATA}"
        assert failure(folder).startswith(message)


@pytest.mark.parametrize(
    "name, index, value, message",
    [
        ("tokens", 3, 1, "it does not hold 3 documents"),
        ("tokens", slice(-2, None), [-1, 1], "it does not hold 3 documents"),
        ("tokens", 0, -2, "values from -2 to"),
        ("suffixes", 0, -1, "values from -1 to 11 are outside 0 to 12"),
        ("suffixes", 0, 13, "values from 0 to 13 are outside 0 to 12"),
    ],
)
def test_arrays_with_impossible_values_are_rejected(folder, name, index, value, message):
    arrays = load_file(folder / ARRAYS)
    arrays[name][index] = value
    save_file(arrays, folder / ARRAYS)
    assert message in failure(folder)


# ---- Read text ---------------------------------------------------------------------------------


def test_a_text_file_is_one_document(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\ntwo\r\n\u00e9".encode())
    assert read(tmp_path / "a.txt") == ["one\ntwo\r\n\u00e9"]
    assert read(str(tmp_path / "a.txt"), tmp_path / "a.txt") == ["one\ntwo\r\n\u00e9"] * 2
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    for source in (tmp_path / "a.txt", tmp_path):
        with pytest.raises(SpecjaxError, match=r"a\.txt is not UTF-8 text; convert it"):
            read(source)


def test_a_line_of_jsonl_is_a_document(tmp_path):
    lines = [{"text": "one\n", "content": "no"}, {"content": "two"}, {"text": "a \ud800"}]
    for turns, said in (("messages", "content"), ("conversations", "value")):
        lines += [{turns: [{said: "one"}, {said: "two"}]}, {turns: []}, {turns: [{said: None}]}]
    parts, empty = [{"type": "text", "text": "in parts"}], {"messages": None, "text": None}
    lines += [empty | {"conversations": [{"content": None, "value": parts}]}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    assert read(tmp_path / "a.jsonl") == ["one\n", "two", "a ?", *["one\n\ntwo"] * 2, "in parts"]


def test_a_folder_means_its_text_files_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.py", "a/b.jsonl", ".git/config", ".hidden", "c/.d/e"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps({"text": name}) if name.endswith("l") else name)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\xff")
    assert read(tmp_path) == ["a/b.jsonl", "a/z.py", "b.txt"]


def test_many_texts_are_tokenized_a_batch_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 7)
    texts = [str(number) * (number % 5) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert read(tmp_path / "a.jsonl") == texts


def test_a_tokenizer_of_transformers_is_served(tiny_tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("best value")
    ids = tiny_tokenizer("best value", add_special_tokens=False)["input_ids"]
    assert list(read_documents([tmp_path / "a.txt"], tiny_tokenizer)) == [ids]
    changed = deepcopy(tiny_tokenizer)
    assert changed.add_tokens(["another"]) == 1
    assert tokenizer_fingerprint(changed) != tokenizer_fingerprint(tiny_tokenizer)


@pytest.mark.parametrize("line", ['{"a": 1}', '["text"]', '{"text": ["text"]}'])
def test_a_line_without_text_is_named_and_skipped(tmp_path, line, capsys):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "one"}}\n\n{line}\n{{"text": "two"}}\n')
    assert read(file) == ["one", "two"]
    keys = "'text' or 'content' or 'conversations' or 'conversation' or 'messages'"
    assert f"specjax: {file}:3 has no text under {keys}" in capsys.readouterr().err
    file.write_text(line)
    with pytest.raises(SpecjaxError, match=r"holds no text \(.*; write lines such as"):
        read(file)


def test_a_source_that_does_not_exist_is_rejected_at_once(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    for source in (tmp_path / "b.txt", "b.txt", "", "a text " * 99):
        with pytest.raises(SpecjaxError, match="does not exist and is not a hub id"):
            read_documents([tmp_path / "a.txt", source], Characters())


def test_hub_datasets_are_read_through_the_package_datasets(monkeypatch, capsys):
    def load_dataset(name, split, streaming):
        assert (split, streaming) == ("train", True)
        assert os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] == "0"
        yield {"text": name}
        yield {"content": "two"}
        if name == "some/rest":
            raise ConnectionError("no\nnetwork")
        yield {"title": "three"}

    fake = SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert read("some/texts") == ["some/texts", "two"]
    assert "some/texts, row 3, has no text under" in capsys.readouterr().err
    with pytest.raises(SpecjaxError) as caught:
        read("some/rest")
    message = "dataset some/rest could not be read (ConnectionError: no); check its name, "
    assert str(caught.value) == message + "or try again"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SpecjaxError, match=r"some/texts does not exist here.*pip install datasets"):
        read("some/texts")
