"""Drafters with a head are loaded from the head's folder, if it was trained for the target."""

from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.hub import LoadedTarget
from specjax.loading import load_drafter
from specjax.models.fingerprint import fingerprint
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_files import save_head
from tests.decoding.heads import TREE, eagle_head
from tests.decoding.tiny import target


@cache
def tiny() -> LoadedTarget:
    model, params = target()
    return LoadedTarget(model, params, None, model.config, "tiny")


def save(folder: Path, about: dict | None = None) -> Path:
    config = target()[0].config
    save_head(folder, EAGLE, *eagle_head(), jnp.float32, target=config, about=about)
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle2", "hass"])
def test_a_head_in_a_folder_becomes_a_drafter(method, tmp_path):
    owner = fingerprint(tiny().config, tiny().params)
    given: dict[str, Any] = {"num_tokens": 12, "noise_share": 0.0}
    given = {"choices": TREE} if method == "eagle" else given
    folder = save(tmp_path / "head", {"target": owner})
    own, params = load_drafter(method, tiny(), folder, **given)
    assert own == (Eagle if method == "eagle" else Eagle2)(eagle_head()[0], **given)
    jax.tree.map(np.testing.assert_array_equal, params, eagle_head()[1])


def test_without_a_head_of_the_target_there_is_no_drafter(tmp_path):
    def fails(message, *source, **settings):
        with pytest.raises(SpecjaxError, match=message) as caught:
            load_drafter("eagle2", tiny(), *source, **settings)
        assert "\n" not in str(caught.value)

    fails("method 'eagle2' needs an EAGLE head; name a folder or a hub id")
    fails("no-such-head.* is not a head", tmp_path / "no-such-head")
    fails("holds no config.json; give the folder of an EAGLE", tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    fails("is a run that has not finished and has no head yet", tmp_path / "run")
    save(tmp_path / "run" / "head")
    load_drafter("eagle2", tiny(), tmp_path / "run")
    stranger = save(tmp_path / "stranger", {"target": "another"})
    fails("this head was trained for target another, but this one is", stranger)
    fails("top_k 41 exceeds the target's vocabulary", save(tmp_path / "head"), top_k=41)
    fails("setting top_k of method 'eagle2' is 'all', not a whole number", stranger, top_k="all")
    fails("depth 0 must be at least 1", stranger, depth=0)
