"""Which prompts are measured: pocket's tasks, every format of question files, and broken files."""

import io
import json
import sys
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from specjax.core.chat import VICUNA, chat_text, with_template
from specjax.core.errors import SpecjaxError
from specjax.data import records
from specjax.run.tasks import Task, read_tasks, token_ids


@pytest.fixture
def read(tmp_path, capsys):
    """Reads a file of this content; returns its tasks and the warnings about it."""

    def read_text(content, limit=10):
        path = tmp_path / "tasks.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        tasks = read_tasks(str(path), limit)
        warnings = capsys.readouterr().err.replace(str(path), "FILE").splitlines()
        return tasks, [warning.removeprefix("specjax: ") for warning in warnings]

    return read_text


# ---- Pocket, and tokens -------------------------------------------------------------------------


def test_pocket_tasks_are_held_out_edits_and_read_as_pocket_was_trained(tiny_tokenizer):
    tasks = read_tasks("pocket", limit=2)
    kinds = ["rename", "constant", "fix", "add-docstring", "strip-docstring", "complete"]
    assert [task.kind for task in tasks] == [kind for kind in kinds for _ in range(2)]
    assert read_tasks("pocket", limit=3)[::3] == tasks[::2]
    others = [read_tasks("pocket", 2, seed=1), read_tasks("pocket", 2, is_validation=True)]
    assert not set(others[1]) & set(tasks) and set(others[0]) != set(tasks)
    opening = f"<|begin|>{tasks[-1].text}"
    for task in (tasks[-1], Task("x", (opening,), is_opening=True)):
        assert token_ids(task, tiny_tokenizer) == tuple(tiny_tokenizer(opening)["input_ids"])
    expected = tiny_tokenizer(f"<|begin|><|user|>{tasks[0].text}<|assistant|>")["input_ids"]
    assert token_ids(tasks[0], tiny_tokenizer) == tuple(expected)


def test_tasks_come_from_the_hub_and_the_web(monkeypatch, tmp_path):
    row, asked = {"question": "How many?", "answer": "4"}, []

    def load_dataset(*names, split, streaming):
        asked.append((*names, split))
        return [row]

    def download(name, file, repo_type, revision):
        asked.append((name, file, repo_type, revision))
        return tmp_path / "rows"

    (tmp_path / "rows").write_text(json.dumps(row) + "\n")
    listed = io.BytesIO(json.dumps([row]).encode())
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(records, "hf_hub_download", download)
    monkeypatch.setattr(records, "urlopen", lambda at, timeout: asked.append(at) or listed)
    on_hub = "https://huggingface.co/datasets/a/sums/resolve/refs%2Fpr%2F1/v1/a%20b.jsonl"
    sources = {
        "a/sums:main:test": ("a/sums", "main", "test"),
        "a/sums": ("a/sums", "train"),
        "a/sums::dev": ("a/sums", "dev"),
        f"{on_hub}?download=true": ("a/sums", "v1/a b.jsonl", "dataset", "refs/pr/1"),
        "https://x/y.json": "https://x/y.json",
    }
    for source in sources:
        assert [task.text for task in read_tasks(source, 3)] == ["How many?"]
    assert asked == [*sources.values()]


def test_only_what_is_wanted_of_a_hub_dataset_is_read(monkeypatch, capsys):
    sums = repeat({"question": "How many?", "answer": "4"}, 9)
    kinds = [{"turns": [kind], "category": kind} for kind in "aaab"]
    sets = {"a/sums": chain([{"broken": 1}], sums), "a/kinds": kinds}
    package = SimpleNamespace(load_dataset=lambda name, split, streaming: sets[name])
    monkeypatch.setitem(sys.modules, "datasets", package)
    assert len(read_tasks("a/sums", 3)) == 3
    assert "it is left out" in capsys.readouterr().err and len(list(sums)) == 6
    assert [task.kind for task in read_tasks("a/kinds", 2)] == ["a", "a", "b"]


def test_a_template_by_name_or_file_takes_the_place_of_the_tokenizers(tiny_tokenizer, tmp_path):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "sum"}]
    answered = [*chat, {"role": "assistant", "content": "6"}]
    vicuna = with_template(tiny_tokenizer, "vicuna")
    assert chat_text(vicuna, chat[1:], is_answer_next=True) == VICUNA.format(message="sum")
    expected = f"Be kind. USER: sum ASSISTANT: 6{tiny_tokenizer.eos_token}"
    assert chat_text(vicuna, answered) == expected
    assert chat_text(vicuna, [chat[0] | {"role": "developer"}, *answered[1:]]) == expected
    with pytest.raises(SpecjaxError, match="takes no tool message here"):
        chat_text(vicuna, [*answered, {"role": "tool", "content": "7"}])
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1].content }}!")
    assert chat_text(with_template(tiny_tokenizer, str(file)), chat) == "sum!"
    assert "<|user|>" in chat_text(tiny_tokenizer, chat[1:])
    with pytest.raises(SpecjaxError, match="neither a file nor one of vicuna"):
        with_template(tiny_tokenizer, "alpaca")


def test_later_turns_hold_the_chat_so_far(tiny_tokenizer, monkeypatch):
    task = Task("chat", ("sum values", "total?", "return"), is_chat=True)

    def prompt(*answers):
        return token_ids(task, tiny_tokenizer, answers)

    def ids(text):
        return tuple(tiny_tokenizer(text)["input_ids"])

    first = "<|begin|><|user|>sum values<|assistant|>"
    assert prompt() == token_ids(task, tiny_tokenizer) == ids(first)
    then = f"{first}6<|end|><|user|>total?<|assistant|>"
    assert prompt("6") == ids(then)
    assert prompt("6", "7") == ids(f"{then}7<|end|><|user|>return<|assistant|>")

    monkeypatch.setattr(tiny_tokenizer, "chat_template", None)
    first = VICUNA.format(message="sum values")
    assert prompt() == token_ids(task, tiny_tokenizer) == ids(first)
    end = tiny_tokenizer.eos_token
    assert prompt("6") == ids(f"{first} 6{end}USER: total? ASSISTANT:")
    assert token_ids(Task("text", ("sum",)), tiny_tokenizer) == ids("sum")


# ---- Formats ------------------------------------------------------------------------------------

ALPACA_OPENING = "Below is an instruction that describes a task"
ANSWERED = "a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n###"

WITH_INPUT = ", paired with an input that provides further context"
FORMS = {  # and the text of a prompt, or the turns of a chat
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "\ndef f():\n", "entry_point": "f", "test": "f()"},
        "\ndef f():\n",
    ),
    "MBPP": (
        {"text": "Add {x}.", "code": "def f(): ...", "test_list": ["assert f(1)", "assert f(2)"]},
        '"""Add {x}.\nassert f(1)\n"""',
    ),
    "sanitized MBPP": (
        {"prompt": "Add.", "code": "def f(): ...", "test_list": ["assert f(1)"]},
        '"""Add.\nassert f(1)\n"""',
    ),
    "GSM8K": ({"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"}, ("1 + 1?",)),
    "Alpaca": (
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        f"{ALPACA_OPENING}{WITH_INPUT}. Write {ANSWERED} Input:\n1, 1\n\n### Response:\n",
    ),
    "Alpaca without input": (
        {"instruction": "Add.", "input": None, "output": "2"},
        f"{ALPACA_OPENING}. Write {ANSWERED} Response:\n",
    ),
    "CNN/DailyMail": (
        {"article": "It rained.", "highlights": "Rain.", "id": "0"},
        "Summarize:\nIt rained.\nSummary:\n",
    ),
    "plain text": ({"prompt": " as is ", "category": None}, " as is "),
    "plain messages": ({"turns": ["Hi", "Again."], "question_id": 81}, ("Hi", "Again.")),
}


@pytest.mark.parametrize("category", [{}, {"category": "writing"}], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_every_format_makes_the_prompt_of_its_paper(read, name, category):
    record, prompt = FORMS[name]
    is_chat, kind = isinstance(prompt, tuple), category.get("category", "tasks")
    task = Task(kind, prompt if is_chat else (prompt,), is_chat=is_chat)
    assert read(json.dumps(record | category)) == ((task,), [])


def test_one_array_is_read_as_lines_are(read):
    records = [record for record, _ in FORMS.values()]
    lines = "\n\n".join(map(json.dumps, records))
    expected = read(lines)
    assert len(expected[0]) == len(FORMS)
    for indent in (None, 2):
        assert read(json.dumps(records, indent=indent)) == expected
    assert read("\ufeff" + lines.replace("\n", "\r\n")) == expected


def test_the_first_of_each_kind_are_taken(read):
    writing = [{"category": "writing", "turns": [text]} for text in ("one", "two", "three")]
    lines = [writing[0], {"prompt": "other"}, *writing[1:]]
    tasks, _ = read("\n".join(map(json.dumps, lines)) + "\n\n", limit=2)
    expected = [("writing", "one"), ("writing", "two"), ("tasks", "other")]
    assert [(task.kind, task.text) for task in tasks] == expected


# ---- Bad records --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"prompt": "cut', "is not JSON (Unterminated string starting at: line 1, column 12)"),
        ('{"prompt": ' + "[" * 100_000, "is not JSON"),
        ('["a list"]', "is not a JSON object"),
        ('{"Prompt": "x", "id": 1}', "its fields are 'Prompt', 'id'; known formats are MBPP (text"),
        ('{"prompt": "  "}', "has an empty text in `prompt`"),
        ('{"turns": ["one", 2]}', "has no text in `turns[1]`, but 2"),
        ('{"instruction": "Add.", "input": 5, "output": ""}', "has no text in `input`"),
        ('{"prompt": "fine", "category": 3}', "has an invalid category: 3"),
        ('{"prompt": "fine", "data_source": ["a"]}', "has an invalid category: ['a']"),
    ],
)
def test_a_bad_line_is_named_and_the_rest_is_read(read, line, problem):
    tasks, [complaint, count] = read(f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "too"}}')
    assert [task.text for task in tasks] == ["fine", "too"]
    assert complaint.startswith("FILE:3 ") and problem in complaint and "\n" not in complaint
    assert count == "left out 1 of 3 records of FILE"
    with pytest.raises(SpecjaxError) as error:
        read(line)
    assert problem in str(error.value)


def test_a_file_without_tasks_is_rejected(read, tmp_path):
    for end in (',\n{"prompt": "cut', ' {"prompt": "lost"}]', '\n]\n{"prompt": "x"}'):
        with pytest.raises(SpecjaxError, match=r"holds no tasks .*:1 is not JSON"):
            read('[{"prompt": "fine"}' + end)
    for content in (b"", b"\n\n", b"[]", b"\xff\xfe"):
        with pytest.raises(SpecjaxError, match="holds no tasks"):
            read(content)
    for path, message in ((tmp_path, "Is a directory"), (tmp_path / "none", "does not exist")):
        with pytest.raises(SpecjaxError, match=message):
            read_tasks(str(path), limit=1)
