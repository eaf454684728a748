"""Shared tokens: the same bytes, whatever the conventions of the two tokenizers."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specjax.core.errors import SpecjaxError
from specjax.loading.vocabularies import shared_vocabulary, token_bytes
from tests.loading.tiny import tiny

BYTE_LEVEL = ["<end>", "a", "b", "Ġ", "Ġthe", "hello", "Ċ", "Ã©", "lo", "xyz", "<s>"]
PIECES = ["<unk>", "<s>", "<stop>", "<0x0A>", "<0x61>", "▁the", "a", "é", "o", "▁", "z"]


def loaded(tokens: list[str], decoder, **special: str):
    """A target with a tokenizer of these tokens."""
    backend = Tokenizer(models.BPE({text: token for token, text in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = replace(tiny().config, vocab_size=len(tokens) + 2, eos_token_id=(0,))
    return replace(tiny("other"), tokenizer=tokenizer, config=config)


def byte_level(tokens: list[str] = BYTE_LEVEL):
    return loaded(tokens, decoders.ByteLevel(), eos_token="<end>", bos_token="<s>")


def pieces():
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "<stop>"}
    return loaded(PIECES, decoders.Replace("▁", " "), **special)


def test_tokens_of_the_same_bytes_are_shared():
    shared = shared_vocabulary(byte_level(), pieces())
    assert shared is not None
    pairs = zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True)
    names = {BYTE_LEVEL[target]: PIECES[draft] for target, draft in pairs}
    same = {"a": "a", "Ġ": "▁", "Ġthe": "▁the", "Ċ": "<0x0A>", "Ã©": "é", "<s>": "<s>"}
    assert names == same
    assert (np.diff(shared.target_ids) > 0).all()


def test_an_added_token_is_spelt_as_the_tokenizer_decodes_it():
    tokenizer = pieces().tokenizer
    tokenizer.add_tokens(AddedToken("▁▁", special=False, normalized=False))
    assert token_bytes(tokenizer)[len(PIECES)] == b"  " == tokenizer.decode(len(PIECES)).encode()


def test_the_draft_reads_the_longest_end_of_other_tokens():
    shared = shared_vocabulary(byte_level(), pieces())
    assert shared is not None
    names = [PIECES[token] for token in shared.readable]
    read = ["<stop>", "a", "<unk>", "▁", "▁the", "o", "<0x0A>", "é", "o", "z", "<s>"]
    assert names == [*read, "<unk>", "<unk>"]  # the last two pad the vocabulary


def test_a_token_that_begins_and_ends_texts_is_read_as_the_end():
    both = loaded(BYTE_LEVEL, decoders.ByteLevel(), eos_token="<end>", bos_token="<end>")
    shared = shared_vocabulary(both, pieces())
    assert shared is not None and PIECES[int(shared.readable[0])] == "<stop>"


def test_a_tokenizer_shares_all_tokens_with_itself_in_another_order():
    target, draft = byte_level(), byte_level(BYTE_LEVEL[::-1])
    shared = shared_vocabulary(target, draft)
    assert shared is not None
    assert shared.target_ids.tolist() == [*range(len(BYTE_LEVEL))]
    np.testing.assert_array_equal(shared.readable[: len(BYTE_LEVEL)], shared.draft_ids)
    ours, theirs = token_bytes(target.tokenizer), token_bytes(draft.tokenizer)
    assert all(ours[token] == theirs[int(shared.readable[token])] for token in ours)
    assert shared_vocabulary(target, byte_level()) is None


def test_tokenizers_that_share_hardly_a_token_are_rejected():
    other = byte_level(["<end>", *(f"q{number}" for number in range(11)), "<s>"])
    other = replace(other, config=replace(other.config, vocab_size=11))  # <end> is shared
    with pytest.raises(SpecjaxError, match="shares only 1 of its 11 tokens with the target"):
        shared_vocabulary(byte_level([*BYTE_LEVEL, "more"]), other)
