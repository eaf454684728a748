"""The target's hidden states of texts: computed once, for every epoch and run."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamNotFoundError

from specjax.core.errors import SpecjaxError
from specjax.models.fingerprint import FrozenModel
from specjax.training import kept_states
from specjax.training.data import DataOptions, batches
from specjax.training.kept_states import SIZES, STATES, with_hidden_states
from specjax.training.objectives.base import Step, layers_read
from tests.training.cases import ALONE, CASES, EXAMPLES, FROZEN, KEY, LENGTH, TARGET, batch_of

MODEL, LAYERS = FrozenModel(TARGET, FROZEN), (-1, 1)
PACKED = DataOptions(batch_size=1, longest=2 * LENGTH, packing=True)
PADDED = DataOptions(batch_size=len(EXAMPLES), longest=LENGTH, buckets=(LENGTH,))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(kept_states, "BATCH", 2)
    monkeypatch.setattr(kept_states, "PART", 4)


def not_again(_):
    pytest.fail("the target read the texts again")


@jax.jit
def states(batch):
    step = Step(TARGET, FROZEN, batch, KEY, layers=LAYERS)
    return jnp.concatenate([step.features, step.tapped], axis=-1)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 4)], ids=str)
def test_a_text_has_its_states_whatever_runs_read_before(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(kept_states, "BATCH", sizes[0])
    monkeypatch.setattr(kept_states, "PART", sizes[1])
    with_hidden_states(EXAMPLES[1:2], MODEL, LAYERS, tmp_path)
    kept = with_hidden_states([*EXAMPLES, EXAMPLES[0]], MODEL, LAYERS, tmp_path)
    for number, text in zip((0, 1, 2, 0), kept, strict=True):
        example, alone = EXAMPLES[number], states(batch_of(ALONE))[number]
        assert text.tokens is example.tokens and text.is_answer is example.is_answer
        np.testing.assert_allclose(text.hidden, alone[: len(text.tokens)], atol=1e-6)
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
    shorter = sorted(EXAMPLES, key=lambda text: len(text.tokens))[:2]
    with_hidden_states(shorter, MODEL, LAYERS, tmp_path, not_again)


@pytest.mark.parametrize(
    "name, content",
    [
        *((STATES, number) for number in (-1, -4, 0)),
        *((SIZES, text) for text in ('{"a": "x"}', '{"a": null}', "{}")),
    ],
)
def test_damaged_states_and_sizes_are_an_error(tmp_path, name, content):
    with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)
    (file,) = tmp_path.glob(f"*/*/{name}")
    if name == STATES:
        file.write_bytes(file.read_bytes()[:content])
    else:
        file.write_text(content)
    with pytest.raises(SpecjaxError, match="is damaged; delete"):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecjaxError, match="file"):
        with_hidden_states(EXAMPLES, MODEL, LAYERS, tmp_path / "file" / "states")


@pytest.mark.parametrize("options", [PACKED, PADDED], ids=["packed", "padded"])
def test_batches_hold_the_states_that_the_target_would_compute(options, tmp_path):
    examples = EXAMPLES * 30  # packing reads many at a time, and every epoch anew takes long
    kept = with_hidden_states(examples, MODEL, LAYERS, tmp_path)
    with_states, plain = (next(batches(texts, options)) for texts in (kept, examples))
    found, expected = (states(batch)[plain["segments"] > 0] for batch in (with_states, plain))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_loss_reads_no_layer_of_the_target_if_its_states_are_kept(case):
    loss, width = case.training.loss(case.head, TARGET), 32 * len(layers_read(case.head))
    no_layers = {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    hidden = {"hidden": jnp.zeros((*case.batch["tokens"].shape, width))}
    jax.eval_shape(loss, case.params, no_layers, case.batch | hidden, KEY)
    with pytest.raises(ScopeParamNotFoundError):
        jax.eval_shape(loss, case.params, no_layers, case.batch, KEY)
