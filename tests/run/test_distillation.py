"""Self-distillation: answers equal plain decoding, in a file that survives a kill."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from specjax.core.chat import chat_ids, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError
from specjax.core.text import UNFINISHED
from specjax.data.conversations import (
    ASSISTANT,
    SYSTEM,
    USER,
    Conversation,
    Turn,
    read_conversations,
)
from specjax.decoding.prompt import from_ids
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import load
from specjax.models.config import Rope
from specjax.run.distillation import (
    DistillOptions,
    check_room,
    distill,
    generate_questions,
    prompt_of,
    with_answer,
)
from specjax.training.examples import tokenize_all
from tests.cli.training import WORDS

LONGEST = 320  # the target's positions
SHORT = DistillOptions(distill_tokens=12)


@pytest.fixture(scope="module")
def target(tiny):
    return load(tiny)


@pytest.fixture
def answer(target, tmp_path):
    """Runs `distill` in a file of this name."""

    def answer(conversations, name="answers.jsonl", options=SHORT, target=target, **more):
        return distill(target, conversations, tmp_path / name, LONGEST, options, **more)

    return answer


def ask(*questions: str, system: str = "", answers: tuple[str, ...] = ()) -> Conversation:
    turns = [Turn(SYSTEM, system)] if system else []
    for number, question in enumerate(questions):
        turns.append(Turn(USER, question))
        turns += [Turn(ASSISTANT, text) for text in answers[number : number + 1]]
    return Conversation(tuple(turns))


def many(count: int) -> list[Conversation]:
    """Conversations of one to three questions each; every fifth is a plain text."""
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(rng.choice(WORDS, length))

    return [
        Conversation(text=text(20))
        if number % 5 == 4
        else ask(*(text(3) for _ in range(1 + number % 3)), answers=("other",) * 3)
        for number in range(count)
    ]


def plain(target, ids, temperature: float = 0.0, number: int = 0, seed: int = 0) -> list[int]:
    """Plain decoding of a prompt of conversation `number`, in its first turn; no end token."""
    tokens, length = reference_generate(
        target.params,
        from_ids([ids]),
        jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), 0),
        target=target.model,
        sampling=Sampling(temperature),
        max_new_tokens=SHORT.distill_tokens,
        eos=target.eos,
    )
    new_tokens = np.asarray(tokens[0, : int(length[0])]).tolist()
    return new_tokens[:-1] if new_tokens[-1] in target.eos else new_tokens


def decoded(target, ids) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True)


def ending(target):
    """The target with every fourth token as an end token."""
    eos = tuple(range(0, 320, 4))
    return replace(target, config=replace(target.config, eos_token_id=eos))


# ---- Answers ------------------------------------------------------------------------------------


def test_answers_are_those_of_plain_decoding_turn_after_turn(target, answer):
    """Every fourth token ends an answer here, so that none is cut."""
    target = ending(target)
    conversation = ask("best value", "and in total?", system="Be short.", answers=("no", "no"))
    [answered] = answer([conversation], target=target)
    assert [turn.role for turn in answered.turns] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    unchanged = [turn.text for turn in answered.turns if turn.role != ASSISTANT]
    assert unchanged == ["Be short.", "best value", "and in total?"]
    for number in (2, 4):
        messages = [{"role": turn.role, "content": turn.text} for turn in answered.turns[:number]]
        text = chat_text(target.tokenizer, messages, is_answer_next=True)
        ids = encode_chat(target.tokenizer, text)["input_ids"]
        assert answered.turns[number].text == decoded(target, plain(target, ids))


def test_above_temperature_0_answers_are_drawn(target, answer):
    """They are those of plain decoding with a key for each conversation, and depend on the seed."""
    conversations = [ask(" ".join(WORDS[:count])) for count in (3, 1, 2)]
    options = replace(SHORT, distill_temperature=1.0)
    answered = answer(conversations, "one.jsonl", options, seed=7)
    for number, (before, after) in enumerate(zip(conversations, answered, strict=True)):
        ids = chat_ids(target.tokenizer, before.turns[0].text)
        new_tokens = plain(target, ids, temperature=1.0, number=number, seed=7)
        assert after.turns[1].text == decoded(target, new_tokens).rstrip(UNFINISHED)
    assert answer(conversations, "other.jsonl", options, seed=8) != answered


def test_a_plain_text_keeps_its_opening(target, answer):
    text = " ".join(WORDS * 3)
    [continued] = answer([Conversation(text=text)])
    ids = opening_ids(target.tokenizer, text)
    opening = ids[: round(len(ids) / 4)]
    assert continued.text == decoded(target, [*opening, *plain(target, opening)])
    assert text.startswith(decoded(target, opening))
    for count in range(1, 9):  # of characters that take several tokens
        text = "日" * count
        opening = prompt_of(target, Conversation(text=text), LONGEST, 12)
        assert text.startswith(decoded(target, opening))


# ---- The file -----------------------------------------------------------------------------------


def test_the_file_can_be_read_like_any_other_and_learned_from(target, answer, tmp_path, capsys):
    conversations, file = many(11), tmp_path / "answers.jsonl"
    answered = answer(conversations)
    numbers = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    in_file = dict(zip(numbers, read_conversations([file]), strict=True))
    assert [in_file[number] for number in range(11)] == answered
    for before, after in zip(conversations, answered, strict=True):
        assert before.text[:8] == after.text[:8]
    examples = tokenize_all(answered, target.tokenizer, 320)
    assert all(example.is_answer.any() for example in examples)
    assert capsys.readouterr().err == ""


def test_a_killed_distillation_ends_with_the_same_file(answer, tmp_path):
    """With any remains and any size of the batch; lines may be in another order."""
    whole, cut, conversations = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl", many(19)
    options = replace(SHORT, distill_temperature=1.0)
    answered = answer(conversations, whole.name, options, seed=3)

    def stop_after_nine(numbers):
        for count, number in enumerate(numbers):
            if count == 9:
                raise KeyboardInterrupt
            yield number

    again = partial(answer, conversations, cut.name, replace(options, distill_batch=3), seed=3)
    with pytest.raises(KeyboardInterrupt):
        again(watch=stop_after_nine)
    lines = cut.read_bytes().splitlines(True)
    assert len(lines) == 9
    for remains in (lines, [*lines, lines[0][:40]], [*lines[:5], b'{"number']):
        cut.write_bytes(b"".join(remains))
        assert again(resume=True) == answered
        assert sorted(cut.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    nothing_missing = lambda missing: pytest.fail("asked again") if missing else missing  # noqa: E731
    assert again(watch=nothing_missing, resume=True) == answered


def test_another_request_is_rejected(tiny, answer, tmp_path):
    answer(conversations := many(2))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SpecjaxError, match="already holds a run; add --resume"):
        answer(conversations)
    longer, warmer = replace(SHORT, distill_tokens=13), replace(SHORT, distill_temperature=0.5)
    for changed, options, seed, change in [
        (conversations, longer, 0, r"\(distill_tokens was 12, now 13\)"),
        (conversations, warmer, 1, r"\(distill_temperature was 0.0, now 0.5, seed was 0, now 1\)"),
        (conversations[:1], SHORT, 0, r"\(prompts was "),
    ]:
        with pytest.raises(SpecjaxError, match=f"holds another run {change}"):
            answer(changed, options=options, seed=seed, resume=True)
    with pytest.raises(SpecjaxError, match=r"\(dtype was 'float32', now 'int8"):
        answer(conversations, target=load(tiny, quantize="int8"), resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_end_of_a_cut_answer_is_not_learned(target, answer, tmp_path):
    """SHORT cuts every answer of this target, so no conversation goes on after the first."""
    [answered] = answer([ask("best value", "and in total?")])
    assert answered.is_cut and len(answered.turns) == 2
    assert list(read_conversations([tmp_path / "answers.jsonl"])) == [answered]
    both = [answered, replace(answered, is_cut=False)]
    cut, whole = tokenize_all(both, target.tokenizer, LONGEST)
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    [unlearned] = np.flatnonzero(cut.is_answer != whole.is_answer)
    assert whole.tokens[unlearned] in target.eos


@pytest.mark.parametrize("asked", [ask("best"), Conversation(text="best")])
def test_part_of_a_character_at_a_cut_is_not_learned(target, asked):
    ids = target.tokenizer("total 日本", add_special_tokens=False)["input_ids"]
    answered = with_answer(target, asked, None, (), ids[:-1])
    assert (answered.text or answered.turns[-1].text) == "total 日"


def test_the_target_generates_questions(target, tmp_path):
    """A later run for more begins with the same questions; every fourth token ends a turn here."""
    file, questions_of = tmp_path / "questions.jsonl", partial(generate_questions, ending(target))
    few = questions_of(4, file, SHORT, seed=2)
    more = questions_of(12, file, SHORT, seed=2, resume=True)
    assert more[: len(few)] == few and len(few) < len(more) <= 12
    for question in more:
        [turn] = question.turns
        assert turn.role == USER and turn.text
    assert questions_of(12, tmp_path / "other.jsonl", SHORT, seed=3) != more
    with pytest.raises(SpecjaxError, match=r"holds another run \(seed was 2, now 3\)"):
        questions_of(4, file, SHORT, seed=3, resume=True)
    with pytest.raises(SpecjaxError, match="generated no whole question; give --data a file"):
        generate_questions(target, 2, tmp_path / "cut.jsonl", SHORT)  # SHORT cuts all of them


# ---- Conversations without an answer ------------------------------------------------------------


def test_a_prompt_that_is_too_long_is_cut_or_skipped(target, answer, tmp_path, capsys):
    """The second question of one does not fit, nor the first of another; a text is cut."""
    long = " ".join(WORDS * 60)
    conversations = [ask("best", long, "count"), ask(long), ask("max"), Conversation(text=long)]
    answered = answer(conversations)
    first_turns = [conversation.turns[:1] for conversation in answered]
    assert first_turns == [conversations[0].turns[:1], conversations[2].turns[:1], ()]
    assert [len(conversation.turns) for conversation in answered] == [2, 2, 0]
    opening = opening_ids(target.tokenizer, long)[: target.config.longest_text - 12]
    assert answered[2].text.startswith(decoded(target, opening[:-1]))  # perhaps half a letter
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("specjax: skipped 1 of 4 conversations: too long to answer")
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 4
    assert answer(conversations, resume=True) == answered


def test_a_prompt_before_and_an_answer_beyond_the_change_of_longrope_do_not_fit(target):
    rope = Rope("longrope", original_max_position_embeddings=64)
    longrope = replace(target, config=replace(target.config, rope=rope))
    for asked in (ask("total " * 6), Conversation(text="total " * 40)):
        ids = prompt_of(target, asked, LONGEST, 64 - 10)
        assert 10 < len(ids) <= 64
        assert prompt_of(longrope, asked, LONGEST, 64 - len(ids)) == ids
        assert prompt_of(longrope, asked, LONGEST, 65 - len(ids)) == ()


def test_an_impossible_request_writes_nothing(target, answer, tmp_path):
    file = "new/answers.jsonl"
    with pytest.raises(SpecjaxError, match="has no tokenizer"):
        answer(many(1), file, target=replace(target, tokenizer=None))
    with pytest.raises(SpecjaxError, match=r"distill_tokens 319 .* no room .* of 320 tokens"):
        answer(many(1), file, DistillOptions(distill_tokens=319))
    assert not (tmp_path / "new").exists()
    check_room(target, LONGEST, DistillOptions(distill_tokens=318))
    (tmp_path / "file").touch()
    with pytest.raises(SpecjaxError, match=r"cannot write .*/file"):
        answer(many(1), "file/answers.jsonl")


@pytest.mark.parametrize("max_new_tokens", [1, 318, 319, 320, 999])
def test_prompts_leave_room_for_their_answers(target, max_new_tokens):
    """As many tokens of a text as fit, but at least two; all of a conversation or nothing."""
    room = target.config.longest_text - max_new_tokens
    text = prompt_of(target, Conversation(text=" ".join(WORDS * 400)), LONGEST, max_new_tokens)
    assert len(text) == (room if room >= 2 else 0)
    whole = chat_ids(target.tokenizer, "best value")
    prompt = prompt_of(target, ask("best value"), LONGEST, max_new_tokens)
    assert tuple(prompt) == (whole if len(whole) <= room else ())


def test_a_blank_text_is_left_out_and_the_file_still_resumes(target, answer, monkeypatch):
    monkeypatch.setattr(type(target.tokenizer), "decode", lambda *_, **__: "\n\n")
    texts = [Conversation(text="best value in total"), ask("best value")]
    for resume in (False, True):
        assert len(answer(texts, resume=resume)) == 1
    with pytest.raises(SpecjaxError, match="none of 1 conversations is answered"):
        answer(texts[:1], "blank.jsonl")
