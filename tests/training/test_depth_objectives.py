"""Defaults of Medusa, Hydra's slots against drafting, and what ParallelSpec runs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafter import Context, Params
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import from_ids
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelMedusaTraining
from tests.decoding import heads
from tests.training.cases import (
    CASES,
    DEPTHS,
    EXAMPLES,
    FROZEN,
    KEY,
    TARGET,
    batch_of,
    each_alone,
)


def test_the_default_weight_is_that_of_the_released_code():
    assert MedusaTraining().head_decay == 0.8 and MedusaTraining().top_weight == 0


def test_what_hydra_trains_is_what_drafts(monkeypatch):
    """Logits of every slot and depth in a packed row, and the drafter's behind that much text."""
    case = CASES["hydra with prefix"]
    module, given = case.head, Params(FROZEN, case.params)
    trained: list[Any] = []  # by depth, each text in its own sequence
    logit_values = HydraTraining.logit_values

    def record(self, logits, target_logits):
        trained.append(each_alone(logits))
        return logit_values(self, logits, target_logits)

    monkeypatch.setattr(HydraTraining, "logit_values", record)
    batch = jax.tree.map(jnp.asarray, batch_of())
    with jax.disable_jit():  # also of the loop over blocks, so that there are values to look at
        HydraTraining().loss(module, TARGET)(case.params, FROZEN, batch, KEY)
    engine = Engine(TARGET, Hydra(module), max_new_tokens=4)
    for text in (0, 2):  # one that has its row for itself, and one that follows another
        tokens = EXAMPLES[text].tokens.tolist()
        roots = range(1, len(tokens) - 1)  # each ends one prompt
        prompts = from_ids([tokens[: root + 1] for root in roots], bucket=16)
        state = engine.prefill(given, prompts, KEY)
        context = Context(state.tokens, state.length)
        drafter = Hydra(module)
        features, _ = drafter.catch_up(drafter.bind(TARGET, given), state.drafter, context)
        for row, root in enumerate(roots):
            for depth in range(1, min(DEPTHS, len(tokens) - 1 - root) + 1):
                behind = TARGET.embed(FROZEN, jnp.asarray([tokens[root : root + depth]]))
                logits = partial(module.logits, case.params, TARGET, FROZEN, depth)
                logits = logits(features[row : row + 1], behind[None])[0, 0]
                learned = trained[depth - 1][text, root - 1 + depth]  # where that feature stands
                assert np.abs(learned - logits).max() <= 1e-5 * np.abs(logits).max()


def test_the_target_runs_only_where_its_features_are_read():
    case = CASES["parallel-medusa"]
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, FROZEN)
    broken |= {name: FROZEN[name] for name in ("embed_tokens", "lm_head")}
    loss = jax.jit(ParallelMedusaTraining().loss(case.head, TARGET))
    found, metrics = loss(case.params, broken, case.batch, KEY)
    assert np.isfinite(found) and metrics["accuracy"].shape == (heads.MASKS + 1,)
