"""`specjax convert` of EAGLE heads; targets are converted in test_commands.py."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.cli import main
from specjax.loading import hub
from specjax.loading.targets import load
from specjax.models.fingerprint import fingerprint
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_files import load_head, read_about, save_head
from tests.cli.target import CONFIG
from tests.loading.test_targets import HUB_ID, FakeHub
from tests.models.checkpoints import edit_config

WEIGHTS = "model.safetensors"
EMBEDDING = {"embed_tokens.weight"}


@pytest.fixture(scope="module")
def head(tiny, tmp_path_factory):
    """A folder with a random head of the tiny target, without embedding."""
    folder = tmp_path_factory.mktemp("heads") / "head"
    module = EagleHead(EagleConfig.for_target(CONFIG))
    params = module.initialise(jax.random.key(0))
    target = load(tiny, dtype="float32")
    about = {"target": fingerprint(target.config, target.params), "method": "hass"}
    save_head(folder, EAGLE, module, params, "float32", target=CONFIG, about=about)
    return folder


def convert(head, directory, target, *arguments) -> int:
    return main(["convert", str(head), str(directory), "--head-of", str(target), *arguments])


@pytest.mark.parametrize(
    "layout, architecture, more",
    [
        (("--layout", "vllm"), "LlamaForCausalLM", set()),
        (("--embedding", "--layout", "vllm"), "LlamaForCausalLM", EMBEDDING),
        (("--layout", "sglang"), "LlamaForCausalLMEagle", EMBEDDING | {"fc.bias"}),
    ],
)
def test_a_head_is_written_in_every_layout(
    tiny, head, tmp_path, capsys, layout, architecture, more
):
    out = tmp_path / "new" / "head"
    assert convert(head, out, tiny, *layout) == 0
    expected = f"wrote head {head} to {out} in float32, layout {layout[-1]}\n"
    if not more:
        expected += "without the target's embedding, which the server shares; --embedding adds it\n"
    assert capsys.readouterr().out == expected
    stored, before = load_file(out / WEIGHTS), load_file(head / WEIGHTS)
    assert stored.keys() - before.keys() == more
    of_target = {"embed_tokens.weight": load_file(tiny / WEIGHTS)["model.embed_tokens.weight"]}
    for name, tensor in (before | (of_target if more else {})).items():
        np.testing.assert_array_equal(stored[name], tensor)
    assert json.loads((out / "config.json").read_text())["architectures"] == [architecture]
    assert read_about(out) == read_about(head)
    written, _ = load_head(out, EAGLE, CONFIG, "float32")
    assert written.config.layers == EagleConfig.for_target(CONFIG).layers


def test_a_layout_needs_the_target_of_the_head(head, tmp_path, error_line):
    for option in (("--layout", "vllm"), ("--embedding",)):
        assert main(["convert", str(head), str(tmp_path / "out"), *option]) == 2
        expected = (
            f"{option[0]} applies to heads only; name the target of the head: --head-of TARGET"
        )
        assert error_line().endswith(expected)
        assert list(tmp_path.iterdir()) == []


def test_anything_but_a_head_of_the_target_is_rejected(tiny, head, tmp_path, error_line):
    other = shutil.copytree(head, tmp_path / "other")
    edit_config(other, specjax={"target": "2x4x32-00c0ffee"})
    for source, target, message in (
        ("nope", tiny, "'nope' is not a head"),
        (tiny, tiny, f"{tiny} holds a whole model"),
        (tmp_path, tiny, f"{tmp_path} holds no config.json"),
        (head, "nope", "'nope' is not a target"),
        (head, "pocket", "but this one has"),
        (other, tiny, "this head was trained for target 2x4x32-00c0ffee, but this one is"),
    ):
        assert convert(source, tmp_path / "out", target) == 2
        assert message in error_line()
    assert convert(head, other, tiny) == 2
    assert "already exists and is not an empty folder" in error_line()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_head_is_read_from_the_hub_unless_its_config_is_of_another_kind(
    tiny, head, tmp_path, monkeypatch, capsys
):
    fake = FakeHub(head)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    assert convert(HUB_ID, tmp_path / "out", tiny, "--dtype", "float16") == 0
    stored = load_file(tmp_path / "out" / WEIGHTS)
    assert {tensor.dtype.name for tensor in stored.values()} == {"float16"}
    assert fake.fetched == {"config.json", WEIGHTS}
    assert fake.revisions == [None, "c0ffee"]
    other = shutil.copytree(head, tmp_path / "other")
    edit_config(other, speculators_model_type="eagle3")
    monkeypatch.setattr(hub, "snapshot_download", fake := FakeHub(other))
    assert convert(HUB_ID, tmp_path / "none", tiny) == 2
    assert "describes a head in the format of speculators" in capsys.readouterr().err
    assert fake.fetched == {"config.json"}
