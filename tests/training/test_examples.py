"""Conversations as tokens: exactly the tokens of the assistant are marked."""

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specjax import pocket
from specjax.core.chat import FIXED_DAY, VICUNA, chat_ids
from specjax.core.errors import SpecjaxError
from specjax.data.conversations import Conversation, Turn
from specjax.training.examples import Example, tokenize, tokenize_all


def talk(*texts: str) -> Conversation:
    """Turns of the user and the assistant."""
    return Conversation(tuple(map(Turn, ("user", "assistant") * (len(texts) // 2), texts)))


TALK = talk("Hi there", "Hello you", "Bye", "Good day")
WITH_SYSTEM = Conversation((Turn("system", "Be kind"), *TALK.turns))
CHAT_ML = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<b>[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] | trim }} </s>"
    "{% else %}{{ raise_exception('no system here') }}{% endif %}{% endfor %}"
)
THINKING = CHAT_ML.replace(  # an empty thought is written before the last answer only
    "\n{{ m['content'] }}",
    "\n{% if loop.last and m['role'] == 'assistant' %}<t>{% endif %}{{ m['content'] }}",
)
WITHOUT_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}" + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
COUNTING = "{{ messages | length }}: " + CHAT_ML
FORGETFUL = CHAT_ML.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' }}"
)
SPECIAL = ["<b>", "</s>", "<s>", "<e>", "<t>", "<unk>"]


class Slow:
    """A tokenizer without offsets, like those written in Python."""

    is_fast = False

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return self.tokenizer(text, add_special_tokens=add_special_tokens)


def words(template: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer of words, with the space before them, that puts <b> in front."""
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+| ?[^\w\s]|\s"), "isolated")
    texts = [
        f"{VICUNA} Hi there Hello you Bye Good day Be kind [INST] [/INST]",
        "[user: \nUSER\nassistant\nsystem\nHi\nHello\nBye\nGood\nBe\n4",
    ]
    trainer = trainers.WordLevelTrainer(special_tokens=SPECIAL, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<b> $A", special_tokens=[("<b>", 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<b>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<s>", "<e>", "<t>"],
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def pocket_tokenizer():
    return AutoTokenizer.from_pretrained(Path(pocket.__path__[0]) / "weights" / "target")


def shown(example: Example, tokenizer) -> str:
    """The tokens with a bar between, those of answers in «marks»."""
    names = tokenizer.convert_ids_to_tokens(example.tokens.tolist())
    marks = example.is_answer.tolist()
    return "|".join(
        f"«{name}»" if is_answer else name for name, is_answer in zip(names, marks, strict=True)
    )


@pytest.mark.parametrize(
    "template, conversation, expected",
    [
        (
            None,
            WITH_SYSTEM,
            "<b>|Be| kind| USER|:| Hi| there| ASSISTANT|:|« Hello»|« you»|«</s>»|"
            "USER|:| Bye| ASSISTANT|:|« Good»|« day»|«</s>»",
        ),
        (
            CHAT_ML,
            WITH_SYSTEM,
            "<b>|<s>|system|\n|Be| kind|<e>|\n|<s>|user|\n|Hi| there|<e>|\n|"
            "<s>|assistant|\n|«Hello»|« you»|«<e>»|\n|<s>|user|\n|Bye|<e>|\n|"
            "<s>|assistant|\n|«Good»|« day»|«<e>»|\n",
        ),
        (
            LLAMA_2,
            TALK,
            "<b>|[|INST|]| Hi| there| [|/|INST|]|« Hello»|« you»|« »|«</s>»|"
            "<b>|[|INST|]| Bye| [|/|INST|]|« Good»|« day»|« »|«</s>»",
        ),
        (
            THINKING,
            TALK,
            "<b>|<s>|user|\n|Hi| there|<e>|\n|<s>|assistant|\n|«Hello»|« you»|«<e>»|\n|"
            "<s>|user|\n|Bye|<e>|\n|<s>|assistant|\n|«<t>»|«Good»|« day»|«<e>»|\n",
        ),
        (
            WITHOUT_END,
            TALK,
            "<b>|user|:| Hi| there|\n|assistant|:|« Hello»|« you»|\n|"
            "user|:| Bye|\n|assistant|:|« Good»|« day»|\n",
        ),
    ],
    ids=["vicuna", "chat-ml", "llama-2", "thinking", "without-end"],
)
def test_answers_and_their_end_tokens_are_marked(template, conversation, expected):
    fast = words(template)
    for tokenizer in (fast, Slow(fast)):
        assert shown(tokenize(conversation, tokenizer, 99), tokenizer) == expected


def test_a_prompt_in_training_is_the_prompt_in_decoding(pocket_tokenizer):
    for tokenizer in (pocket_tokenizer, words(None), words(CHAT_ML), words(LLAMA_2)):
        example = tokenize(TALK, tokenizer, 99)
        first_said = int(np.argmax(example.is_answer))
        assert tuple(example.tokens[:first_said]) == chat_ids(tokenizer, "Hi there")


@pytest.mark.parametrize("template", [None, CHAT_ML])
def test_any_text_is_marked_exactly(pocket_tokenizer, template):
    """Spaces, line breaks, no text, and characters of several bytes or in private use."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_tokenizer.name_or_path)
    tokenizer.chat_template = template or tokenizer.chat_template
    end = "<e>" if template else "<|end|>"
    if template:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    rng = random.Random(0)
    pieces = ["a", " ", "  ", "\n", "\n\n", "é", "🎉", "if x:", "\ue000", "", "assistant"]
    for _ in range(30):
        # Where no special token stands before the answer, line breaks would join the template's.
        first = "a" if template else ""
        texts = [first + "".join(rng.choices(pieces, k=rng.randrange(6))) for _ in range(4)]
        example = tokenize(talk(*texts), tokenizer, 999)
        ends = np.flatnonzero(np.diff(example.is_answer, prepend=False, append=False))
        answers = [tokenizer.decode(example.tokens[slice(*run)]) for run in ends.reshape(-1, 2)]
        assert answers == [texts[1] + end, texts[3] + end]
        slow = tokenize(talk(*texts), Slow(tokenizer), 999)
        assert np.array_equal(slow.tokens, example.tokens)
        assert np.array_equal(slow.is_answer, example.is_answer)


def test_every_token_of_a_plain_text_counts_and_bos_comes_first(pocket_tokenizer):
    example = tokenize(Conversation(text="if x:"), pocket_tokenizer, 99)
    assert shown(example, pocket_tokenizer) == "«<|begin|>»|«ifĠ»|«x»|«:»"
    example = tokenize(Conversation(text="Hi there"), words(None), 99)
    assert shown(example, words(None)) == "«<b>»|«Hi»|« there»"


def test_examples_are_cut_off():
    """Turns after the last answer are left out too."""
    longer = Conversation((*TALK.turns, Turn("user", "Hi"), Turn("user", "Bye")))
    tokenizer = words(CHAT_ML)
    whole = tokenize(TALK, tokenizer, 99)
    for longest in range(1, len(whole.tokens) + 2):
        cut = tokenize(longer, tokenizer, longest)
        assert cut.tokens.tolist() == whole.tokens[:longest].tolist()
        assert cut.is_answer.tolist() == whole.is_answer[:longest].tolist()
    assert (whole.tokens.dtype, whole.is_answer.dtype) == (np.int32, bool)


@pytest.mark.parametrize(
    ("template", "conversation", "reason"),
    [
        (COUNTING, TALK, r"writes the answer in turn 1, .* differently"),
        (FORGETFUL, TALK, r"writes the answer in turn 1, .* differently"),
        (LLAMA_2, WITH_SYSTEM, r"fails on messages .* system, user.*\(no system here\)"),
        (None, Conversation((Turn("user", "x"),)), "no question with an answer"),
        (None, Conversation((Turn("assistant", "x"),)), "no question with an answer"),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_rejected(template, conversation, reason):
    with pytest.raises(SpecjaxError, match=reason):
        tokenize(conversation, words(template), 99)


def test_rejected_conversations_are_skipped_and_counted(capsys):
    talks = [TALK, *[WITH_SYSTEM] * 5, TALK]
    examples = tokenize_all(talks, words(LLAMA_2), 99)
    assert len(examples) == 2
    warnings = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in warnings[:-1]] == [
        f" conversation {number}" for number in (2, 3, 4)
    ]
    assert warnings[-1] == "specjax: left out 5 of 7 records of --data"
    with pytest.raises(SpecjaxError, match=r"--data holds no conversation .*no system here"):
        tokenize_all([WITH_SYSTEM], words(LLAMA_2), 99)


DATED = "{{ strftime_now('%d %b %Y') }}: " + CHAT_ML


@pytest.mark.parametrize("template", [DATED, {"default": DATED, "tool_use": CHAT_ML}])
def test_a_template_that_writes_the_date_gives_the_same_tokens_on_any_day(
    pocket_tokenizer, template
):
    tokenizer = AutoTokenizer.from_pretrained(pocket_tokenizer.name_or_path)
    tokenizer.chat_template = template
    text = tokenizer.decode(tokenize(talk("Hi", "Hello"), tokenizer, 100).tokens)
    assert text.startswith(f"{FIXED_DAY}: ")
