"""Forms of the editing tasks of PLD+: CodeEditorBench, XATU and ArgRewrite."""

from collections import defaultdict

from specjax.data.task_files import Fields, TaskForm, filled, text_of, texts_of

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


def _code_editing(
    name: str,
    required: tuple[str, ...],
    task: str,
    result: str,
    question: str,
    asked: str,
    kind: str = "",
) -> TaskForm:
    """Returns the form of one kind of task; `question` and `asked` name fields in braces.

    The first of the required fields holds the code.
    """

    def turns(fields: Fields) -> tuple[str, ...]:
        code = required[0]
        known = defaultdict(str, fields | {code: text_of(fields[code], code)})
        given = {side: known[f"public_{kind}tests_{side}"] for side in ("input", "output")}
        test = TEST.format(asked=asked.format_map(known), **given)
        full = f"{question.format_map(known)}\n{test}"
        return (CODE_EDITING.format(task=task, result=result, question=full),)

    return TaskForm(f"CodeEditorBench, {name}", required, turns, is_chat=True)


def _text_editing(fields: Fields) -> tuple[str, ...]:
    reference = fields.get("reference") or ""
    if isinstance(reference, list):
        reference = "\n".join(texts_of(reference, "reference"))
    prompt = TEXT_EDITING.format(
        instruction=text_of(fields["coarse_grained"], "coarse_grained"),
        input=text_of(fields["input"], "input"),
        reference=f"# Reference:\n{reference}\n" if reference else "",
    )
    return (prompt,)


# The first form that fits decides, so those with more fields come before those with fewer.
EDITING_FORMS = (
    _code_editing(
        "debug",
        ("incorrect_solutions", "public_tests_input"),
        *(DEBUG, "corrected"),
        "Below is the {code_language} buggy code:\n{incorrect_solutions}",
        "Correct the code and ensure it",
    ),
    _code_editing(
        "switch",
        ("similar_source_code", "public_target_tests_input"),
        *(SWITCH, "modified"),
        "Below is the code:\n{similar_source_code}\nIt computes:\n"
        "Input: {public_similar_tests_input}\nOutput: {public_similar_tests_output}",
        "Modify the code and ensure it",
        "target_",
    ),
    _code_editing(
        "translate",
        ("source_code", "source_lang", "target_lang"),
        *(TRANSLATE, "translated"),
        "Below is the {source_lang} code:\n{source_code}",
        "Translate the code to {target_lang} and ensure it",
    ),
    _code_editing(
        "polish",
        ("source_code", "public_tests_input"),
        *(POLISH, "optimized"),
        "Below is the code:\n{source_code}",
        "Optimize the code and ensure it",
    ),
    TaskForm("XATU", ("coarse_grained", "input"), _text_editing, is_chat=True),
    TaskForm("ArgRewrite", ("essay", "feedback"), filled(ESSAY, "essay", "feedback"), is_chat=True),
)
