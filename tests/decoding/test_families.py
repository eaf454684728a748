"""Every family from a checkpoint of `transformers`: its text, and drafting for it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, Generation, Params
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.prompt import from_ids
from specjax.models.config import TransformerConfig, Variant
from specjax.models.families import read_config
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.io.huggingface import load_transformer, save_transformer
from specjax.models.transformer import Transformer
from tests.decoding.heads import noisy
from tests.decoding.tiny import slow_except
from tests.models import checkpoints

NEW_TOKENS = 64
PROMPT = np.random.default_rng(5).integers(3, 61, (1, 17)).astype(np.int32)


class Model(NamedTuple):
    theirs: Any
    config: TransformerConfig
    params: Any


@pytest.fixture(scope="module", params=slow_except(checkpoints.FAMILIES, "qwen2"))
def model(request, tmp_path_factory) -> Model:
    pytest.importorskip("torch")
    settings = checkpoints.FAMILIES[request.param]
    if "n_positions" not in settings:
        settings = settings | {"max_position_embeddings": 128}
    theirs = checkpoints.build(request.param, **settings)
    folder = checkpoints.save(tmp_path_factory.mktemp("checkpoint"), theirs, shard_size="20KB")
    config = read_config(folder)
    return Model(theirs, config, load_transformer(folder, config, jnp.float32))


def generated(model: Model, drafter: Any, params: Any = None) -> Generation:
    engine = Engine(Transformer(model.config), drafter, max_new_tokens=NEW_TOKENS)
    request, given = Params(model.params, params), from_ids(PROMPT.tolist())
    return engine.generate(request, given, jax.random.key(1))


def test_greedy_text_is_that_of_transformers(model):
    import torch

    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.theirs.generate(
        torch.from_numpy(PROMPT).long(), max_new_tokens=NEW_TOKENS, **settings
    )
    assert len(set(expected[0].tolist())) > 10
    found = generated(model, Autoregressive())
    np.testing.assert_array_equal(found.tokens, expected[:, PROMPT.shape[1] :].numpy())


def test_transformers_reads_what_is_saved(model, tmp_path):
    import transformers

    save_transformer(tmp_path / "saved", model.config, model.params, jnp.float32)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", attn_implementation="eager"
    )
    expected = checkpoints.forward(model.theirs, PROMPT).logits
    np.testing.assert_allclose(checkpoints.forward(again, PROMPT).logits, expected, atol=1e-5)
    assert read_config(tmp_path / "saved") == model.config


@pytest.mark.slow
def test_all_drafters_give_the_tokens_of_plain_decoding(model):
    config, params = model.config, model.params
    expected = generated(model, Autoregressive())
    head = EagleHead(EagleConfig.for_target(config))
    assert head.config.layers.variant == Variant()
    weights = jax.tree.map(lambda leaf: 8 * leaf, head.initialise(jax.random.key(7)))
    found = generated(model, Eagle2(head, top_k=3, depth=3, num_tokens=12), weights)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    near = jax.tree.map(lambda leaf, noise: leaf + 0.05 * (noise - leaf), params, noisy(params))
    drafter = DraftModel(Transformer(config), max_length=5)
    found = generated(model, drafter, {"draft": near, "rule": None})
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert found.from_draft.any()
