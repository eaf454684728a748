"""The prompts of editing tasks."""

import json

import pytest

from recipes.papers.editing import EDITING_FORMS
from specjax.data.task_files import read_questions

CASE = {"public_tests_input": "4", "public_tests_output": "8"}
SHOWN = "Input: 4\nOutput: 8"


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (
            CASE | {"incorrect_solutions": "BUG", "code_language": "java"},
            ("correct the errors", "Below is the java buggy code:\nBUG", SHOWN),
        ),
        (CASE | {"source_code": "OLD"}, ("optimize", "the code:\nOLD\nOptimize", SHOWN)),
        (
            CASE | {"source_code": "OLD", "source_lang": "cpp", "target_lang": "python"},
            ("translate", "the cpp code:\nOLD", "to python and", SHOWN),
        ),
        (
            {"similar_source_code": "OLD", "public_target_tests_input": "4"}
            | {"public_similar_tests_input": "1", "public_target_tests_output": "8"},
            ("related function", "OLD\nIt computes:\nInput: 1\n", SHOWN),
        ),
        (
            {"coarse_grained": "Simplify.", "input": "Longwinded", "reference": ["a", "b"]},
            ("# Instruction:\nSimplify.\n# Input:\nLongwinded\n# Reference:\na\nb\nResponse:",),
        ),
        ({"coarse_grained": "Fix.", "input": "x"}, ("# Input:\nx\nResponse:\n",)),
        ({"essay": "Cars", "feedback": "Good"}, ("Essay: Cars\nFeedback: Good\nRevise",)),
    ],
)
def test_edits_get_the_prompts_of_pld_plus(tmp_path, record, parts):
    (tmp_path / "tasks.jsonl").write_text(json.dumps(record))
    [question] = read_questions(tmp_path / "tasks.jsonl", forms=EDITING_FORMS)
    assert question.is_chat
    for part in parts:
        assert part in question.turns[0]
