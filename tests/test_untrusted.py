"""Files from strangers are read as data: nothing in them runs, and sizes are checked first.

Beside these: a tokenizer's code in loading/test_targets.py, pickles in models/test_weights.py.
"""

import ast
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

import specjax
from specjax.core import chat, memory
from specjax.core.errors import SpecjaxError
from specjax.core.files import read_bytes
from specjax.data.conversations import read_conversations
from specjax.data.datastore import load_datastore
from specjax.data.documents import read_documents
from specjax.data.task_files import read_questions
from specjax.loading import targets
from specjax.models.io import huggingface
from specjax.models.io.weights import stored_tensors
from tests.loading.test_targets import add_tokenizer, failure, folder, saved  # noqa: F401
from tests.models.checkpoints import edit_config

PACKAGE = Path(specjax.__file__).parent
HUGE = 400 * 2**30
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
READS_PICKLES = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle"}


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every call in the package: its place, the name that is called, and named arguments."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                named = {each.arg or "": ast.unparse(each.value) for each in node.keywords}
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", ast.unparse(node.func), named


def test_nothing_in_the_package_runs_what_it_reads():
    for place, name, named in calls():
        assert name not in RUNS_CODE, place
        assert name.partition(".")[0] not in READS_PICKLES, place
        if name == "torch.load":
            assert named["weights_only"] == "True", place
        if name.endswith(".from_pretrained"):
            assert named["trust_remote_code"] == "False", place
        assert "allow_pickle" not in named, place


# ---- Templates ---------------------------------------------------------------------------------


@pytest.fixture
def render(folder):  # noqa: F811
    add_tokenizer(folder)
    tokenizer = targets.load_tokenizer(folder)

    def render(template: str) -> str:
        tokenizer.chat_template = template
        return chat.chat_text(tokenizer, [{"role": "user", "content": "hi"}])

    return render


LOOP = "{% for i in range(99999) %}"
DOUBLING = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
GROWING = "{% set x = namespace(a=[0] * 1000) %}{% for i in range(20) %}"
GROWING += "{% set x.a = x.a + x.a %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ cycler.__init__.__globals__.os.system('touch pwned') }}", "is unsafe"),
        ("{% for i in range(99999999) %}x{% endfor %}", "Range too big"),
        (LOOP + LOOP + "{% endfor %}{% endfor %}", "it takes more than 0.1 seconds"),
        (DOUBLING + "{{ f(60) }}", "it takes more than 0.1 seconds"),
        (LOOP + "{{ 'x' * 1000 }}{% endfor %}", "it writes 99999000 characters"),
        ("{{ 'x' * 3000000000 }}", "it needs too much memory"),
        (GROWING, "it needs too much memory"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_a_template_neither_escapes_nor_runs_for_ever(
    render, template, told, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    if told.endswith("seconds"):
        monkeypatch.setattr(chat, "MAX_SECONDS", 0.1)
    with pytest.raises(SpecjaxError) as caught:
        render(template)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "pwned").exists()
    assert render("{{ messages[0].content }}") == "hi"


# ---- Sizes -------------------------------------------------------------------------------------


def huge(path: Path, start: bytes = b"") -> Path:
    """Makes a file of 400 GB that takes no space, with zeros after `start`."""
    path.write_bytes(start)
    os.truncate(path, HUGE)
    return path


def test_huge_files_are_refused_before_they_are_read(folder, tmp_path):  # noqa: F811
    text, lines = huge(tmp_path / "text.txt"), huge(tmp_path / "lines.jsonl")
    for read in (
        lambda: read_bytes(Path("/dev/zero"), 2**20),
        lambda: read_questions(lines),
        lambda: list(read_documents([text], None)),
        lambda: list(read_conversations([text])),
        lambda: list(read_conversations([huge(tmp_path / "list.json", b"[{")])),
    ):
        with pytest.raises(SpecjaxError, match=r"bytes are the limit|a line of more than"):
            read()
    huge(folder / "tokenizer.json")
    assert "tokenizer.json is damaged or too large" in failure(folder)
    huge(folder / "config.json")
    assert "config.json is damaged or too large" in failure(folder)


def safetensors(path: Path, dtype: str, **lengths: int) -> Path:
    """Makes a sparse file of vectors."""
    header, end = {}, 0
    for name, length in lengths.items():
        start, end = end, end + 4 * length
        header[name] = {"dtype": dtype, "shape": [length], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def test_huge_tensors_are_refused_by_their_headers(folder, tmp_path, monkeypatch):  # noqa: F811
    huge(folder / "model.safetensors")
    with pytest.raises(SpecjaxError, match=r"model\.safetensors is damaged or cut short"):
        stored_tensors(folder)
    store = tmp_path / "store"
    store.mkdir()
    source = PACKAGE / "pocket" / "weights" / "datastore" / "datastore.json"
    (store / "datastore.json").write_bytes(source.read_bytes())
    safetensors(store / "datastore.safetensors", "I32", tokens=HUGE // 8, suffixes=HUGE // 8)
    with pytest.raises(SpecjaxError, match=r"does not match datastore\.json \(arrays are"):
        load_datastore(store)


def test_weights_beyond_the_memory_are_refused_before_they_are_read(folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(memory, "_host_bytes", lambda: 1000)
    monkeypatch.setattr(huggingface.StoredTensor, "read", None)
    assert "Loading tiny needs at least 8.59e-05 GB (weights 8.59e-05)" in failure(folder)


def test_more_layers_than_weights_are_refused_before_they_are_made(folder):  # noqa: F811
    edit_config(folder, num_hidden_layers=9999)
    assert "config.json describes 9999 layers, but there are" in failure(folder)
