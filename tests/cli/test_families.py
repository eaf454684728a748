"""A pair of StarCoder's family, as DISCO uses one, from training to drafting."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.cli import main
from specjax.models.families import config_from
from specjax.models.io.huggingface import save_transformer
from specjax.models.transformer import Transformer
from specjax.tuning import draft_length
from tests.cli.target import SHORT, VOCABULARY

STARCODER = {
    "model_type": "gpt_bigcode",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 320,
    "eos_token_id": 0,
}


def write(folder: Path, tiny: Path, layers: int, activation: str) -> Path:
    """A random model with the tokenizer of the tiny target; a smaller one is part of a larger."""
    values = STARCODER | {"n_layer": layers, "activation_function": activation}
    model = Transformer(config_from(values))
    params = model.initialise(jax.random.key(3))
    params = jax.tree.map(lambda leaf: 4 * leaf if leaf.ndim == 2 else leaf, params)
    save_transformer(folder, model.config, params, jnp.float32)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    return folder


def test_a_starcoder_pair_is_trained_tuned_and_drafts_by_every_rule(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(draft_length, "LENGTHS", (1, 2))
    target = write(tmp_path / "target", tiny, 2, "gelu")
    draft = write(tmp_path / "draft", tiny, 1, "gelu_pytorch_tanh")
    tasks, classifier = tmp_path / "tasks.jsonl", tmp_path / "classifier"
    words = ["total = total + value", "for value in values:", "return", "count"] * 3
    texts = [json.dumps({"prompt": f"{text} {n}"}) for n, text in enumerate(words)]
    tasks.write_text("\n".join(texts))
    pair = ["--target", str(target), "--drafter", str(draft)]
    train = ["train", "disco", *pair, "--tasks", str(tasks), *SHORT, "--num-steps", "30"]
    assert main([*train, "--out", str(classifier)]) == 0
    tune = ["tune", "length", *pair, "--tasks", str(tasks), *SHORT, "--limit", "2"]
    tuned = tmp_path / "tuned.json"
    assert main([*tune, "--rule", "fixed", "--out", str(tuned)]) == 0
    assert json.loads(tuned.read_text())["settings"]["draft-model"]["length"] in (1, 2)
    generate = ["generate", *pair, *SHORT, "--method", "draft-model", "--json", "--compare"]
    generate += ["--prompt-ids", "5,6,7,5,6"]
    for rule in ("fixed", "heuristic", "confidence", "disco"):
        command = [*generate, "--set", f"rule={rule}"]
        command += ["--set", f"classifier={classifier}"] if rule == "disco" else []
        capsys.readouterr()
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["identical"] is True
