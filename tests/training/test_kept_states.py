"""The target's hidden states of texts: computed once, for every epoch and run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.models.fingerprint import FrozenModel
from specjax.training.data import DataOptions, batches
from specjax.training.kept_states import with_hidden_states
from specjax.training.objectives.base import hidden_states
from tests.training.cases import CASES, EXAMPLES, FROZEN, KEY, LENGTH, TARGET

MODEL, LAYERS = FrozenModel(TARGET, FROZEN), (-1, 1)
PACKED = DataOptions(batch_size=1, longest=2 * LENGTH, packing=True)
PADDED = DataOptions(batch_size=len(EXAMPLES), longest=LENGTH, buckets=(LENGTH,))


def not_again(_):
    pytest.fail("the target read the texts again")


def test_texts_are_read_once_and_alone(tmp_path):
    kept = with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    for example, text in zip(EXAMPLES, kept, strict=True):
        tokens = jnp.asarray(example.tokens)[None]
        places = jnp.arange(tokens.shape[1])[None], jnp.ones_like(tokens)
        expected = hidden_states(TARGET, FROZEN, LAYERS, tokens, *places)[0]
        assert replace(text, hidden=None).arrays.keys() == example.arrays.keys()
        np.testing.assert_array_equal(text.tokens, example.tokens)
        expected = expected.reshape(len(example.tokens), -1)
        np.testing.assert_allclose(text.hidden, expected, atol=1e-6)
    again = with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path, watch=not_again)
    for text, same in zip(kept, again, strict=True):
        np.testing.assert_array_equal(text.hidden, same.hidden)


def test_another_target_other_layers_or_texts_are_read_anew(tmp_path):
    with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    tuned = MODEL._replace(params=FROZEN | {"lm_head": {"weight": FROZEN["lm_head"]["weight"] + 1}})
    others = [(EXAMPLES, MODEL, (-1,)), (EXAMPLES[1:], MODEL, LAYERS), (EXAMPLES, tuned, LAYERS)]
    for number, other in enumerate(others, 2):
        with_hidden_states(*other, tmp_path)
        assert len([*tmp_path.iterdir()]) == number


def test_an_interrupted_reading_leaves_nothing(tmp_path):
    def interrupted(batches):
        yield next(iter(batches))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path / "states", watch=interrupted)
    assert [*(tmp_path / "states").iterdir()] == []


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
