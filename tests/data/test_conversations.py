"""Conversations out of files and hub datasets: every form, and lines that are broken."""

import json
from pathlib import Path

import pytest

from specjax.core.errors import SpecjaxError
from specjax.data.conversations import Conversation, Turn, conversation_of, read_conversations

PAIR = Conversation((Turn("user", "Hi"), Turn("assistant", "Hello")))
SAID = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
SYSTEM = {"role": "system", "content": "Be kind."}
PARTS = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
FORMS = {
    "sharegpt": {"conversations": SHARED},
    "sharegpt with a cut start": {
        "conversations": [{"from": "gpt", "value": "and", "role": None}, *SHARED]
    },
    "openai": {"messages": SAID, "id": 3, "text": "no"},
    "openai in parts": {"messages": [{"role": "User", "content": PARTS}, SAID[1]]},
    "one conversation": {"conversation": SAID},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello", "text": "no"},
    "alpaca without input": {"instruction": "Hi", "input": None, "output": "Hello"},
    "response": {"prompt": "Hi", "response": "Hello"},
    "completion": {"prompt": "Hi", "completion": "Hello", "messages": None},
}
BROKEN = [
    ("{", "is not JSON"),
    ('{"title": "Hi"}', "has no conversations, messages, instruction, prompt or text"),
    ('{"text": " "}', "is empty"),
    ('{"messages": ["Hi"]}', "has turns that are not a list of objects"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', "has a turn of the unknown role 'tool'"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "has no text"),
    (json.dumps({"messages": [*SAID, SYSTEM]}), "has a system turn that is not the first"),
    ('{"messages": [{"role": "assistant", "content": "x"}]}', "has no user turns"),
    ('{"prompt": "Hi", "response": " "}', "has no assistant turns"),
    ('{"prompt": 3, "response": "Hello"}', "has no text in prompt"),
    (b'{"text": "\xff"}', "is not JSON"),
    (b'{"text": "\xed\xa0\xbd"}', "is not JSON"),  # half a character in itself
]


@pytest.fixture
def read(tmp_path, monkeypatch, capsys):
    """Writes a file and returns what is read from it, and the warnings."""

    def write_and_read(content: str | bytes, name: str = "data.jsonl", **options):
        monkeypatch.chdir(tmp_path)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
        conversations = list(read_conversations([name], **options))
        warnings = capsys.readouterr().err.splitlines()
        return conversations, [line.removeprefix("specjax: ") for line in warnings]

    return write_and_read


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_from_lines_and_from_lists(read, form):
    line = json.dumps(FORMS[form])
    assert read(f"{line}\n\n{line}\n") == ([PAIR, PAIR], [])
    assert read(f"\n[{line},\n{line}]", "data.json") == ([PAIR, PAIR], [])
    assert read(f"{line}\n{line}", "data.json") == ([PAIR, PAIR], [])


def test_forms_may_differ_from_line_to_line(read):
    system = {"messages": [SYSTEM, *SAID]}
    asked = {"instruction": "Add.", "input": "1, 2", "output": "3"}
    lines = [FORMS["sharegpt"], {"text": " Once\ud83d\n"}, system, asked]
    expected = [
        PAIR,
        Conversation(text=" Once?\n"),  # half a character has no bytes
        Conversation((Turn("system", "Be kind."), *PAIR.turns)),
        Conversation((Turn("user", "Add.\n1, 2"), Turn("assistant", "3"))),
    ]
    assert read("\ufeff" + "\n".join(map(json.dumps, lines))) == (expected, [])


@pytest.mark.parametrize("line, warning", BROKEN)
def test_a_broken_line_is_skipped_and_named_by_its_place(read, line, warning):
    whole = json.dumps(FORMS["response"]).encode()
    line = line if isinstance(line, bytes) else line.encode()
    conversations, [named, count] = read(b"\n".join((whole, line, whole)))
    assert conversations == [PAIR, PAIR]
    assert named.startswith(f"data.jsonl:2 {warning}")
    assert named.endswith("; it is left out")
    assert count == "left out 1 of 3 records of data.jsonl"


def test_only_the_first_broken_lines_are_named_one_by_one(read):
    lines = [*["{"] * 4, json.dumps(FORMS["response"]), '{"prompt": "Hi"}', "{"]
    _, warnings = read("\n".join(lines))
    assert [line.split(" ")[0] for line in warnings[:-1]] == [f"data.jsonl:{n}" for n in (1, 2, 3)]
    assert warnings[-1] == "left out 6 of 7 records of data.jsonl"
    _, warnings = read(json.dumps([FORMS["response"], 3]), "data.json")
    assert warnings[0].startswith("data.json, item 2, has no conversations")


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "it is empty"),
        ("hello\nworld", "data.jsonl:1 is not JSON"),
        ('{"prompt": "Hi"}\n{"prompt": "Ho"}', "data.jsonl:1 has no assistant turns"),
    ],
)
def test_a_source_without_conversations_is_rejected(read, content, reason):
    with pytest.raises(SpecjaxError) as caught:
        read(content)
    assert str(caught.value).startswith(f"data.jsonl holds no conversation ({reason}")


def test_for_self_distillation_questions_are_enough(read):
    more, silent = {"role": "user", "content": "Two"}, {"messages": [SYSTEM, SAID[1]]}
    lines = [{"prompt": "Hi"}, {"messages": [SYSTEM, *SAID, more]}, {"text": "plain"}, silent]
    conversations, warnings = read("\n".join(map(json.dumps, lines)), needs_answers=False)
    assert [each.questions for each in conversations] == [("Hi",), ("Hi", "Two"), ()]

    assert conversations[2].text == "plain"
    assert warnings[0].startswith("data.jsonl:4 has no user turns")


def test_a_limit_bounds_each_source_and_broken_lines_are_still_counted(tmp_path, capsys):
    for name in "ab":
        lines = ["{", *(json.dumps({"text": f"{name}{number}"}) for number in range(5)), "{"]
        (tmp_path / name).write_text("\n".join(lines))
    found = read_conversations([tmp_path / "b", str(tmp_path / "a")], limit=2)
    assert [each.text for each in found] == ["b0", "b1", "a0", "a1"]
    counts = capsys.readouterr().err.splitlines()[1::2]
    assert [line.rpartition("/")[2] for line in counts] == ["b", "a"]


def test_a_conversation_is_checked():
    for parts, message in (
        ({}, "either turns or a text"),
        ({"turns": PAIR.turns, "text": "x"}, "either turns or a text"),
        ({"turns": (Turn("gpt", "x"),)}, "turn 0 has role 'gpt'; use system, user, assistant"),
    ):
        with pytest.raises(SpecjaxError, match=message):
            Conversation(**parts)


def test_a_text_file_is_plain_text_cut_at_blank_lines(tmp_path):
    file = tmp_path / "book.txt"
    paragraphs = [f"{number} " + "word " * 300 for number in range(54)]
    file.write_text("\n\n".join(paragraphs) + "\n\n")
    found = [each.text for each in read_conversations(file)]
    assert "\n\n".join(found).split() == " ".join(paragraphs).split()
    assert [text.count("word") for text in found] == [900] * 18
    file.write_bytes(b"\r\n\r\n".join([b"word " * 20] * 40))
    assert [each.text.count("word") for each in read_conversations([file])] == [60] * 13 + [20]


def test_an_answer_of_any_form_can_be_cut():
    for form in ("alpaca", "response", "openai", "sharegpt"):
        assert conversation_of({**FORMS[form], "is_cut": True}).is_cut
        assert not conversation_of(FORMS[form]).is_cut
