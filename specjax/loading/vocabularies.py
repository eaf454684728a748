"""The bytes of tokens, and the tokens that a target and a draft model share."""

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.draft_model import SharedVocabulary
from specjax.loading.targets import LoadedTarget

SPACE_SIGN = "\u2581"  # of SentencePiece
MAX_OTHER_TOKENS = 0.005  # share of the vocabulary: padding and the like that one side added
MIN_SHARED = 0.1  # of the smaller vocabulary; below it hardly any text can be drafted

Text = bytes | str  # that a token adds; the name of a special token


def other_tokens(target: LoadedTarget, draft: LoadedTarget) -> list[str]:
    """Returns the draft's tokens that are not the target's; none if they are only a few.

    Vocabularies of one tokenizer may be padded to different sizes.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        if draft.config.vocab_size == target.config.vocab_size:
            return []
        raise SpecjaxError(
            f"draft {draft.name} has a vocabulary of {draft.config.vocab_size} tokens, the target "
            f"one of {target.config.vocab_size}, and without both tokenizers they cannot be "
            "compared; use a draft with the target's tokenizer"
        )
    known, drafted = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    others = [text for text, token in drafted.items() if known.get(text) != token]
    return others if len(others) > MAX_OTHER_TOKENS * len(known) else []


def check_same_tokens(target: LoadedTarget, draft: LoadedTarget) -> None:
    """Raises SpecjaxError if the draft has other tokens than the target, except for a few."""
    if others := other_tokens(target, draft):
        raise SpecjaxError(
            f"draft {draft.name} has another tokenizer: {len(others)} of its tokens, such as "
            f"{others[0]!r}, are not the target's; use a draft with the target's tokenizer"
        )


def shared_vocabulary(target: LoadedTarget, draft: LoadedTarget) -> SharedVocabulary | None:
    """Returns the tokens that two tokenizers share; None if they are the same but for a few.

    Shared tokens add the same bytes to a text, or are special tokens of one name. The draft reads
    another token of the target as its longest token that ends the same bytes, an end token as its
    end token, and what is left as its unknown or padding token.
    """
    if not other_tokens(target, draft):
        return None
    texts, draft_texts = _texts(target), _texts(draft)
    # Of tokens with the same bytes the last is kept: pieces of SentencePiece follow single bytes.
    ids, draft_ids = ({text: id for id, text in one.items()} for one in (texts, draft_texts))
    shared = sorted(ids[text] for text in ids.keys() & draft_ids.keys())
    if len(shared) < MIN_SHARED * min(len(ids), len(draft_ids)):
        raise SpecjaxError(
            f"draft {draft.name} has another tokenizer and shares only {len(shared)} of its "
            f"{len(draft_ids)} tokens with the target; use a draft with the target's tokenizer"
        )
    tokenizer, roles = draft.tokenizer, ("bos_token_id", "eos_token_id")  # EOS wins over BOS
    by_role = {getattr(target.tokenizer, role): getattr(tokenizer, role) for role in roles}
    unknown = (tokenizer.unk_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    default = next(token for token in unknown if token is not None)
    readable = np.full(target.config.vocab_size, default, np.int32)
    for token, text in texts.items():
        read = _longest_end(text, draft_ids)
        read = by_role.get(token) if read is None else read
        readable[token] = default if read is None else read
    return SharedVocabulary(
        readable=jnp.asarray(readable),
        target_ids=jnp.asarray(shared, jnp.int32),
        draft_ids=jnp.asarray([draft_ids[texts[token]] for token in shared], jnp.int32),
    )


def _texts(model: LoadedTarget) -> dict[int, Text]:
    """Returns the text of each token of a model, by ascending id."""
    names = {id: entry.content for id, entry in model.tokenizer.added_tokens_decoder.items()}
    texts: dict[int, Text] = {**names, **token_bytes(model.tokenizer)}
    return {id: texts[id] for id in sorted(texts) if id < model.config.vocab_size}


def _longest_end(text: Text, ids: Mapping[Text, int]) -> int | None:
    """Returns the longest token whose bytes end the text; a special token has to be the same."""
    ends = [text[start:] for start in range(len(text))] if isinstance(text, bytes) else [text]
    return next((ids[end] for end in ends if end in ids), None)


def token_bytes(tokenizer: Any) -> dict[int, bytes]:
    """Returns the bytes that each token adds to a text, without special tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend else None
    kind = json.dumps(decoder, ensure_ascii=False)
    added = tokenizer.added_tokens_decoder
    plain = {text: token for text, token in tokenizer.get_vocab().items() if token not in added}
    if '"ByteLevel"' in kind:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
        plain = {text: token for text, token in plain.items() if byte_of.keys() >= set(text)}
        texts = {token: bytes(map(byte_of.__getitem__, text)) for text, token in plain.items()}
    elif SPACE_SIGN in kind:
        texts = {token: _piece(text) for text, token in plain.items()}
    else:
        raise SpecjaxError(
            f"the tokenizer of {tokenizer.name_or_path} is neither byte-level nor SentencePiece's, "
            "so the bytes of its tokens are unknown; use a model with such a tokenizer"
        )
    spelt = _piece if SPACE_SIGN in kind else str.encode  # its decoder reads added tokens
    texts |= {token: spelt(entry.content) for token, entry in added.items() if not entry.special}
    return texts


def _piece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x"):
        return bytes.fromhex(text[3:5])
    return text.replace(SPACE_SIGN, " ").encode()
