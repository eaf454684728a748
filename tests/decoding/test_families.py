"""Every family from a checkpoint of `transformers`: its text, and drafting for it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Params, Sampling, speculative_generate
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
DRAFTERS = ("eagle2", "draft model")


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


def generated(model: Model, drafter: Any, params: Any = None, sampling: Sampling = Sampling()):
    return speculative_generate(
        Params(model.params, params),
        from_ids(PROMPT.tolist()),
        jax.random.key(1),
        target=Transformer(model.config),
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
    )


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


def drafter_of(name: str, config: TransformerConfig, params: Any) -> tuple[Any, Any]:
    if name == "draft model":
        near = jax.tree.map(lambda leaf, noise: leaf + 0.05 * (noise - leaf), params, noisy(params))
        return DraftModel(Transformer(config), max_length=5), {"draft": near, "rule": None}
    head = EagleHead(EagleConfig.for_target(config))
    assert head.config.layers.variant == Variant()
    params = jax.tree.map(lambda leaf: 8 * leaf, head.initialise(jax.random.key(7)))
    return Eagle2(head, top_k=3, depth=3, num_tokens=12), params


@pytest.mark.slow
def test_all_drafters_give_the_tokens_of_plain_decoding(model):
    sampling = Sampling(temperature=0.8)
    expected = generated(model, Autoregressive(), sampling=sampling)
    for name in DRAFTERS:
        drafter, params = drafter_of(name, model.config, model.params)
        found = generated(model, drafter, params, sampling)
        np.testing.assert_array_equal(found.tokens, expected.tokens, name)
        assert name == "eagle2" or found.from_draft.any(), name
