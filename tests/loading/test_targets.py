import fnmatch
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from specjax.core.errors import SpecjaxError
from specjax.loading import hub, targets
from specjax.models.families import FAMILIES, config_from
from specjax.models.io.huggingface import save_transformer
from specjax.models.quantize import is_stored
from specjax.models.transformer import Transformer
from tests.models import checkpoints

CONFIG = config_from({"model_type": "llama"} | checkpoints.TINY)
HUB_ID = "someone/tiny-llama"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    params = Transformer(CONFIG).initialise(jax.random.key(0))
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    save_transformer(folder, CONFIG, params, jnp.float32)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A small checkpoint without tokenizer, for a test to change."""
    return shutil.copytree(saved, tmp_path / "tiny")


def add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "def": 1, "f": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def failure(name, **options) -> str:
    """The one-line message of a load that must fail."""
    with pytest.raises(SpecjaxError) as caught:
        targets.load(name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- What comes back ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "given"), [(None, "float32"), ("bfloat16", "bfloat16"), (jnp.float16, "float16")]
)
def test_a_folder_gives_model_config_and_params_of_the_dtype(folder, dtype, given):
    target = targets.load(folder, dtype=dtype)
    assert target.name == str(folder)
    assert target.config == target.model.config == CONFIG
    assert target.params["layers_1"]["mlp"]["up_proj"]["weight"].shape == (48, 32)
    leaves = jax.tree.leaves(target.params, is_leaf=is_stored)
    assert {leaf.dtype.name for leaf in leaves} == {given}
    assert target.tokenizer is None
    assert "params" not in repr(target)


@pytest.mark.parametrize(
    ("more", "eos"),
    [
        ({}, (2,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": 9}, (2, 9)),
        ({"eos_token_id": [5, 2, CONFIG.vocab_size]}, (2, 5)),
    ],
)
def test_eos_tokens_of_the_generation_config_are_added(folder, more, eos, capsys):
    """Those outside the vocabulary are left out."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps(more))
    target = targets.load(folder)
    assert target.eos == target.model.config.eos_token_id == eos
    warning = f"eos {CONFIG.vocab_size} is outside the vocabulary"
    assert (warning in capsys.readouterr().err) == (eos == (2, 5))
    for content, message in (
        ("{", " is not valid JSON"),
        ('{"eos_token_id": [2, null]}', ": `eos_token_id` must be"),
    ):
        path.write_text(content)
        assert failure(folder).startswith(f"{path}{message}")


def test_the_tokenizer_of_the_folder_is_read_and_a_damaged_one_named(folder):
    add_tokenizer(folder)
    tokenizer = targets.load(folder).tokenizer
    assert tokenizer("def f g")["input_ids"] == [1, 2, 0]
    (folder / "tokenizer.json").write_text('{"model": ')
    message = failure(folder)
    assert f"the tokenizer in {folder} cannot be read" in message
    assert message.endswith("download it again")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokenizer_is_the_one_that_transformers_chooses(folder, family):
    add_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    ours, theirs = targets.load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert (repr(ours), ours.init_kwargs) == (repr(theirs), theirs.init_kwargs)


@pytest.mark.parametrize("kind", ["Own", None])
def test_the_code_of_a_tokenizer_is_never_run_nor_asked_about(folder, monkeypatch, kind):
    add_tokenizer(folder)
    (folder / "own.py").write_text("raise SystemExit('run')")
    settings = {"auto_map": {"AutoTokenizer": [None, "own.Own"]}, "tokenizer_class": kind}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    why = "requires custom code, which specjax does not run"
    assert failure(folder).startswith(f"the tokenizer in {folder} {why}")


def test_the_pocket_target_lies_inside_the_package(folder, monkeypatch):
    root = folder.parent
    monkeypatch.setattr(hub, "resources", SimpleNamespace(files=lambda package: root / package))
    assert f"pocket weights are missing from {root / 'specjax'}" in failure("pocket")
    shutil.copytree(folder, root / "specjax" / "pocket" / "weights" / "target")
    assert targets.load("pocket").config == CONFIG


def test_a_sentencepiece_model_alone_makes_the_tokenizer(folder, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    text, prefix = tmp_path / "text.txt", folder / "tokenizer"
    words = "def return value best other left right".split()
    text.write_text("\n".join(" ".join(np.roll(words, shift)) for shift in range(len(words))))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(prefix), vocab_size=40, model_type="bpe", minloglevel=2
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    tokenizer = targets.load(folder).tokenizer
    expected = [model.bos_id(), *model.encode("def best value")]
    assert tokenizer("def best value")["input_ids"] == expected


# ---- Rejected ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, f"{name!r} is not a target") for name in ("pockett", "./missing", "")),
        ("n" * 300, {}, "cannot be read (File name too long); check the path"),
        ("~nosuch/x", {}, "there is no home folder ~nosuch; write the path in full"),
        ("tiny/model.safetensors", {}, "is not a target"),
        ("pocket", {"revision": "main"}, "only hub ids have revisions"),
        ("pocket", {"padded_width": -1}, "padded_width -1 must be at least 0"),
        ("tiny", {"dtype": "int8"}, "`dtype` must be one of"),
    ],
)
def test_a_name_or_option_that_fits_nothing_is_rejected(
    folder, monkeypatch, name, options, message
):
    monkeypatch.chdir(folder.parent)
    assert message in failure(name, **options)


def test_unreadable_files_are_named(folder, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert failure(folder).startswith(f"{folder} cannot be read (Permission denied); check")
    monkeypatch.undo()
    monkeypatch.setattr(
        targets, "load_transformer", lambda folder, *_: refuse(folder / "model.safetensors")
    )
    assert failure(folder).startswith(f"{folder / 'model.safetensors'} cannot be read (Permission")


def test_files_that_do_not_fit_are_named(folder):
    checkpoints.edit_config(folder, vocab_size=60)
    message = failure(folder)
    assert message.startswith(f"{folder}: the weights do not fit config.json; wrong shape:")


# ---- The hub -----------------------------------------------------------------------------------


class FakeHub:
    """Serves `folder` as the repository `HUB_ID`, as `snapshot_download` does."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.snapshot = folder.parent / "snapshots" / "c0ffee"
        self.revisions: list[str | None] = []

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert repo_id == HUB_ID
        self.revisions.append(revision)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if any(fnmatch.fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, self.snapshot)
        return str(self.snapshot)

    @property
    def fetched(self) -> set[str]:
        return {path.name for path in self.snapshot.iterdir()}


@pytest.fixture
def fake_hub(folder, monkeypatch) -> FakeHub:
    fake = FakeHub(folder)
    monkeypatch.setattr(hub, "snapshot_download", fake)
    return fake


def test_a_hub_id_is_downloaded_at_one_commit(fake_hub):
    add_tokenizer(fake_hub.folder)
    for extra in ("consolidated.safetensors", "pytorch_model.bin", "README.md"):
        (fake_hub.folder / extra).write_bytes(b"")
    target = targets.load(HUB_ID, revision="v2")
    assert (target.name, target.config) == (HUB_ID, CONFIG)
    assert fake_hub.revisions == ["v2", "c0ffee"]
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert fake_hub.fetched == expected


def test_bin_weights_are_fetched_only_where_there_are_no_safetensors(fake_hub):
    torch = pytest.importorskip("torch")
    (fake_hub.folder / "model.safetensors").unlink()
    weights = checkpoints.build().state_dict()
    torch.save(weights, fake_hub.folder / "pytorch_model.bin")
    target = targets.load(HUB_ID)
    expected = weights["model.norm.weight"].numpy()
    np.testing.assert_array_equal(target.params["norm"]["weight"], expected)
    assert fake_hub.fetched == {"config.json", "pytorch_model.bin"}


def test_weights_that_cannot_be_used_are_not_fetched(fake_hub, monkeypatch):
    (fake_hub.folder / "model.safetensors").rename(fake_hub.folder / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert failure(HUB_ID).startswith(f"{HUB_ID} needs torch")
    checkpoints.edit_config(fake_hub.folder, model_type="gpt2")
    assert "model_type 'gpt2' is not supported" in failure(HUB_ID)
    assert fake_hub.fetched == {"config.json"}


def test_what_was_downloaded_once_loads_without_network(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder.parent))
    assert "the hub cannot be reached; check the network" in failure(HUB_ID)
    repository = folder.parent / "models--someone--tiny-llama"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123456789" * 4)
    shutil.copytree(folder, repository / "snapshots" / ("0123456789" * 4))
    assert targets.load(HUB_ID).config == CONFIG


def test_progress_bars_are_off_only_during_the_download(fake_hub, monkeypatch):
    seen = []

    def download(*args, **options):
        seen.append(hub.utils.are_progress_bars_disabled())
        return fake_hub(*args, **options)

    monkeypatch.setattr(hub, "snapshot_download", download)
    targets.load(HUB_ID, progress=False)
    targets.load(HUB_ID, progress=True)
    assert seen == [True, True, False, False]
