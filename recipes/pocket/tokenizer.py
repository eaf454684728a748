"""Trains pocket's tokenizer, a small byte-level BPE that suits Python source and copying."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from recipes.pocket import corpus
from recipes.pocket.edits import ASSISTANT, BEGIN, END, KINDS, SPECIAL_TOKENS, USER, make_edit

BEGIN_ID, END_ID, USER_ID, ASSISTANT_ID = range(len(SPECIAL_TOKENS))
MODEL_MAX_LENGTH = 2048

# A keyword or a punctuation mark takes the spaces around it, so an identifier in code has no
# leading space: `x` is the same token in "f(x)", "return x", "x = 1" and in an instruction. So
# copying, which pocket learns first, copies identical tokens.
_KEYWORDS = (
    "False|None|True|and|as|assert|async|await|class|def|del|elif|else|except|for|from|global|if"
    "|import|in|is|lambda|nonlocal|not|or|raise|return|while|with|yield"
)
SPLIT_PATTERN = "|".join(
    (
        r"\n+[ ]*",  # line breaks with the indentation that follows: one token
        rf" ?(?:{_KEYWORDS})(?![\p{{L}}\p{{N}}_]) ?",
        r" ?_*\p{L}+",  # a word, "old" and "_name" of "old_name"
        r"\p{N}",  # every digit alone
        r" ?[^\s\p{L}\p{N}_]+(?: (?! ))?",
        r"_+",
        r"[ ]+(?=[ ])",  # a run of spaces leaves its last one to what follows
        r"\s",
    )
)

CHAT_TEMPLATE = (
    "{{ '" + BEGIN + "' }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '" + ASSISTANT + "' + message['content'] + '" + END + "' }}"
    "{% else %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def tokenizer_texts() -> Iterator[str]:
    """Yields the tokenizer's training texts: modules and a sample of instructions."""
    yield from corpus.module_texts(held_out=False)
    for index, piece in enumerate(corpus.pieces(held_out=False)):
        task = make_edit(KINDS[index % len(KINDS)], piece, random.Random(index))
        if task is not None:
            yield task.instruction


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """Learns a byte-level BPE from `texts`.

    It normalises nothing, adds nothing when it encodes and knows all 256 bytes, so decoding gives
    back any text exactly. The special tokens have the ids 0 to 3, in the order of SPECIAL_TOKENS.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[AddedToken(text, special=True) for text in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load(folder: Path) -> Tokenizer:
    """Loads the tokenizer in `folder`, without transformers."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`, as `AutoTokenizer` loads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "additional_special_tokens": [USER, ASSISTANT],
        "model_max_length": MODEL_MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
