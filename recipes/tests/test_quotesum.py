"""QuoteSum: its marks, and which tokens they make quoted."""

import json

from transformers import AutoTokenizer

from recipes.papers.quotesum import evaluate, read_quotesum, tokens_of
from specjax.loading.targets import load


def write(path, *summaries):
    fields = {"question": "why?", "title2": "Two", "source2": "because of it", "source1": None}
    path.write_text("\n".join(json.dumps(fields | {"summary": each}) for each in summaries))
    return path


def test_marks_are_taken_out_and_remembered(tmp_path):
    path = write(tmp_path / "a.jsonl", "So [ 2 because of it ] , [ 2 Two ].", "nothing quoted")
    first, second = read_quotesum(path)
    assert first.answer == "So because of it , Two."
    assert [first.answer[start:end] for start, end in first.quotes] == ["because of it", "Two"]
    assert first.context == "Two: because of it\nQuestion: why?\nAnswer: "
    assert second.quotes == ()


def test_a_field_that_is_no_text_is_left_out(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    good = {"question": "why?", "source1": "because", "title1": None, "summary": "so"}
    bad = [
        good | other
        for other in ({"question": 3}, {"question": None}, {"source1": {"a": 1}}, {"title1": ["x"]})
    ]
    path.write_text("\n".join(map(json.dumps, [good, *bad])))
    assert len(read_quotesum(path)) == 1
    warned = capsys.readouterr().err
    assert "a.jsonl:2 is not a QuoteSum example (TypeError: 3 is not a text)" in warned


def test_a_token_is_quoted_if_it_touches_a_quote(tmp_path, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    path = write(tmp_path / "a.jsonl", "So [ 2 because of it ] .")
    [example] = read_quotesum(path)
    text, prompt_length, quoted = tokens_of(example, tokenizer)
    assert tokenizer.decode(text[:prompt_length]) == example.context
    answer = text[prompt_length:]
    assert tokenizer.decode(answer) == example.answer
    assert len(answer) == len(quoted)
    inside = tokenizer.decode([token for token, here in zip(answer, quoted, strict=True) if here])
    assert inside.strip() == "because of it"


def test_scores_rise_in_precision_and_fall_in_recall_with_the_threshold(tmp_path, tiny):
    target = load(str(tiny), "float32")
    summary = "value total [ 2 because of it ] is said"
    examples = read_quotesum(write(tmp_path / "a.jsonl", summary))
    scores = evaluate(examples, target, None, (1, 4, 50))
    assert scores[1].recall >= scores[4].recall >= scores[50].recall == 0
    assert scores[4].recall > 0.5
    assert scores[50].precision == 1.0
