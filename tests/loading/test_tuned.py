"""The files of tuned settings: what they keep, whose they are, and where they lie."""

import jax
import jax.numpy as jnp
import pytest

from specjax.core.errors import SpecjaxError
from specjax.loading.targets import load
from specjax.loading.tuned import Tuned, read_tuned, tuned_file, tuned_for, write_tuned
from specjax.models.fingerprint import fingerprint
from tests.decoding.tiny import target
from tests.loading.tiny import tiny

TUNED = Tuned(
    {"pld-plus": {"layer": 2, "num_tokens": 20}, "pld-plus-attention": {"heads": ((1, 3), (0, 2))}},
    ((1, 3, 90), (0, 2, 7)),
)


OWNER = fingerprint(tiny().config, tiny().params)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new" / "specjax.json"
    write_tuned(path, TUNED, "me")
    assert read_tuned(path, "me") == TUNED
    write_tuned(path, Tuned(), "me")
    assert read_tuned(path, "me") == Tuned()
    assert [each.name for each in path.parent.iterdir()] == ["specjax.json"]


def test_the_users_own_file_stands_in_for_the_one_beside_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = tiny(str(tmp_path / "model"))
    assert tuned_for(folder) == Tuned()
    write_tuned(tmp_path / "model" / "specjax.json", TUNED, OWNER)
    assert tuned_for(folder) == TUNED
    own = {"pld-plus": {"layer": 1}}
    write_tuned(tuned_file(folder), Tuned(own), OWNER)
    expected = Tuned({**TUNED.settings, **own}, TUNED.induction_heads)
    assert tuned_for(folder) == tuned_for(tiny(f"{folder.name}/../model")) == expected
    assert tuned_for(folder, tuned_file(folder)) == Tuned(own)
    assert tuned_file(folder).parent == tmp_path / "cache" / "specjax" / "tuned"
    names = [tuned_file(tiny(name)).name for name in ("pocket", "org/some.model", folder.name)]
    assert names == [f"{each}-{OWNER}.json" for each in ("pocket", "org--some.model", "model")]
    assert "pld-plus" in tuned_for(load("pocket")).settings


def test_a_fingerprint_belongs_to_the_weights_not_to_their_dtype():
    model, params = target()
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert fingerprint(model.config, halves) == OWNER
    assert fingerprint(model.config, target(seed=1)[1]) != OWNER
    assert fingerprint(target(layers=3)[0].config, params) != OWNER


NONE = "is not a file of `specjax tune` .*; delete it, then tune again"


def test_a_file_that_is_damaged_or_of_another_model_or_missing_is_refused(tmp_path):
    path = tmp_path / "specjax.json"
    with pytest.raises(SpecjaxError, match=r"specjax.json cannot be read"):
        read_tuned(path, "me")
    others = r"was made for another model \(you, this one is me\); tune this target"
    for content, message in (
        ("\ufeff{", r"is not valid JSON \(Expecting property name"),
        ("[]", "does not hold a JSON object"),
        ("{}", NONE),
        ('{"target": "me", "settings": 3}', NONE),
        ('{"target": "me", "settings": {}, "induction_heads": [[1]]}', NONE),
        ('{"target": "you", "settings": {}}', others),
    ):
        path.write_text(content)
        with pytest.raises(SpecjaxError, match=message):
            read_tuned(path, "me")
    with pytest.raises(SpecjaxError, match="cannot write"):
        write_tuned(path / "specjax.json", TUNED, "me")
