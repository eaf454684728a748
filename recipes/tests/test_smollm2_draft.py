"""The draft that is distilled out of a target's own layers."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import specjax
from recipes.smollm2.draft import Options, build, distillation_loss, few_layers
from specjax.core.errors import SpecjaxError
from specjax.models.native import unpack_params
from specjax.training.loop import LoopOptions
from tests.decoding.tiny import target


def test_a_draft_of_all_layers_is_always_right_and_one_of_fewer_learns():
    model, params = target()
    loaded = SimpleNamespace(config=model.config, params=params)
    tokens = jax.random.randint(jax.random.key(0), (2, 12), 0, model.config.vocab_size)
    batch = {
        "tokens": tokens,
        "positions": jnp.broadcast_to(jnp.arange(12), (2, 12)),
        "segments": jnp.ones((2, 12), jnp.int32),
        "is_answer": jnp.ones((2, 12), bool),
    }
    losses = {}
    for layers in (tuple(range(model.config.num_hidden_layers)), (0,)):
        draft, own = few_layers(loaded, layers)
        loss = jax.jit(jax.value_and_grad(distillation_loss(draft, model), has_aux=True))
        (value, metrics), gradient = loss(own, params, batch, jax.random.key(1))
        size = max(float(jnp.max(jnp.abs(leaf))) for leaf in jax.tree.leaves(gradient))
        losses[len(layers)] = float(value), float(metrics["accuracy"][0]), size
    (all_layers, right, flat), (one_layer, less, steep) = losses.values()
    assert right == pytest.approx(1.0) and less < 0.99
    assert all_layers < one_layer and flat < 1e-4 < steep


def test_a_missing_layer_is_rejected():
    model, params = target()
    with pytest.raises(SpecjaxError, match=r"--layers \(0, 9\): the target has layers 0 to"):
        few_layers(SimpleNamespace(config=model.config, params=params), (0, 9))


@pytest.mark.slow
def test_the_written_draft_loads(tmp_path):
    chat = {"messages": [{"role": r, "content": "import os\n"} for r in ("user", "assistant")]}
    (tmp_path / "texts.jsonl").write_text(json.dumps(chat) + "\n")
    loop = LoopOptions(num_steps=1)
    build(Options("pocket", str(tmp_path / "texts.jsonl"), tmp_path / "run", (0, 7), loop))
    pocket = specjax.load("pocket", packed=False)
    drafter, params = specjax.load_drafter("draft-model", pocket, str(tmp_path / "run" / "model"))
    params = unpack_params(params)
    draft = params["draft"]["embed_tokens"]["weight"]
    assert drafter.draft.config.num_hidden_layers == 2
    assert jnp.allclose(draft, pocket.params["embed_tokens"]["weight"], atol=1e-2)
