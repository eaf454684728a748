"""`specjax train disco` and `--method draft-model`, in this process, on tiny random models."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest

from specjax.cli import main
from specjax.models.io.huggingface import save_transformer
from specjax.models.transformer import Transformer
from tests.cli.target import CONFIG, VOCABULARY

GENERATE = ("generate", "--prompt-ids", "1,2", "--method", "draft-model")
SMALL = ("--num-steps", "30", "--max-new-tokens", "24")


@pytest.fixture(scope="module")
def draft(tmp_path_factory, tiny):
    """The target with a little noise: it often agrees, and often does not."""
    folder = tmp_path_factory.mktemp("drafts") / "draft"
    own, noise = (Transformer(CONFIG).initialise(jax.random.key(seed)) for seed in (3, 4))
    params = jax.tree.map(lambda weight, other: weight + 0.3 * other, own, noise)
    save_transformer(folder, CONFIG, params, jnp.float32)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    texts = ["total = total + value", "for value in values:", "best = max", "return", "count"] * 3
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{text} {n}"}) for n, text in enumerate(texts))
    )
    return path


@pytest.mark.slow
def test_a_classifier_stops_drafts_of_the_tokens_of_plain_decoding(
    tiny, draft, tasks, generate, tmp_path, error_line, capsys
):
    classifier = tmp_path / "classifier"
    train = ["train", "disco", "--target", str(tiny), "--drafter", str(draft)]
    train += ["--tasks", str(tasks), "--out", str(classifier), *SMALL]
    assert main(train) == 0
    capsys.readouterr()
    rule = ("--set", "rule=disco", "--set", f"classifier={classifier}")
    command = ("--method", "draft-model", "--prompt-ids", "5,6,7", "--drafter")
    wide = ("--padded-width", "21", "--compare")
    assert generate(*command, str(draft), *rule, *wide)["identical"] is True
    assert main(["generate", "--target", str(tiny), *command, str(tiny), *rule]) == 2
    assert "draft" in error_line()
    assert main(train) == 2
    assert "--resume" in error_line()


def test_draft_models_must_fit(tiny, draft, tasks, tmp_path, error_line):
    for options, message in (
        ((), "needs a draft model"),
        (("--drafter", str(draft), "--set", "rule=disco"), "needs a classifier"),
    ):
        assert main([*GENERATE, "--target", str(tiny), *options]) == 2
        assert message in error_line()
    train = ["train", "disco", "--target", str(tiny), "--tasks", str(tasks), *SMALL]
    out = tmp_path / "classifier"
    assert main([*train, "--drafter", str(tiny), "--out", str(out)]) == 2
    assert "would be accepted" in error_line()
    assert not out.exists()


@pytest.mark.slow
def test_a_draft_model_with_another_tokenizer_drafts_shared_tokens(
    tiny, draft, generate, tmp_path, error_line
):
    other = shutil.copytree(draft, tmp_path / "other")
    path = other / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    texts = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {text: token for token, text in enumerate(texts[5:] + texts[:5])}
    path.write_text(json.dumps(tokenizer))
    command = [*GENERATE, "--target", str(tiny), "--drafter", str(other)]
    compare = ("--compare", "--set", "rule=fixed", "--set", "length=3")
    assert generate(*command[1:], *compare)["identical"] is True
    train = ["train", "disco", "--target", str(tiny), "--drafter", str(other)]
    assert main([*train, "--out", str(tmp_path / "disco"), *SMALL]) == 2
    assert "has another tokenizer" in error_line()
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": VOCABULARY - 1}))
    assert main(command) == 2
    assert str(VOCABULARY) in error_line()
