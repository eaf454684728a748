"""`specjax tune`, `datastore` and `attribute`, in this process, on a tiny random target."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from specjax.decoding.drafters._trees import MEDUSA_TREE

from specjax.bench.curves import read_curves
from specjax.cli import main
from specjax.decoding.drafters.medusa import Medusa
from specjax.loading import load_drafter
from specjax.hub import load
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.io.formats.medusa import MEDUSA
from specjax.models.io.head_files import save_head
from specjax.models.pass_costs import machine_of
from specjax.tuning import costs, prompt_lookup
from tests.cli.target import VOCABULARY

FEW = ("--limit", "1", "--max-new-tokens", "24")


@pytest.fixture
def target(tiny, tmp_path):
    """A target of the test's own: tuning writes beside it."""
    return shutil.copytree(tiny, tmp_path / "target")


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    text = "total = total + value\n" * 2
    path.write_text(json.dumps({"prompt": text}) + '\n{"prompt": 3}\n')
    return path


@pytest.fixture
def tune(target, tasks, monkeypatch):
    monkeypatch.setattr(prompt_lookup, "NUM_TOKENS", (3, 6))
    monkeypatch.setattr(prompt_lookup, "NUM_HEADS", (2,))
    monkeypatch.setattr(prompt_lookup, "THRESHOLDS", (-1.0, 0.9))

    def run(what: str, *options: str) -> int:
        return main(["tune", what, "--target", str(target), "--tasks", str(tasks), *FEW, *options])

    return run


def test_what_is_tuned_is_kept_beside_the_target_and_used(target, tune, capsys, tmp_path):
    assert tune("induction-heads") == 0
    found = json.loads((target / "specjax.json").read_text())
    heads = found["induction_heads"]
    assert heads
    assert all(layer < 2 and head < 4 and times > 0 for layer, head, times in heads)
    assert [times for *_, times in heads] == sorted((times for *_, times in heads), reverse=True)
    assert "tasks.jsonl:2 has no text" in capsys.readouterr().err

    assert tune("pld-plus", "--plots", str(tmp_path / "plots")) == 0
    assert tune("pld-plus-attention", "--by", "speed") == 0
    found = json.loads((target / "specjax.json").read_text())
    assert found["induction_heads"] == heads
    hidden, attention = found["settings"]["pld-plus"], found["settings"]["pld-plus-attention"]
    assert hidden["layer"] in (1, 2)
    assert hidden["num_tokens"] in (3, 6)
    assert attention["heads"] in ([pair[:2] for pair in heads[:count]] for count in (2, len(heads)))
    plots = [path.suffix for path in (tmp_path / "plots").iterdir()]
    assert sorted(plots) == [".jsonl", ".png", ".png", ".png"]
    layers, num_tokens, thresholds = read_curves(tmp_path / "plots")
    assert [layers.setting, thresholds.setting] == ["layer", "min_similarity"]
    assert list(num_tokens.series) == ["PLD+ (h)", "PLD"]
    assert [point.value for point in num_tokens.series["PLD"]] == [3, 6]
    assert all(point.accepted_length >= 1 for point in layers.series["accepted length"])

    capsys.readouterr()
    ids = ("generate", "--target", str(target), "--prompt-ids", "5,6,5", *FEW[2:], "--json")
    assert main([*ids, "--method", "pld-plus-attention"]) == 0
    tokens = json.loads(capsys.readouterr().out)["tokens"]
    assert main([*ids, "--method", "plain"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tokens


def test_the_tree_of_a_head_is_kept_for_that_head_alone(target, tune, tmp_path, error_line, capsys):
    loaded = load(str(target))
    head = MedusaHeads(MedusaConfig.for_target(loaded.config, num_heads=2))
    for seed, name in enumerate(("own", "other")):
        lm_head = jax.random.normal(jax.random.key(seed), (VOCABULARY, 32))
        params = head.initialise(jax.random.key(seed), lm_head=lm_head)
        about = {"target": loaded.config, "target_params": loaded.params, "layout": "specjax"}
        save_head(tmp_path / name, MEDUSA, head, params, jnp.float32, **about)
    own = ("--method", "medusa", "--drafter", str(tmp_path / "own"))
    assert tune("tree", *own, "--num-choices", "0") == 2
    assert "--num-choices 0 must be at least 1" in error_line()
    assert tune("tree", *own, "--num-choices", "7") == 0
    printed = capsys.readouterr().out
    assert "over 24 places" in printed
    assert "found tree of 7 nodes" in printed
    choices = json.loads((target / "specjax.json").read_text())["settings"]["medusa"]["choices"]
    assert choices[0] == [0]
    assert len(choices) == 7
    for name, expected in (("own", tuple(map(tuple, choices))), ("other", MEDUSA_TREE)):
        drafter, _ = load_drafter("medusa", loaded, tmp_path / name)
        assert isinstance(drafter, Medusa)
        assert drafter.settings.choices == expected


def test_what_is_fastest_on_this_machine_is_kept(target, tune, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(costs, "WIDTHS", (1, 8))
    monkeypatch.setattr(costs, "NUM_REPEATS", 2)
    out = tmp_path / "other.json"
    assert tune("machine", "--methods", "pld", "--out", str(out)) == 0
    printed = capsys.readouterr().out
    for title in ("The target's pass", "Predicted, prefill apart", "auto is "):
        assert title in printed
    found = json.loads(out.read_text())["settings"]
    assert list(found) == ["auto"]
    assert found["auto"]["device"] == machine_of(load(target).params)
    assert found["auto"]["method"] in ("plain", "pld")
    assert not (target / "specjax.json").exists()

    assert tune("machine", "--methods", "pld,eagle2") == 2
    captured = capsys.readouterr()
    assert captured.out == "", "refused before anything is measured"
    assert "method 'eagle2' needs an EAGLE head; name a folder" in captured.err


@pytest.mark.parametrize(
    "what, options, message",
    [
        ("tree", ("--plots", "x"), "--plots is for `specjax tune pld-plus|pld-plus-attention|len"),
        ("machine", ("--plots", "x"), "not for machine; leave it out"),
        ("induction-heads", ("--plots", "x"), "not for induction-heads; leave it out"),
        ("length", ("--method", "hydra"), "--method is for `specjax tune tree`, not for length"),
        ("machine", ("--num-choices", "3"), "--num-choices is for `specjax tune tree`"),
        ("tree", ("--by", "speed"), "--by is for"),
        ("tree", ("--rule", "fixed"), "--rule is for `specjax tune length`, not for tree"),
        ("machine", ("--classifier", "x"), "--classifier is for `specjax tune length`"),
        ("pld-plus", ("--drafter", "x"), "--drafter is for `specjax tune length|tree|machine`"),
        ("length", ("--methods", "pld"), "--methods is for `specjax tune machine`"),
        ("length", ("--temperature", "1"), "--temperature is for `specjax tune machine`"),
        ("length", ("--drafter", "x", "--drafter", "y"), "--drafter is given 2 times; length"),
        ("machine", ("--drafter", "x"), "--drafter 'x' is not METHOD=FOLDER"),
        ("machine", ("--methods", "pld,none"), "method 'none' is unknown"),
        ("machine", ("--methods", "plain"), "plain is no method to be tried"),
        ("machine", ("--temperature", "-1"), "temperature -1.0"),
    ],
)
def test_options_that_do_not_serve_are_refused(target, tune, error_line, what, options, message):
    assert tune(what, *options) == 2
    assert message in error_line()
    assert not (target / "specjax.json").exists()


def test_a_file_of_another_target_is_refused(tiny, target, tune, tmp_path, error_line, capsys):
    assert tune("induction-heads") == 0
    capsys.readouterr()
    values = json.loads((target / "specjax.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(values | {"target": "2x4x32-00000000"}))
    command = ["generate", "--target", str(tiny), "--method", "pld-plus", "--prompt-ids", "1,2"]
    assert main([*command, "--tuned", str(other)]) == 2
    assert "was made for another model" in error_line()
    assert main([*command, "--tuned", str(tmp_path / "none.json")]) == 2
    assert "none.json cannot be read" in error_line()
    values["settings"] = {"pld-plus": {"layer": 7}}
    other.write_text(json.dumps(values))
    assert main([*command, "--tuned", str(other)]) == 2
    assert "hidden layer 7 does not exist" in error_line()


@pytest.mark.parametrize(
    "method, setting, message",
    [
        ("pld-plus", "layer=9", "hidden layer 9 does not exist: the model has layers 0 to 2"),
        ("pld-plus", "num_tokens=0", "num_tokens 0 must be at least 1"),
        ("pld-plus-attention", "heads=((2,0),)", "attention head (layer 2, head 0) does not exist"),
        ("pld-plus-attention", "heads=((0,4),)", "attention head (layer 0, head 4) does not exist"),
        ("pld-plus-attention", "heads=((0,),)", "setting heads of method"),
        ("pld-plus-attention", "num_tokens=0", "num_tokens 0 must be at least 1"),
        ("lookahead", "num_guesses=0", "num_guesses"),
        ("rest", "max_drafted=0", "max_drafted"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny, error_line, method, setting, message):
    command = ["generate", "--target", str(tiny), "--method", method, "--prompt-ids", "1,2"]
    assert main([*command, "--set", setting]) == 2
    assert message in error_line()


# ---- Datastores --------------------------------------------------------------------------------


@pytest.fixture
def datastore(tiny, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("for value in values:\n    total = total + value\n" * 3)
    folder = tmp_path / "store"
    command = ["datastore", "build", str(text), "--target", str(tiny), "--out", str(folder)]
    assert main(command) == 0
    assert "of 1 documents" in capsys.readouterr().out
    return folder


def test_rest_reads_the_datastore(tiny, datastore, capsys):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2,3", *FEW[2:], "--compare"]
    command += ["--method", "rest", "--set", "max_drafted=6", "--drafter", str(datastore), "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


def test_rest_without_a_datastore_says_how_to_make_one(tiny, error_line):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2", "--method"]
    assert main([*command, "rest"]) == 2
    assert "needs a datastore; name a folder" in error_line()
    assert main([*command, "pld", "--drafter", "x"]) == 2
    assert "method 'pld' reads nothing" in error_line()


def test_a_datastore_that_is_damaged_or_of_another_tokenizer_is_refused(
    tiny, datastore, error_line
):
    command = ["generate", "--target", str(tiny), "--prompt-ids", "1,2", "--method", "rest"]
    command += ["--drafter", str(datastore)]
    arrays, metadata = datastore / "datastore.safetensors", datastore / "datastore.json"
    values, content = json.loads(metadata.read_text()), arrays.read_bytes()
    metadata.write_text(json.dumps(values | {"fingerprint": "0" * 16}))
    assert main(command) == 2
    assert "was built with tokenizer 0000000000000000, but the target's is" in error_line()
    metadata.write_text(json.dumps(values))
    arrays.write_bytes(content[:-100])
    assert main(command) == 2
    assert "is damaged" in error_line()
    assert main([*command[:-1], str(datastore / "none")]) == 2
    assert str(datastore / "none") in error_line()


# ---- Attribution -------------------------------------------------------------------------------


def test_generate_tells_where_the_output_comes_from(tiny, capsys, tmp_path):
    page = tmp_path / "page.html"
    command = ["generate", "--target", str(tiny), "--prompt-ids", "5,6,7,5,6,7,5", *FEW[2:]]
    command += ["--method", "pld-plus", "--attribute"]
    assert main([*command, "--json", "--attribute-html", str(page)]) == 0
    values = json.loads(capsys.readouterr().out)
    for start, end, source in values["spans"]:
        assert [5, 6, 7, 5, 6, 7, 5][source : source + end - start] == values["tokens"][start:end]
    assert "Where the output comes from" in page.read_text()
    assert main(command) == 0
    assert "source" in capsys.readouterr().out


def example(summary: str) -> str:
    fields = {"question": "what?", "title1": "one", "source1": "a total of values", "source2": ""}
    return json.dumps(fields | {"summary": summary})


def test_attribute_scores_a_quotesum_file(tiny, tmp_path, capsys):
    path = tmp_path / "quotes.jsonl"
    lines = [example("It is [ 1 a total of values ] ."), "{", example("[ 1 total ]"), '{"a": 1}']
    path.write_text("\n".join(lines))
    assert main(["attribute", str(path), "--target", str(tiny)]) == 0
    captured = capsys.readouterr()
    assert "quotes.jsonl:2 is no QuoteSum example" in captured.err
    assert "quotes.jsonl:4 is no QuoteSum example" in captured.err
    assert "averaged over 2 examples" in captured.out
    assert [line.split()[0] for line in captured.out.splitlines()[1:4]] == ["2", "5", "8"]


@pytest.mark.parametrize(
    "options, message",
    [
        (("--layer", "9"), "hidden layer 9 does not exist"),
        (("--thresholds", "0"), "must be at least 1"),
        (("--limit", "0"), "must be at least 1"),
    ],
)
def test_attribute_refuses_what_cannot_be(tiny, tmp_path, error_line, options, message):
    path = tmp_path / "quotes.jsonl"
    path.write_text(example("[ 1 total ]"))
    assert main(["attribute", str(path), "--target", str(tiny), *options]) == 2
    assert message in error_line()
    assert main(["attribute", str(tmp_path / "none")]) == 2
    assert "none cannot be read" in error_line()
