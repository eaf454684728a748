"""Which prompts are measured: pocket's tasks, every format of question files, and broken files."""

import io
import json
import re
import sys
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from recipes.pocket.tokenizer import train_tokenizer
from specjax.core.chat import VICUNA, chat_text, with_template
from specjax.core.errors import SpecjaxError
from specjax.data import documents
from specjax.run.tasks import Task, later_turn_ids, read_tasks, token_ids


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["def total(values):\n    return sum(values)\n"], 320, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def read(tmp_path):
    """Reads a file of this content; returns its tasks and the complaints about it."""

    def read_text(content, limit=10):
        path, complaints = tmp_path / "tasks.jsonl", []
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        tasks = read_tasks(str(path), limit, complain=complaints.append)
        return tasks, [complaint.replace(str(path), "FILE") for complaint in complaints]

    return read_text


# ---- Pocket, and tokens -------------------------------------------------------------------------


def test_pocket_tasks_are_held_out_edits_and_read_as_pocket_was_trained(tokenizer):
    tasks = read_tasks("pocket", limit=2)
    kinds = ["rename", "constant", "fix", "add-docstring", "strip-docstring", "complete"]
    assert [task.kind for task in tasks] == [kind for kind in kinds for _ in range(2)]
    assert read_tasks("pocket", limit=3)[::3] == tasks[::2]
    others = [read_tasks("pocket", 2, seed=1), read_tasks("pocket", 2, is_validation=True)]
    assert not set(others[1]) & set(tasks) and set(others[0]) != set(tasks)
    opening = f"<|begin|>{tasks[-1].text}"
    for task in (tasks[-1], Task("x", (opening,), is_opening=True)):
        assert token_ids(task, tokenizer) == tuple(tokenizer(opening)["input_ids"])
    expected = tokenizer(f"<|begin|><|user|>{tasks[0].text}<|assistant|>")["input_ids"]
    assert token_ids(tasks[0], tokenizer) == tuple(expected)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (
            {"incorrect_solutions": "BUG", "code_language": "java"}
            | {"public_tests_input": "4", "public_tests_output": "8"},
            ("correct the errors", "Below is the java buggy code:\nBUG", "Input: 4\nOutput: 8"),
        ),
        (
            {"source_code": "OLD", "public_tests_input": "4", "public_tests_output": "8"},
            ("optimize", "the code:\nOLD\nOptimize", "Input: 4\nOutput: 8"),
        ),
        (
            {"source_code": "OLD", "source_lang": "cpp", "target_lang": "python"}
            | {"public_tests_input": "4", "public_tests_output": "8"},
            ("translate", "the cpp code:\nOLD", "to python and", "Input: 4\nOutput: 8"),
        ),
        (
            {"similar_source_code": "OLD", "public_target_tests_input": "4"}
            | {"public_similar_tests_input": "1", "public_target_tests_output": "8"},
            ("related function", "OLD\nIt computes:\nInput: 1\n", "Input: 4\nOutput: 8"),
        ),
        (
            {"coarse_grained": "Simplify.", "input": "Longwinded", "reference": ["a", "b"]},
            ("# Instruction:\nSimplify.\n# Input:\nLongwinded\n# Reference:\na\nb\nResponse:",),
        ),
        ({"coarse_grained": "Fix.", "input": "x"}, ("# Input:\nx\nResponse:\n",)),
        ({"essay": "Cars", "feedback": "Good"}, ("Essay: Cars\nFeedback: Good\nRevise",)),
    ],
)
def test_edits_are_asked_in_a_chat_as_pld_plus_asks_them(read, record, parts):
    [task], complaints = read(json.dumps(record))
    assert task.is_chat and not complaints
    for part in parts:
        assert part in task.text


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
    monkeypatch.setattr(documents, "hf_hub_download", download)
    monkeypatch.setattr(
        documents, "urlopen", lambda address, timeout: asked.append(address) or listed
    )
    on_hub = "https://huggingface.co/datasets/a/sums/resolve/main/v1/x.jsonl"
    sources = ("a/sums:main:test", "a/sums", "a/sums::dev", on_hub, "https://x/y.json")
    for source in sources:
        assert [task.text for task in read_tasks(source, 3)] == ["How many?"]
    assert asked == [
        ("a/sums", "main", "test"),
        ("a/sums", "train"),
        ("a/sums", "dev"),
        ("a/sums", "v1/x.jsonl", "dataset", "main"),
        "https://x/y.json",
    ]


def test_only_what_is_wanted_of_a_hub_dataset_is_read(monkeypatch):
    sums = repeat({"question": "How many?", "answer": "4"}, 9)
    kinds = [{"turns": [kind], "category": kind} for kind in "aaab"]
    sets = {"a/sums": chain([{"broken": 1}], sums), "a/kinds": kinds}
    package = SimpleNamespace(load_dataset=lambda name, split, streaming: sets[name])
    monkeypatch.setitem(sys.modules, "datasets", package)
    complaints = []
    assert len(read_tasks("a/sums", 3, complain=complaints.append)) == 3 and len(complaints) == 1
    assert len(list(sums)) == 6
    assert [task.kind for task in read_tasks("a/kinds", 2)] == ["a", "a", "b"]


def test_a_template_by_name_or_file_takes_the_place_of_the_tokenizers(tokenizer, tmp_path):
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "sum"}]
    answered = [*chat, {"role": "assistant", "content": "6"}]
    vicuna = with_template(tokenizer, "vicuna")
    assert chat_text(vicuna, chat[1:], is_answer_next=True) == VICUNA.format(message="sum")
    expected = f"Be kind. USER: sum ASSISTANT: 6{tokenizer.eos_token}"
    assert chat_text(vicuna, answered) == expected
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[-1].content }}!")
    assert chat_text(with_template(tokenizer, str(file)), chat) == "sum!"
    assert "<|user|>" in chat_text(tokenizer, chat[1:])
    with pytest.raises(SpecjaxError, match="neither a file nor one of vicuna"):
        with_template(tokenizer, "alpaca")


def test_later_turns_hold_the_chat_so_far(tokenizer, monkeypatch):
    task = Task("chat", ("sum values", "total?", "return"), is_chat=True)

    def prompt(*answers):
        return later_turn_ids(task, answers, tokenizer)

    def ids(text):
        return tuple(tokenizer(text)["input_ids"])

    first = "<|begin|><|user|>sum values<|assistant|>"
    assert prompt() == token_ids(task, tokenizer) == ids(first)
    then = f"{first}6<|end|><|user|>total?<|assistant|>"
    assert prompt("6") == ids(then)
    assert prompt("6", "7") == ids(f"{then}7<|end|><|user|>return<|assistant|>")
    with pytest.raises(SpecjaxError, match=r"a chat of 3 turn\(s\) has none after 3 answer"):
        prompt("6", "7", "8")
    with pytest.raises(SpecjaxError, match=r"a text of 1 turn\(s\) has none"):
        later_turn_ids(Task("text", ("sum",)), (), tokenizer)

    monkeypatch.setattr(tokenizer, "chat_template", None)
    first = VICUNA.format(message="sum values")
    assert prompt() == token_ids(task, tokenizer) == ids(first)
    end = tokenizer.eos_token
    assert prompt("6") == ids(f"{first} 6{end}USER: total? ASSISTANT:")
    assert token_ids(Task("text", ("sum",)), tokenizer) == ids("sum")


# ---- Formats ------------------------------------------------------------------------------------

ALPACA_OPENING = "Below is an instruction that describes a task"
ANSWERED = "a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n###"

FORMS = {
    "Spec-Bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
        Task("writing", ("Write.", "Again."), is_chat=True),
    ),
    "HumanEval": (
        {"task_id": "HumanEval/0", "prompt": "\ndef f():\n", "entry_point": "f", "test": "f()"},
        Task("tasks", ("\ndef f():\n",)),
    ),
    "MBPP": (
        {"text": "Add {x}.", "code": "def f(): ...", "test_list": ["assert f(1)", "assert f(2)"]},
        Task("tasks", ('"""Add {x}.\nassert f(1)\n"""',)),
    ),
    "sanitized MBPP": (
        {"prompt": "Add.", "code": "def f(): ...", "test_list": ["assert f(1)"]},
        Task("tasks", ('"""Add.\nassert f(1)\n"""',)),
    ),
    "GSM8K": (
        {"question": "1 + 1?", "answer": "1 + 1 = 2\n#### 2"},
        Task("tasks", ("1 + 1?",), is_chat=True),
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1, 1", "output": "2"},
        Task(
            "tasks",
            (
                f"{ALPACA_OPENING}, paired with an input that provides further context. Write "
                f"{ANSWERED} Input:\n1, 1\n\n### Response:\n",
            ),
        ),
    ),
    "Alpaca without input": (
        {"instruction": "Add.", "input": "", "output": "2"},
        Task("tasks", (f"{ALPACA_OPENING}. Write {ANSWERED} Response:\n",)),
    ),
    "CNN/DailyMail": (
        {"article": "It rained.", "highlights": "Rain.", "id": "0"},
        Task("tasks", ("Summarize:\nIt rained.\nSummary:\n",)),
    ),
    "plain text": ({"prompt": " as is ", "category": "own"}, Task("own", (" as is ",))),
    "plain messages": ({"turns": ["Hi"]}, Task("tasks", ("Hi",), is_chat=True)),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_format_makes_the_prompt_of_its_paper(read, name):
    record, task = FORMS[name]
    assert read(json.dumps(record)) == ((task,), [])


def test_one_array_is_read_as_lines_are(read):
    records = [record for record, _ in FORMS.values()]
    lines = "\n\n".join(map(json.dumps, records))
    expected = read(lines)
    assert len(expected[0]) == len(FORMS)
    for indent in (None, 2):
        assert read(json.dumps(records, indent=indent)) == expected
    assert read("\ufeff" + lines.replace("\n", "\r\n")) == expected


def test_the_first_of_each_kind_are_taken(read):
    lines = [
        {"category": "writing", "turns": ["one"]},
        {"prompt": "two"},
        {"category": "writing", "turns": ["three"]},
        {"category": "writing", "turns": ["four"]},
    ]
    tasks, _ = read("\n".join(map(json.dumps, lines)) + "\n\n", limit=2)
    assert [(task.kind, task.text) for task in tasks] == [
        ("writing", "one"),
        ("writing", "three"),
        ("tasks", "two"),
    ]


# ---- What is malformed --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"prompt": "cut', r"is not JSON \(Unterminated string starting at at column 12\)"),
        ('{"prompt": ' + "[" * 100_000, r"is not JSON"),
        ('["a list"]', "is no JSON object"),
        (
            '{"Prompt": "x", "id": 1}',
            r"no known format: its fields are 'Prompt', 'id'; known formats are .*MBPP \(text, "
            r"test_list, code\), .*GSM8K \(question, answer\), .*HumanEval.* \(prompt\)",
        ),
        ("{}", "its fields are none;"),
        ('{"prompt": "  "}', "has an empty text in `prompt`"),
        ('{"prompt": 3}', "has no text in `prompt`, but 3"),
        (r'{"prompt": "\ud800"}', "has half a surrogate pair"),
        ('{"turns": []}', r"has no list of texts in `turns`, but \[\]"),
        ('{"turns": "not a list"}', "has no list of texts in `turns`, but 'not a list'"),
        ('{"turns": ["one", 2]}', r"has no text in `turns\[1\]`, but 2"),
        ('{"question": "", "answer": "2"}', "has an empty text in `question`"),
        ('{"text": "Add.", "code": "", "test_list": []}', "has no list of texts in `test_list`"),
        ('{"instruction": "Add.", "input": null, "output": ""}', "has no text in `input`"),
        ('{"article": ["It rained."], "highlights": ""}', "has no text in `article`"),
        ('{"prompt": "fine", "category": 3}', "has a category that is no name: 3"),
    ],
)
def test_a_malformed_line_is_named_and_the_rest_still_runs(read, line, problem):
    tasks, [complaint] = read(f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "too"}}')
    assert [task.text for task in tasks] == ["fine", "too"]
    assert "\n" not in complaint
    assert re.fullmatch(f"FILE:3 .*{problem}.*; it is left out", complaint)
    with pytest.raises(SpecjaxError, match=f"holds no tasks .*:1 .*{problem}"):
        read(line)


def test_a_malformed_item_of_an_array_is_named_and_the_rest_still_runs(read):
    tasks, [complaint] = read('[{"prompt": "fine"},\n{"prompt": 3}, {"prompt": "too"}]')
    assert [task.text for task in tasks] == ["fine", "too"]
    assert complaint == "FILE, item 2, has no text in `prompt`, but 3; it is left out"


@pytest.mark.parametrize(
    "end, problem",
    [
        (',\n{"prompt": "cut', "FILE:2 is not JSON .* at column 12"),
        (' {"prompt": "lost"}]', "FILE:1 is not JSON"),
        ('\n]\n{"prompt": "lost"}', "FILE:3 is not JSON"),
    ],
)
def test_a_damaged_array_is_refused(read, end, problem):
    with pytest.raises(SpecjaxError, match=problem.replace("FILE", "")):
        read('[{"prompt": "fine"}' + end)


def test_complaints_go_to_stderr(tmp_path, capsys):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "fine"}\nnone')
    read_tasks(str(path), limit=1)
    assert capsys.readouterr().err.startswith(f"specjax: {path}:2 is not JSON")


@pytest.mark.parametrize(
    "content, problem",
    [
        (None, r"cannot be read \(No such file"),
        ("a folder", r"cannot be read \(Is a directory"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\n\n", "holds no tasks; write one JSON object per line"),
        (b"[]", "holds no tasks; write one JSON object per line"),
    ],
)
def test_a_file_without_tasks(tmp_path, content, problem):
    path = tmp_path / "tasks.jsonl"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecjaxError, match=problem):
        read_tasks(str(path), limit=1)
