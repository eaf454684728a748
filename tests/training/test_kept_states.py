"""The target's hidden states of texts: computed once, for every epoch and run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.fingerprint import FrozenModel
from specjax.training import kept_states
from specjax.training.data import DataOptions, batches
from specjax.training.kept_states import with_hidden_states
from specjax.training.objectives.base import hidden_states
from tests.training.cases import CASES, EXAMPLES, FROZEN, KEY, LENGTH, TARGET

MODEL, LAYERS = FrozenModel(TARGET, FROZEN), (-1, 1)
PACKED = DataOptions(batch_size=1, longest=2 * LENGTH, packing=True)
PADDED = DataOptions(batch_size=len(EXAMPLES), longest=LENGTH, buckets=(LENGTH,))


def not_again(_):
    pytest.fail("the target read the texts again")


def states_alone(example):
    tokens = jnp.asarray(example.tokens)[None]
    places = jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)
    states = hidden_states(TARGET, FROZEN, LAYERS, tokens, *places)[0]
    return states.reshape(len(example.tokens), -1)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 4)], ids=str)
def test_a_text_has_its_states_whatever_runs_read_before(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(kept_states, "BATCH", sizes[0])
    monkeypatch.setattr(kept_states, "PART", sizes[1])
    with_hidden_states(EXAMPLES[1:2], MODEL, LAYERS, tmp_path)
    kept = with_hidden_states([*EXAMPLES, EXAMPLES[0]], MODEL, LAYERS, tmp_path)
    for example, text in zip([*EXAMPLES, EXAMPLES[0]], kept, strict=True):
        assert text.tokens is example.tokens and text.is_answer is example.is_answer
        np.testing.assert_allclose(text.hidden, states_alone(example), atol=1e-6)
    again = with_hidden_states(EXAMPLES[::-1], MODEL, LAYERS, tmp_path, watch=not_again)
    for text, same in zip(kept, again[::-1], strict=False):
        np.testing.assert_array_equal(text.hidden, same.hidden)


def test_another_target_or_other_layers_are_read_anew(tmp_path):
    with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    tuned = MODEL._replace(params=FROZEN | {"lm_head": {"weight": FROZEN["lm_head"]["weight"] + 1}})
    other = type(TARGET)(replace(TARGET.config, rms_norm_eps=0.1))
    others = [(MODEL, (-1,)), (tuned, LAYERS), (MODEL._replace(model=other), LAYERS)]
    for number, changed in enumerate(others, 2):
        with_hidden_states(EXAMPLES, *changed, tmp_path)
        assert len([*tmp_path.iterdir()]) == number


def test_an_interrupted_reading_leaves_whole_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_states, "BATCH", 1)
    monkeypatch.setattr(kept_states, "PART", 2)

    def interrupted(batches):
        yield from batches
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path, watch=interrupted)
    (parts,) = tmp_path.iterdir()
    assert len([*parts.iterdir()]) == 1
    with_hidden_states(
        sorted(EXAMPLES, key=lambda text: len(text.tokens))[:2], MODEL, LAYERS, tmp_path, not_again
    )


@pytest.mark.parametrize("end", [-1, -4, 0])
def test_damaged_states_are_an_error(tmp_path, end):
    with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    (file,) = tmp_path.glob(f"*/*/{kept_states.STATES}")
    file.write_bytes(file.read_bytes()[:end])
    with pytest.raises(SpecjaxError, match="is damaged; delete"):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)


@pytest.mark.parametrize("sizes", ['{"a": "x"}', '{"a": null}', "{}"])
def test_damaged_sizes_are_an_error(tmp_path, sizes):
    with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    (file,) = tmp_path.glob(f"*/*/{kept_states.SIZES}")
    file.write_text(sizes)
    with pytest.raises(SpecjaxError, match="is damaged; delete"):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecjaxError, match="file"):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path / "file" / "states")


@pytest.mark.parametrize("options", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("name", ["hass", "eagle3"])
def test_losses_are_those_of_a_target_in_the_step(name, options, tmp_path):
    case = CASES[name]
    layers = (-1,) if name == "hass" else (-1, *case.head.config.taps)
    kept = with_hidden_states(EXAMPLES, MODEL, layers, tmp_path)
    loss = jax.jit(case.training.loss(case.head, TARGET))
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    plain, with_states = (next(batches(texts, options)) for texts in (EXAMPLES, kept))
    expected, _ = loss(case.params, FROZEN, plain, KEY)
    found, _ = loss(case.params, broken, with_states, KEY)  # reads no layer of the target
    np.testing.assert_allclose(found, expected, rtol=1e-5)
