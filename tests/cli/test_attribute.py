"""`specjax attribute`, and `generate --attribute`."""

import json

from specjax.cli import main
from tests.cli.target import SHORT


def test_generate_tells_where_the_output_comes_from(tiny, capsys):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "5,6,7,5,6,7,5", *SHORT]
    command += ["--method", "pld-plus", "--attribute"]
    assert main([*command, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    for start, end, source in values["spans"]:
        assert [5, 6, 7, 5, 6, 7, 5][source : source + end - start] == values["tokens"][start:end]
    assert main(command) == 0
    assert "copied from" in capsys.readouterr().out


def example(summary: str) -> str:
    fields = {"question": "what?", "title1": "one", "source1": "a total of values", "source2": ""}
    return json.dumps(fields | {"summary": summary})


def test_attribute_scores_a_quotesum_file(tiny, tmp_path, capsys):
    path = tmp_path / "quotes.jsonl"
    lines = [example("It is [ 1 a total of values ] ."), "{", example("[ 1 total ]"), '{"a": 1}']
    path.write_text("\n".join(lines))
    assert main(["attribute", str(path), "--target", str(tiny)]) == 0
    captured = capsys.readouterr()
    assert "quotes.jsonl:2 is not JSON" in captured.err
    assert "quotes.jsonl:4" in captured.err
    assert "averaged over 2 examples" in captured.out
    assert [line.split()[0] for line in captured.out.splitlines()[1:4]] == ["2", "5", "8"]
    assert main(["attribute", str(path), "--target", str(tiny), "--layer", "9"]) == 2
    assert "layer 9" in capsys.readouterr().err
