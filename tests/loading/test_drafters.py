"""Drafters with a head come from the head's folder, `auto` from what was tuned."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters._heads import check_head
from specjax.decoding.drafters.auto import Auto
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.loading.drafters import load_drafter
from specjax.loading.method import ASSUMED_BREAK_EVEN
from specjax.loading.methods import METHODS
from specjax.loading.tuned import Tuned, auto_choice, machine_of, write_tuned
from specjax.models.fingerprint import fingerprint
from specjax.models.heads import HeadWeights
from specjax.models.heads.layered import DRAFT_ROWS, with_draft_tokens, with_lm_head_rows
from specjax.models.io.formats.eagle import EAGLE
from specjax.models.io.head_files import save_head
from specjax.models.native import is_available, pack_params
from specjax.models.precision import cheap_rows
from specjax.models.quantize import is_stored
from tests.decoding.heads import TREE, eagle_head
from tests.loading.tiny import tiny


def save(folder: Path, about: dict | None = None) -> Path:
    save_head(folder, EAGLE, *eagle_head(), jnp.float32, target=tiny().config, about=about)
    return folder


@pytest.mark.parametrize("method", ["eagle", "eagle2"])
def test_a_head_in_a_folder_becomes_a_drafter(method, tmp_path):
    owner = fingerprint(tiny().config, tiny().params)
    given: dict[str, Any] = {"top_k": 5, "depth": 4, "num_tokens": 12, "noise_share": 0.0}
    given = {"choices": TREE} if method == "eagle" else given
    folder = save(tmp_path / "head", {"target": owner})
    own, params = load_drafter(method, tiny(), folder, **given)
    assert own == (Eagle if method == "eagle" else Eagle2)(eagle_head()[0], **given)
    jax.tree.map(np.testing.assert_array_equal, params, eagle_head()[1])


@pytest.mark.skipif(not is_available(), reason="specjax has no native kernels here")
def test_a_head_of_a_packed_16_bit_target_is_int8_with_its_rows_of_the_lm_head():
    pocket = specjax.load("pocket", "bfloat16")
    drafter, params = load_drafter("hass", pocket)
    leaves = filter(is_stored, jax.tree.leaves(params, is_leaf=is_stored))
    assert {leaf.kind for leaf in leaves} == {"int8"}
    head, narrow = with_draft_tokens(drafter.head, params, range(0, pocket.config.vocab_size, 2))
    weights = HeadWeights(narrow, pocket.model, pocket.params)
    loaded = pack_params(with_lm_head_rows(head, weights), "int8")
    assert loaded[DRAFT_ROWS].kind == "int8"
    hidden = jax.random.normal(jax.random.key(0), (3, head.config.hidden_size), jnp.bfloat16)
    logits = head.logits(weights, hidden, loaded[DRAFT_ROWS])
    expected = pocket.model.logits(pocket.params, hidden)[:, ::2]
    np.testing.assert_allclose(logits, expected, atol=0.02 * float(jnp.max(jnp.abs(expected))))
    assert head.lm_head_rows(weights._replace(params=loaded)) is loaded[DRAFT_ROWS]
    check_head(head, pocket.model, loaded)


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
    fails("one node 41 children", save(tmp_path / "head"), top_k=41)
    fails("`top_k` must be a whole number, got 'all'", stranger, top_k="all")


# ---- auto ---------------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    """Loads `auto` with `changes` in what was tuned; also says what it is."""

    def load(**changes):
        choice = {"machine": machine_of(tiny()), "method": "pld", "settings": {"num_tokens": 7}}
        choice |= {"source": None, "break_even": 0.9, "widths": (1, 8)} | changes
        path = tmp_path / "specjax.json"
        write_tuned(path, Tuned({"auto": choice}), fingerprint(tiny().config, tiny().params))
        drafter, _ = load_drafter("auto", tiny(), tuned=path)
        return drafter, str(auto_choice(tiny(), path))

    return load


def test_what_was_tuned_on_this_machine_is_loaded(load):
    text = "auto is pld (num_tokens=7), as tuned on this machine"
    assert load() == (Auto(PromptLookup(num_tokens=7), 0.9), text)
    assert load(method="plain", settings={}, widths=(1,))[0] == Autoregressive()


def test_nothing_tuned_or_tuned_elsewhere_is_prompt_lookup_at_an_assumed_break_even(load, tmp_path):
    nodes = cheap_rows(tiny().config)
    copier = PromptLookup(num_tokens=nodes - 1, max_tokens=2 * nodes - 1)
    assumed = Auto(copier, ASSUMED_BREAK_EVEN["cpu"])
    drafter, text = load(machine="another chip")
    assert drafter == assumed
    why = f"tuned on another machine (another chip; this is {machine_of(tiny())})"
    assert text.startswith(f"auto is pld, {why}: `specjax tune machine`")
    drafter, text = load(device="cpu", costs=(1.0, 2.0))
    assert drafter == assumed
    assert text.startswith("auto is pld, tuned by an earlier version: `specjax tune machine`")
    path = tmp_path / "none.json"
    write_tuned(path, Tuned(), fingerprint(tiny().config, tiny().params))
    assert load_drafter("auto", tiny(), tuned=path) == (assumed, None)
    assert str(auto_choice(tiny(), path)).startswith("auto is pld, not tuned: `specjax tune mach")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"break_even": "x"}, "damaged"),
        ({"break_even": float("nan")}, "damaged .*run `specjax tune machine` again"),
        ({"method": "auto"}, "damaged"),
        ({"method": ["pld"]}, "damaged|cannot load"),
        ({"settings": 3}, "damaged"),
        ({"settings": ["a"]}, "damaged"),
        ({"settings": {"nope": 1}}, "has no setting 'nope'; .*run `specjax tune machine` again"),
        ({"method": "nope"}, "cannot load nope"),
        ({"method": "lookahead", "settings": {}}, "cannot load lookahead"),
        ({"widths": (1, 4)}, "its passes have 8 nodes now, but passes of 4 were timed"),
        ({"method": "rest", "settings": {}, "source": "/gone"}, "cannot load rest.*gone.*again"),
    ],
)
def test_a_choice_that_no_longer_loads_says_what_to_do(load, changes, message):
    with pytest.raises(SpecjaxError, match=message):
        load(**changes)


def test_auto_takes_neither_settings_nor_a_source():
    assert METHODS["auto"].settings == {}
    with pytest.raises(SpecjaxError, match="its settings are: none"):
        load_drafter("auto", tiny(), num_tokens=3)
    with pytest.raises(SpecjaxError, match="takes no drafter, got 'folder'; leave it out"):
        load_drafter("auto", tiny(), "folder")
