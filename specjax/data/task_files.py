"""Question files: the public formats, recognised by their fields, and the prompts made of them.

A file is JSONL (an object per line) or one JSON array of objects. Malformed records are reported
with file and line, or item of the array, and left out.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

from specjax.core.errors import SpecjaxError
from specjax.core.files import MAX_TEXT_BYTES, expand_user, read_bytes
from specjax.data.documents import DATASET_ID, hub_rows

# DISCO, appendix B, figures 7 to 10. In figure 7 the quotes belong to the prompt, as the task is a
# docstring. In the others they only surround it, and the lines of Alpaca's first paragraph are
# broken only to fit the page.
MBPP = '"""{text}\n{test}\n"""'
CNN = "Summarize:\n{article}\nSummary:\n"
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)

# PLD+, appendix C. Of code editing it shows the prompt for debugging, which the other kinds follow
# here; of text editing it shows one without a reference.
CODE_EDITING = (
    "### Instruction:\nPlease {task} Note that your solution should strictly consist of the "
    '{result} code only. Generate only the required code enclosed in "```"\n'
    "### Question:\n{question}\n### Answer:\n"
)
DEBUG = (
    "correct the errors in the buggy code snippet below, ensuring that your corrected code adheres "
    "to the specified programming language syntax and logic requirements. Validate your solution "
    "against the provided test cases to ensure its accuracy."
)
POLISH = (
    "optimize the code snippet below for speed and memory, without changing its results. Validate "
    "your solution against the provided test cases to ensure its accuracy."
)
TRANSLATE = (
    "translate the code snippet below to another programming language. Validate your solution "
    "against the provided test cases to ensure its accuracy."
)
SWITCH = (
    "modify the code snippet below so that it implements a related function. Validate your "
    "solution against the provided test cases to ensure its accuracy."
)
TEST = "{asked} passes the following test case:\nInput: {input}\nOutput: {output}"
TEXT_EDITING = (
    "Below is an instruction that describes a task, along with an input text. Please edit the "
    "input text based on the instruction. Your response should only include the edited output.\n"
    "# Instruction:\n{instruction}\n# Input:\n{input}\n{reference}Response:\n"
)
ESSAY = "Essay: {essay}\nFeedback: {feedback}\nRevise the essay using the expert feedback."

Fields = dict[str, Any]
Report = Callable[[str, str], None]  # takes the place in the file and what is wrong there
_ARRAY = re.compile(r"\s*\[\s*[{\]]")  # else a list is but one malformed line


class Question(NamedTuple):
    """One record of a file."""

    category: str | None
    turns: tuple[str, ...]
    is_chat: bool  # what a user says, turn by turn; else one text to be continued


class Form(NamedTuple):
    """A format: the fields that identify it, and how its prompts are made of them."""

    name: str
    fields: tuple[str, ...]
    turns: Callable[[Fields], tuple[str, ...]]
    is_chat: bool = False


def read_questions(
    source: str | Path,
    complain: Callable[[str], None],
    first: int | None = None,
    limit: int | None = None,
) -> list[Question]:
    """Returns the questions of a file or a hub dataset, in their order.

    Args:
        source: a file, JSONL or one JSON array, in any of `FORMS`; or, where there is no such file,
            rows of the same forms as `documents.hub_rows` reads them.
        complain: called for every record that is left out, with file and line, if others are good.
        first: read only this many records.
        limit: stop at this many questions of a hub dataset whose rows name no category.

    Raises:
        SpecjaxError: for a file that cannot be read, or holds no good record; it then says what
            is wrong with the first one.
    """
    questions, problems = [], []
    path = expand_user(source)

    def report(place: str, problem: str) -> None:
        problems.append(f"{source}{place} {problem}")

    if is_on_hub := DATASET_ID.fullmatch(str(source)) is not None and not path.exists():
        rows = enumerate(hub_rows(str(source)), start=1)
        records = ((f", row {number},", row) for number, row in rows)
    else:
        records = _records(_text_of(path), report)
    for place, record in islice(records, first):
        try:
            questions.append(_question(record))
        except SpecjaxError as error:
            report(place, str(error))
        else:
            if is_on_hub and len(questions) == limit and questions[0].category is None:
                break
    if not questions:
        why = f" ({problems[0]})" if problems else ""
        raise SpecjaxError(f"{source} holds no tasks{why}; write one JSON object per line")
    for problem in problems:
        complain(f"{problem}; it is left out")
    return questions


def _text_of(path: Path) -> str:
    try:
        return read_bytes(expand_user(path), MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecjaxError(
            f"tasks {path} cannot be read ({reason}); give 'pocket' or a JSONL file"
        ) from None


# ---- Records -----------------------------------------------------------------------------------


def _records(text: str, report: Report) -> Iterator[tuple[str, Any]]:
    """Yields every JSON value with its place; an array is read as a whole or not at all."""
    if _ARRAY.match(text):
        try:
            items = json.loads(text)
        except (ValueError, RecursionError) as error:
            report(f":{getattr(error, 'lineno', 1)}", _no_json(error))
        else:
            yield from ((f", item {number},", item) for number, item in enumerate(items, start=1))
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                report(f":{number}", _no_json(error))
            else:
                yield f":{number}", record


def _no_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"is not JSON ({error.msg} at column {error.colno})"
    return f"is not JSON that can be read ({error})"


def short(value: Any) -> str:
    """Shortens a value of the file for a message of one line."""
    writer = Repr()
    writer.maxlist, writer.maxstring = 12, 40
    return writer.repr(value)


# ---- Forms -------------------------------------------------------------------------------------


def _question(record: Any) -> Question:
    """Raises SpecjaxError, which says what is wrong but not where."""
    if not isinstance(record, dict):
        raise SpecjaxError('is no JSON object such as {"prompt": "..."}')
    form = next((form for form in FORMS if all(name in record for name in form.fields)), None)
    if form is None:
        known = ", ".join(f"{form.name} ({', '.join(form.fields)})" for form in FORMS)
        found = short(list(record))[1:-1] or "none"
        raise SpecjaxError(
            f"has no known format: its fields are {found}; known formats are {known}"
        )
    category = record.get("category", record.get("data_source"))  # XATU's name for it
    if "category" in record and (not isinstance(category, str) or not category.strip()):
        raise SpecjaxError(f"has a category that is no name: {short(category)}")
    return Question(category, form.turns(record), form.is_chat)


def _text(value: Any, name: str) -> str:
    """Returns `value` if it is a text that is not blank."""
    if not isinstance(value, str):
        raise SpecjaxError(f"has no text in `{name}`, but {short(value)}")
    if not value.strip():
        raise SpecjaxError(f"has an empty text in `{name}`")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise SpecjaxError(f"has half a surrogate pair, which is no text, in `{name}`") from None
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise SpecjaxError(f"has no list of texts in `{name}`, but {short(value)}")
    return tuple(_text(each, f"{name}[{number}]") for number, each in enumerate(value))


def _as_it_stands(name: str) -> Callable[[Fields], tuple[str, ...]]:
    return lambda fields: (_text(fields[name], name),)


def _mbpp(name: str) -> Callable[[Fields], tuple[str, ...]]:
    def turns(fields: Fields) -> tuple[str, ...]:
        test, *_ = _texts(fields["test_list"], "test_list")
        return (MBPP.format(text=_text(fields[name], name), test=test),)

    return turns


def _alpaca(fields: Fields) -> tuple[str, ...]:
    instruction = _text(fields["instruction"], "instruction")
    if fields["input"] == "":
        return (ALPACA.format(instruction=instruction),)
    given = _text(fields["input"], "input")
    return (ALPACA_WITH_INPUT.format(instruction=instruction, input=given),)


def _cnn(fields: Fields) -> tuple[str, ...]:
    return (CNN.format(article=_text(fields["article"], "article")),)


def _code_editing(
    task: str, result: str, question: str, asked: str, kind: str = ""
) -> Callable[[Fields], tuple[str, ...]]:
    """Returns the prompt of one kind of task; `question` and `asked` name fields in braces."""

    def turns(fields: Fields) -> tuple[str, ...]:
        code = next(name for name in CODE_FIELDS if name in fields)
        known = defaultdict(str, fields | {code: _text(fields[code], code)})
        given = {side: known[f"public_{kind}tests_{side}"] for side in ("input", "output")}
        test = TEST.format(asked=asked.format_map(known), **given)
        full = f"{question.format_map(known)}\n{test}"
        return (CODE_EDITING.format(task=task, result=result, question=full),)

    return turns


def _text_editing(fields: Fields) -> tuple[str, ...]:
    reference = fields.get("reference") or ""
    if isinstance(reference, list):
        reference = "\n".join(_texts(reference, "reference"))
    prompt = TEXT_EDITING.format(
        instruction=_text(fields["coarse_grained"], "coarse_grained"),
        input=_text(fields["input"], "input"),
        reference=f"# Reference:\n{reference}\n" if reference else "",
    )
    return (prompt,)


def _essay(fields: Fields) -> tuple[str, ...]:
    given = {name: _text(fields[name], name) for name in ("essay", "feedback")}
    return (ESSAY.format(**given),)


CODE_FIELDS = ("incorrect_solutions", "similar_source_code", "source_code")

# The first form that fits decides, so those with more fields come before those with fewer.
FORMS = (
    Form(
        "CodeEditorBench, debug",
        ("incorrect_solutions", "public_tests_input"),
        _code_editing(
            *(DEBUG, "corrected"),
            "Below is the {code_language} buggy code:\n{incorrect_solutions}",
            "Correct the code and ensure it",
        ),
        is_chat=True,
    ),
    Form(
        "CodeEditorBench, switch",
        ("similar_source_code", "public_target_tests_input"),
        _code_editing(
            *(SWITCH, "modified"),
            "Below is the code:\n{similar_source_code}\nIt computes:\n"
            "Input: {public_similar_tests_input}\nOutput: {public_similar_tests_output}",
            "Modify the code and ensure it",
            "target_",
        ),
        is_chat=True,
    ),
    Form(
        "CodeEditorBench, translate",
        ("source_code", "source_lang", "target_lang"),
        _code_editing(
            *(TRANSLATE, "translated"),
            "Below is the {source_lang} code:\n{source_code}",
            "Translate the code to {target_lang} and ensure it",
        ),
        is_chat=True,
    ),
    Form(
        "CodeEditorBench, polish",
        ("source_code", "public_tests_input"),
        _code_editing(
            *(POLISH, "optimized"),
            "Below is the code:\n{source_code}",
            "Optimize the code and ensure it",
        ),
        is_chat=True,
    ),
    Form("XATU", ("coarse_grained", "input"), _text_editing, is_chat=True),
    Form("ArgRewrite", ("essay", "feedback"), _essay, is_chat=True),
    Form("MBPP", ("text", "test_list", "code"), _mbpp("text")),
    Form("sanitized MBPP", ("prompt", "test_list", "code"), _mbpp("prompt")),
    Form("GSM8K", ("question", "answer"), _as_it_stands("question"), is_chat=True),
    Form("Alpaca", ("instruction", "input", "output"), _alpaca),
    Form("CNN/DailyMail", ("article", "highlights"), _cnn),
    Form("HumanEval or plain text", ("prompt",), _as_it_stands("prompt")),
    Form(
        "Spec-Bench or plain messages",
        ("turns",),
        lambda fields: _texts(fields["turns"], "turns"),
        is_chat=True,
    ),
)
