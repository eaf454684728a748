"""Reads files of questions: recognises public formats by their fields and builds the prompts.

Malformed records are reported and left out.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

from specjax.core.errors import SpecjaxError
from specjax.data.records import good_records, is_dataset, read_records

TASKS = Path(__file__).parent / "pocket"  # the tasks of pocket, and its conversations

# DISCO, appendix B, figures 7 to 10. The triple quotes of figure 7 belong to the prompt, a
# docstring; those of the others do not, nor do the line breaks in Alpaca's first paragraph.
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

Fields = dict[str, Any]


class Question(NamedTuple):
    """One record of a file."""

    category: str | None
    turns: tuple[str, ...]
    is_chat: bool  # what a user says, turn by turn; else one text to be continued


class TaskForm(NamedTuple):
    """A format: the fields that identify it, and how prompts are built from them."""

    name: str
    fields: tuple[str, ...]
    turns: Callable[[Fields], tuple[str, ...]]
    is_chat: bool = False


def read_questions(
    source: str | Path,
    first: int | None = None,
    limit: int | None = None,
    forms: Sequence[TaskForm] | None = None,
) -> list[Question]:
    """Returns the questions of a file or a hub dataset, in their order.

    Args:
        source: a file, JSONL or one JSON array, in any of `FORMS`; or, if there is no such file,
            an address or hub dataset of such records, as in `read_records`.
        first: read only this many records.
        limit: stop at this many questions of a hub dataset whose rows name no category.
        forms: the forms to try, in order; by default `FORMS`.
    """
    convert, questions = partial(_question, forms=forms or FORMS), []
    expected = "tasks; give 'pocket', or write one JSON object per line"
    records = islice(read_records(source), first)
    for question in good_records(source, records, convert, expected):
        questions.append(question)
        if is_dataset(source) and len(questions) == limit and questions[0].category is None:
            break
    return questions


def short(value: Any) -> str:
    """Shortens a value of the file for a message of one line."""
    writer = Repr()
    writer.maxlist, writer.maxstring = 12, 40
    return writer.repr(value)


# ---- Forms -------------------------------------------------------------------------------------


def _question(record: Any, forms: Sequence[TaskForm]) -> Question:
    """Converts a record; an error states the problem but not its place."""
    if not isinstance(record, dict):
        raise SpecjaxError('is not a JSON object such as {"prompt": "..."}')
    form = next((form for form in forms if all(name in record for name in form.fields)), None)
    if form is None:
        formats = ", ".join(f"{form.name} ({', '.join(form.fields)})" for form in forms)
        names = short(list(record))[1:-1] or "none"
        raise SpecjaxError(
            f"has no known format: its fields are {names}; known formats are {formats}"
        )
    category = record.get("category")
    if category is None:
        category = record.get("data_source")  # XATU's name for it
    if category is not None and (not isinstance(category, str) or not category.strip()):
        raise SpecjaxError(f"has an invalid category: {short(category)}")
    return Question(category, form.turns(record), form.is_chat)


def text_of(value: Any, name: str) -> str:
    """Returns `value` if it is a text that is not blank."""
    if not isinstance(value, str):
        raise SpecjaxError(f"has no text in `{name}`, but {short(value)}")
    if not value.strip():
        raise SpecjaxError(f"has an empty text in `{name}`")
    return value


def texts_of(value: Any, name: str) -> tuple[str, ...]:
    """Returns `value` as a tuple if it is a list of such texts."""
    if not isinstance(value, list) or not value:
        raise SpecjaxError(f"has no list of texts in `{name}`, but {short(value)}")
    return tuple(text_of(item, f"{name}[{number}]") for number, item in enumerate(value))


def filled(form: str, *names: str) -> Callable[[Fields], tuple[str, ...]]:
    """Returns a function that fills `form` with the texts in these fields of a record."""
    return lambda fields: (form.format(**{name: text_of(fields[name], name) for name in names}),)


def _mbpp(name: str) -> Callable[[Fields], tuple[str, ...]]:
    def turns(fields: Fields) -> tuple[str, ...]:
        test, *_ = texts_of(fields["test_list"], "test_list")
        return (MBPP.format(text=text_of(fields[name], name), test=test),)

    return turns


def _alpaca(fields: Fields) -> tuple[str, ...]:
    if not fields["input"]:
        return filled(ALPACA, "instruction")(fields)
    return filled(ALPACA_WITH_INPUT, "instruction", "input")(fields)


# The first form that fits decides, so those with more fields come before those with fewer.
FORMS = (
    TaskForm("MBPP", ("text", "test_list", "code"), _mbpp("text")),
    TaskForm("sanitized MBPP", ("prompt", "test_list", "code"), _mbpp("prompt")),
    TaskForm("GSM8K", ("question", "answer"), filled("{question}", "question"), is_chat=True),
    TaskForm("Alpaca", ("instruction", "input", "output"), _alpaca),
    TaskForm("CNN/DailyMail", ("article", "highlights"), filled(CNN, "article")),
    TaskForm("HumanEval or plain text", ("prompt",), filled("{prompt}", "prompt")),
    TaskForm(
        "Spec-Bench or plain messages",
        ("turns",),
        lambda fields: texts_of(fields["turns"], "turns"),
        is_chat=True,
    ),
)
