"""The file of tuned settings: what it keeps, and whose it is."""

import json

import jax
import jax.numpy as jnp
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.fingerprint import fingerprint
from specjax.tuned import Tuned, read_tuned, write_tuned
from tests.decoding.tiny import target

TUNED = Tuned(
    {"pld-plus": {"layer": 2, "num_tokens": 20}, "pld-plus-attention": {"heads": ((1, 3), (0, 2))}},
    ((1, 3, 90), (0, 2, 7)),
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "specjax.json"
    write_tuned(path, TUNED, "me")
    assert read_tuned(path, "me") == TUNED
    write_tuned(path, Tuned(), "me")
    assert read_tuned(path, "me") == Tuned()
    assert [each.name for each in path.parent.iterdir()] == ["specjax.json"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_fingerprint_belongs_to_the_weights_not_to_their_dtype(dtype):
    model, params = target()
    known = fingerprint(model.config, params)
    halves = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    assert fingerprint(model.config, halves) == known
    assert fingerprint(model.config, target(seed=1)[1]) != known
    assert fingerprint(target(layers=3)[0].config, params) != known


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "is no file of `specjax tune`"),
        (json.dumps({"target": "me", "settings": 3}), "is no file of `specjax tune`"),
        (
            json.dumps({"target": "me", "settings": {}, "induction_heads": [[1]]}),
            "is no file of `specjax tune`",
        ),
        (
            json.dumps({"target": "you", "settings": {}}),
            r"was made for another model \(you, this one is me\); tune this target",
        ),
    ],
)
def test_a_file_that_is_damaged_or_of_another_model_is_refused(tmp_path, content, message):
    path = tmp_path / "specjax.json"
    path.write_text(content)
    with pytest.raises(SpecjaxError, match=message):
        read_tuned(path, "me")


def test_a_file_that_is_missing_or_cannot_be_written_is_named(tmp_path):
    with pytest.raises(SpecjaxError, match=r"specjax.json cannot be read"):
        read_tuned(tmp_path / "specjax.json", "me")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecjaxError, match="cannot write"):
        write_tuned(tmp_path / "file" / "specjax.json", TUNED, "me")
