"""What the target writes itself: its plain answers, turn after turn, in a file that can be cut."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from specjax.core.chat import chat_ids, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError
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
from specjax.run import distillation
from specjax.run.distillation import (
    DistillOptions,
    check_room,
    distill,
    generate_questions,
    prompt_of,
)
from specjax.training.examples import tokenize_all
from tests.cli.target import write_target

LONGEST = 320  # the target's positions
SHORT = DistillOptions(distill_tokens=12)
WORDS = "total value best for in return count max if while".split()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    write_target(folder)
    return load(folder)


def asked(*questions: str, system: str = "", answers: tuple[str, ...] = ()) -> Conversation:
    turns = [Turn(SYSTEM, system)] if system else []
    for number, question in enumerate(questions):
        turns.append(Turn(USER, question))
        turns += [Turn(ASSISTANT, answer) for answer in answers[number : number + 1]]
    return Conversation(tuple(turns))


def many(count: int) -> list[Conversation]:
    """Of one to three questions each, and now and then a plain text."""
    rng = np.random.default_rng(0)

    def text(length: int) -> str:
        return " ".join(rng.choice(WORDS, length))

    return [
        Conversation(text=text(20))
        if number % 5 == 4
        else asked(*(text(3) for _ in range(1 + number % 3)), answers=("other",) * 3)
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
    said = np.asarray(tokens[0, : int(length[0])]).tolist()
    return said[:-1] if said[-1] in target.eos else said


def decoded(target, ids) -> str:
    return target.tokenizer.decode(ids, skip_special_tokens=True)


# ---- What the target says -----------------------------------------------------------------------


def test_answers_are_those_of_plain_decoding_turn_after_turn(target, tmp_path):
    """Every fourth token ends an answer here, so that none is cut."""
    target = replace(target, config=replace(target.config, eos_token_id=tuple(range(0, 320, 4))))
    given = asked("best value", "and in total?", system="Be short.", answers=("no", "no"))
    [found] = distill(target, [given], tmp_path / "answers.jsonl", LONGEST, SHORT)
    assert [turn.role for turn in found.turns] == [SYSTEM, USER, ASSISTANT, USER, ASSISTANT]
    assert [turn.text for turn in found.turns if turn.role != ASSISTANT] == [
        "Be short.",
        "best value",
        "and in total?",
    ]
    for number in (2, 4):
        messages = [{"role": turn.role, "content": turn.text} for turn in found.turns[:number]]
        text = chat_text(target.tokenizer, messages, is_answer_next=True)
        ids = encode_chat(target.tokenizer, text)["input_ids"]
        assert found.turns[number].text == decoded(target, plain(target, ids))


def test_above_temperature_0_answers_are_drawn(target, tmp_path):
    """Those of plain decoding with a key for each conversation, and others with another seed."""
    given = [asked(" ".join(WORDS[:count])) for count in (3, 1, 2)]
    options = replace(SHORT, distill_temperature=1.0)
    found = distill(target, given, tmp_path / "one.jsonl", LONGEST, options, seed=7)
    for number, (before, after) in enumerate(zip(given, found, strict=True)):
        ids = chat_ids(target.tokenizer, before.turns[0].text)
        said = plain(target, ids, temperature=1.0, number=number, seed=7)
        assert after.turns[1].text == decoded(target, said)
    assert distill(target, given, tmp_path / "other.jsonl", LONGEST, options, seed=8) != found


def test_a_plain_text_keeps_its_opening(target, tmp_path):
    text = " ".join(WORDS * 3)
    [found] = distill(target, [Conversation(text=text)], tmp_path / "texts.jsonl", LONGEST, SHORT)
    ids = opening_ids(target.tokenizer, text)
    opening = ids[: round(len(ids) / 4)]
    assert found.text == decoded(target, [*opening, *plain(target, opening)])
    assert text.startswith(decoded(target, opening))


def test_an_end_token_ends_the_answer_and_is_not_in_it(target, tmp_path):
    """Every answer of this target is cut at its third token, which is taken for an end token."""
    ids = chat_ids(target.tokenizer, "best value")
    said = plain(target, ids)
    end = said[2]
    ending = replace(target, config=replace(target.config, eos_token_id=(end,)))
    [found] = distill(ending, [asked("best value")], tmp_path / "answers.jsonl", LONGEST, SHORT)
    assert found.turns[1].text == decoded(target, said[: said.index(end)])


# ---- The file -----------------------------------------------------------------------------------


def test_the_file_can_be_read_like_any_other_and_learned_from(target, tmp_path, capsys):
    file, given = tmp_path / "answers.jsonl", many(11)
    found = distill(target, given, file, LONGEST, SHORT)
    read = list(read_conversations([file]))
    numbers = [json.loads(line)["number"] for line in file.read_text().splitlines()]
    assert sorted(numbers) == list(range(11))
    assert [
        text for _, text in sorted(zip(numbers, read, strict=True), key=lambda x: x[0])
    ] == found
    assert all(
        before.text[:8] == after.text[:8] for before, after in zip(given, found, strict=True)
    )
    examples = tokenize_all(found, target.tokenizer, 320)
    assert all(example.is_answer.any() for example in examples)
    assert capsys.readouterr().err == ""


class Killed(Exception):
    pass


def test_a_killed_distillation_ends_with_the_same_file(target, tmp_path):
    """Whatever the kill left, and whatever the size of the batch; lines may be in another order."""
    whole, cut, given = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl", many(19)
    options = replace(SHORT, distill_temperature=0.8)
    found = distill(target, given, whole, LONGEST, options, seed=3)

    def stop_after_nine(numbers):
        for count, number in enumerate(numbers):
            if count == 9:
                raise Killed
            yield number

    options = replace(options, distill_batch=3)
    with pytest.raises(Killed):
        distill(target, given, cut, LONGEST, options, 3, stop_after_nine)
    lines = cut.read_bytes().splitlines(True)
    assert len(lines) == 9
    for left in (lines, [*lines, lines[0][:40]], [*lines[:5], b'{"number']):
        cut.write_bytes(b"".join(left))
        assert distill(target, given, cut, LONGEST, options, 3, resume=True) == found
        assert sorted(cut.read_bytes().splitlines()) == sorted(whole.read_bytes().splitlines())
    nothing_left = lambda starts: [pytest.fail("asked again") for _ in starts]  # noqa: E731
    assert distill(target, given, cut, LONGEST, options, 3, nothing_left, resume=True) == found


def test_another_request_is_refused_by_name(target, tmp_path):
    file, given = tmp_path / "answers.jsonl", many(2)
    distill(target, given, file, LONGEST, SHORT)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SpecjaxError, match="already holds a run; add --resume"):
        distill(target, given, file, LONGEST, SHORT)
    for conversations, options, seed, named in [
        (given, replace(SHORT, distill_tokens=13), 0, r"\(distill_tokens was 12, now 13\)"),
        (
            given,
            replace(SHORT, distill_temperature=0.5),
            1,
            r"\(distill_temperature was 0.0, now 0.5, seed was 0, now 1\)",
        ),
        (given[:1], SHORT, 0, r"\(prompts was "),
    ]:
        with pytest.raises(SpecjaxError, match=f"holds another run {named}"):
            distill(target, conversations, file, LONGEST, options, seed, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_corrupt_file_is_one_line(target, tmp_path):
    file, given = tmp_path / "answers.jsonl", many(2)
    distill(target, given, file, LONGEST, SHORT)
    file.write_bytes(b"no JSON\n" * 2)
    with pytest.raises(SpecjaxError, match=r"answers.jsonl:1 is damaged .*; delete that line"):
        distill(target, given, file, LONGEST, SHORT, resume=True)


def test_the_end_of_a_cut_answer_is_not_learned(target, tmp_path):
    """SHORT cuts every answer of this target, so no conversation goes on after the first."""
    file = tmp_path / "answers.jsonl"
    [found] = distill(target, [asked("best value", "and in total?")], file, LONGEST, SHORT)
    assert found.is_cut and len(found.turns) == 2
    assert list(read_conversations([file])) == [found]
    cut, whole = tokenize_all([found, replace(found, is_cut=False)], target.tokenizer, LONGEST)
    np.testing.assert_array_equal(cut.tokens, whole.tokens)
    [unlearned] = np.flatnonzero(cut.is_answer != whole.is_answer)
    assert whole.tokens[unlearned] in target.eos


def test_the_target_writes_its_generate_questions(target, tmp_path):
    """Every fourth token ends a turn here. More of the same run, later, begin with the same."""
    ending = replace(target, config=replace(target.config, eos_token_id=tuple(range(0, 320, 4))))
    file = tmp_path / "questions.jsonl"
    few = generate_questions(ending, 4, file, SHORT, seed=2)
    more = generate_questions(ending, 12, file, SHORT, seed=2, resume=True)
    assert more[: len(few)] == few and len(few) < len(more) <= 12
    for each in more:
        [turn] = each.turns
        assert turn.role == USER and turn.text
    assert generate_questions(ending, 12, tmp_path / "other.jsonl", SHORT, seed=3) != more
    with pytest.raises(SpecjaxError, match=r"holds another run \(seed was 2, now 3\)"):
        generate_questions(ending, 4, file, SHORT, seed=3, resume=True)
    endless = replace(target, config=replace(target.config, eos_token_id=()))
    with pytest.raises(SpecjaxError, match="generated no whole question; give --data a file"):
        generate_questions(endless, 2, tmp_path / "endless.jsonl", SHORT)


# ---- What cannot be answered --------------------------------------------------------------------


def test_what_is_too_long_is_cut_or_skipped(target, tmp_path, capsys):
    """The second question of one does not fit, the first of another neither; a text is cut."""
    long = " ".join(WORDS * 60)
    given = [asked("best", long, "count"), asked(long), asked("max"), Conversation(text=long)]
    file = tmp_path / "answers.jsonl"
    found = distill(target, given, file, LONGEST, SHORT)
    assert [each.turns[:1] for each in found] == [given[0].turns[:1], given[2].turns[:1], ()]
    assert [len(each.turns) for each in found] == [2, 2, 0]
    opening = opening_ids(target.tokenizer, long)[: target.config.longest_text - 12]
    assert found[2].text.startswith(decoded(target, opening[:-1]))  # the last may be half a letter
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.removeprefix("specjax: ").startswith(
        "Skipped 1 of 4 conversations: too long to answer"
    )
    assert len(file.read_text().splitlines()) == 4
    assert distill(target, given, file, LONGEST, SHORT, resume=True) == found


def test_what_the_chat_template_refuses_is_skipped(target, tmp_path, capsys):
    picky = load(target.name)
    picky.tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('no system') }}{% endif %}{{ message.content }}{% endfor %}"
    )
    given = [asked("best", system="Be short."), asked("max")]
    found = distill(picky, given, tmp_path / "a.jsonl", LONGEST, SHORT)
    assert [each.turns[0].text for each in found] == ["max"]
    assert capsys.readouterr().err.endswith("or rejected by the chat template.\n")
    with pytest.raises(SpecjaxError, match="none of 1 conversations is answered"):
        distill(picky, given[:1], tmp_path / "b.jsonl", LONGEST, SHORT)


def test_what_can_never_be_answered_writes_nothing(target, tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(SpecjaxError, match="has no tokenizer"):
        distill(replace(target, tokenizer=None), many(1), folder / "answers.jsonl", LONGEST, SHORT)
    options = DistillOptions(distill_tokens=319)
    with pytest.raises(
        SpecjaxError, match=r"distill_tokens 319 leaves no room .* texts of 320 tokens"
    ):
        distill(target, many(1), folder / "answers.jsonl", LONGEST, options)
    assert not folder.exists()
    check_room(target, LONGEST, DistillOptions(distill_tokens=318))


def test_a_file_that_cannot_be_written_is_one_line(target, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SpecjaxError, match=r"cannot write .*/file"):
        distill(target, many(1), tmp_path / "file" / "answers.jsonl", LONGEST, SHORT)


@pytest.mark.parametrize("max_new_tokens", [1, 318, 319, 320, 999])
def test_prompts_leave_room_for_what_is_asked(target, max_new_tokens):
    """Of a text as many tokens as fit, but at least two; of a conversation all or nothing."""
    room = target.config.longest_text - max_new_tokens
    text = prompt_of(target, Conversation(text=" ".join(WORDS * 400)), LONGEST, max_new_tokens)
    assert len(text) == (room if room >= 2 else 0)
    question = asked("best value")
    whole = chat_ids(target.tokenizer, "best value")
    assert tuple(prompt_of(target, question, LONGEST, max_new_tokens)) == (
        whole if len(whole) <= room else ()
    )


def test_a_text_of_one_token_is_no_prompt(target, monkeypatch):
    monkeypatch.setattr(distillation, "opening_ids", lambda tokenizer, text: (5,))
    assert prompt_of(target, Conversation(text="x"), LONGEST, 8) == ()
