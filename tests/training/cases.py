"""The objectives of all heads by their definitions: text by text, slot by slot, by drafting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding.drafter import Params
from specjax.models.cache import KVCache
from specjax.models.heads import HeadWeights
from specjax.models.target import causal_rows
from specjax.training import blocks
from specjax.training.examples import Example
from specjax.training.objectives.base import HeadTraining, Step, hidden_states
from specjax.training.objectives.eagle import EagleTraining
from specjax.training.objectives.eagle3 import Eagle3Training
from specjax.training.objectives.hass import HassTraining
from specjax.training.objectives.hydra import HydraTraining
from specjax.training.objectives.medusa import MedusaTraining
from specjax.training.objectives.parallel_spec import ParallelEagleTraining, ParallelMedusaTraining
from tests.decoding import heads, tiny
from tests.models import test_eagle_head, test_parallel_head
from tests.models.test_eagle_head import Texts, gradients_differ_by

LENGTH, VOCAB = 12, 40
TARGET, RANDOM = tiny.target(VOCAB, layers=1)
# One of two tokens is usually the most likely, so that a random head is sometimes right.
TABLE = RANDOM["lm_head"]["weight"]
FROZEN = RANDOM | {"lm_head": {"weight": TABLE.at[0].multiply(5).at[1].set(-5 * TABLE[0])}}
TABLE = TARGET.lm_head(FROZEN)
KEY = jax.random.key(11)
NOISE = 0.005  # a quarter to each side in a text of 10 tokens: about as wide as features differ

# ---- Texts and batches ---------------------------------------------------------------------------


def weights_of(params) -> HeadWeights:
    return HeadWeights(params, TARGET, FROZEN)


def _example(answers: Sequence[int], size: int, seed: int) -> Example:
    tokens = np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32)
    return Example(tokens, np.isin(np.arange(size), answers))


# Two answers of which one ends the text; one from the first counted token on; a single token.
EXAMPLES = (
    _example([3, 4, 5, 8], 9, seed=0),
    _example([0, 1, 2, 3, 4], 6, seed=1),
    _example([3], 4, seed=2),
)
PACKED = ((0,), (1, 2))  # the texts of each sequence
ALONE = ((0,), (1,), (2,))


def batch_of(
    sequences: Sequence[Sequence[int]] = PACKED, num_tokens: int = VOCAB
) -> dict[str, np.ndarray]:
    """A batch whose sequences hold these of `EXAMPLES`, of `num_tokens` tokens, then padding."""
    dtypes = {"tokens": np.int32, "is_answer": bool, "segments": np.int32, "positions": np.int32}
    batch = {name: np.zeros((len(sequences), LENGTH), kind) for name, kind in dtypes.items()}
    for index, texts in enumerate(sequences):
        first = 0
        for segment, text in enumerate(texts, start=1):
            size = len(EXAMPLES[text].tokens)
            slots = index, slice(first, first + size)
            batch["tokens"][slots] = EXAMPLES[text].tokens % num_tokens
            batch["is_answer"][slots] = EXAMPLES[text].is_answer
            batch["segments"][slots] = segment
            batch["positions"][slots] = np.arange(size)
            first += size
    return batch


def counted(depth: int = 1) -> list[tuple[int, int]]:
    """Texts and slots whose token `1 + depth` later is an answer of the text."""
    return [
        (text, slot)
        for text, example in enumerate(EXAMPLES)
        for slot in range(len(example.tokens) - 1 - depth)
        if example.is_answer[slot + 1 + depth]
    ]


def each_alone(values: Any) -> np.ndarray:
    """The texts of a batch of `PACKED` in one sequence each, `[3, T, ...]`, then zeros."""
    values = np.asarray(values)
    alone = np.zeros((len(EXAMPLES), *values.shape[1:]), values.dtype)
    for index, texts in enumerate(PACKED):
        first = 0
        for text in texts:
            size = len(EXAMPLES[text].tokens)
            alone[text, :size] = values[index, first : first + size]
            first += size
    return alone


@cache
def noisy_features(noise: float) -> jax.Array:
    """The features that an EAGLE head reads of a batch of `PACKED`, its noise drawn with `KEY`."""
    training = EagleTraining(noise=noise)
    run = jax.jit(lambda batch: training.noisy_features(Step(TARGET, FROZEN, batch, KEY)))
    return run(batch_of())


@cache
def clean_features(num_tokens: int = VOCAB) -> np.ndarray:
    """The target's feature of every token of each text, from a plain pass; then zeros."""
    batch = batch_of(ALONE, num_tokens)
    features = heads.features_of(Params(FROZEN, None), jnp.asarray(batch["tokens"]), TARGET)
    return np.where(batch["segments"][..., None] > 0, features, 0)


# ---- Cases ---------------------------------------------------------------------------------------

At = Callable[[int, Any, Any], Any]  # step, N texts and slots -> the head's outputs there, `[N, D]`


@dataclass(frozen=True, eq=False)
class Case:
    """A training without default options, so that an option that is not read shows."""

    training: HeadTraining
    head: Any
    params: Any
    predict: Callable[["Case", Any], At]  # the definition: logits, or the features they come from
    weights: tuple[dict[str, float], ...]  # of the parts of the loss, by depth or step
    is_aligned: bool = False  # steps of alignment all predict the same depth
    num_tokens: int = VOCAB  # of two tokens a random head is right sometimes

    @property
    def learns_text(self) -> bool:
        """Whether the text's tokens are learned, or else the target's distribution."""
        return "token_loss" in self.weights[0]

    @property
    def batch(self) -> dict[str, np.ndarray]:
        return batch_of(PACKED, self.num_tokens)

    def measure(self, batch: Any = None, frozen: Any = FROZEN) -> tuple[Any, Any, Any]:
        """Loss, gradient and metrics of the packed texts, or of another batch."""
        batch = self.batch if batch is None else batch
        run = measure_of(self.training, self.head)
        (loss, metrics), gradient = run(self.params, frozen, batch, KEY)
        return loss, gradient, metrics


@cache
def measure_of(
    training: HeadTraining, head: Any, recompute: bool = False, block_slots: int = 10
) -> Callable:
    """Loss, metrics and gradient, compiled; 12 slots of 2 rows make 3 blocks of 4."""
    loss = training.loss(head, TARGET, recompute)

    def loss_in_blocks(*given):
        with mock.patch.object(blocks, "BLOCK_SLOTS", block_slots):
            return loss(*given)

    return jax.jit(jax.value_and_grad(loss_in_blocks, has_aux=True))


def definition(case: Case, predict: Any = None) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Loss, gradient, and the parts of the loss by step; `predict` is for mutants."""
    texts_alone(case)  # fills the caches before anything is traced
    clean, tokens = clean_features(case.num_tokens), batch_of(ALONE, case.num_tokens)["tokens"]

    def parts_of(output, feature, token) -> dict[str, Any]:
        """The parts at one slot."""
        is_logits = output.shape[-1] == VOCAB
        log_q = jax.nn.log_softmax(output if is_logits else TABLE @ output)
        p = jax.nn.softmax(TABLE @ feature)
        top = jnp.argsort(-p)[: case.training.top_k]
        distance = jnp.zeros(1) if is_logits else jnp.abs(output - feature)
        right = token if case.learns_text else jnp.argmax(p)
        over_all = {"logit_loss": -jnp.sum(p * log_q), "token_loss": -log_q[token]}
        if case.training.distribution_loss == "lk-alpha":
            overlap = jnp.sum(jnp.minimum(p, jnp.exp(log_q)))
            over_all = dict.fromkeys(over_all, -jnp.log(jnp.maximum(overlap, 1e-5)))
        return {
            **over_all,
            "feature_loss": jnp.mean(jnp.where(distance < 1, distance**2 / 2, distance - 0.5)),
            "top_loss": -jnp.sum(p[top] * log_q[top]),
            "accuracy": (jnp.argmax(log_q) == right).astype(float),
        }

    def total(params):
        at, loss, of_steps = (predict or case.predict)(case, params), 0.0, []
        for step, weights in enumerate(case.weights):
            depth = 1 if case.is_aligned else 1 + step
            text, slot = np.transpose(counted(depth))
            labels = clean[text, slot + depth], tokens[text, slot + 1 + depth]
            parts = jax.vmap(parts_of)(at(step, text, slot), *labels)
            parts = jax.tree.map(jnp.mean, parts)
            loss += sum(weights[name] * parts[name] for name in weights)
            of_steps.append(parts)
        return loss, of_steps

    (loss, of_steps), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(case.params)
    return loss, gradient, of_steps


def texts_alone(case: Case) -> Texts:
    """Each text by itself, with the features that the head reads."""
    batch, features = batch_of(ALONE, case.num_tokens), clean_features(case.num_tokens)
    if "feature_loss" in case.weights[0]:
        features = each_alone(noisy_features(NOISE))
    behind = np.pad(batch["tokens"][:, 1:], ((0, 0), (0, 1)))
    places = (jnp.asarray(batch[name]) for name in ("positions", "segments"))
    read = heads.features_for(case.head, jnp.asarray(features))
    return Texts(jnp.asarray(behind), read, *places)


def by_drafting(case: Case, params: Any, drafts: Any = None) -> At:
    """The outputs of an EAGLE head at each slot as the n-th token of a draft."""
    drafts = drafts or test_eagle_head.drafts
    found = drafts(case.head, params, FROZEN, texts_alone(case), len(case.weights))
    return lambda *place: found[place]


def by_groups(case: Case, params: Any) -> At:
    """The outputs of a ParallelSpec head, for each group alone."""
    found = test_parallel_head.drafts(case.head, params, FROZEN, texts_alone(case))
    return lambda *place: found[place]


def by_formula(case: Case, params: Any) -> At:
    """The logits of Medusa heads at the target's features."""

    def at(step: int, text: Any, slot: Any):
        block, table = params[f"blocks_{step}"], params[f"lm_heads_{step}"]["weight"]

        def logits(x):
            for _ in range(2):
                inner = block["weight"] @ x + block["bias"]
                x = x + inner / (1 + jnp.exp(-inner))
            return table @ x

        return jax.vmap(logits)(clean_features(case.num_tokens)[text, slot])

    return at


def by_drafts(case: Case, params: Any) -> At:
    """The logits of an EAGLE-3 head at each slot as the n-th token of a draft, a row per draft."""
    batch, found = batch_of(ALONE, case.num_tokens), []
    tokens, *places = (jnp.asarray(batch[name]) for name in ("tokens", "positions", "segments"))
    hidden = hidden_states(TARGET, FROZEN, case.head.config.taps, tokens, *places)
    text, slot = (each.ravel() for each in np.indices(tokens.shape))
    read, feature = jnp.roll(tokens, -1, axis=1)[text], hidden.reshape(*tokens.shape, -1)[text]
    cache, count = KVCache.create(case.head.config.layers, len(text), 2 * LENGTH), slot + 1
    for step in range(len(case.weights)):
        rows = causal_rows(read, cache.length)
        output, cache = case.head.run(weights_of(params), rows, feature, cache)
        feature = jnp.take_along_axis(output, count[:, None, None] - 1, axis=1)
        logits = case.head.logits(weights_of(params), feature, None)
        found.append(logits.reshape(*tokens.shape, -1))
        cache, count = cache.advance(jnp.asarray(count)), np.ones_like(slot)
        read = tokens[text, np.minimum(slot + 2 + step, LENGTH - 1)][:, None]
    return lambda step, *places: found[step][places]


def by_cache(case: Case, params: Any) -> At:
    """The logits of Hydra heads after the tokens of the text; the prefix goes slot by slot."""

    def feed(cache: KVCache, feature):
        rows = causal_rows(jnp.zeros((len(EXAMPLES), 1), jnp.int32), cache.length)
        one, cache = case.head.run(weights_of(params), rows, feature[:, None], cache)
        return cache.advance(jnp.ones_like(cache.length)), one[:, 0]

    features = jnp.asarray(clean_features(case.num_tokens)).swapaxes(0, 1)
    empty = KVCache.create(case.head.config.layers, len(EXAMPLES), LENGTH)
    read, tokens = jax.lax.scan(feed, empty, features)[1], batch_of(ALONE)["tokens"]

    def at(step: int, text: Any, slot: Any):
        behind = tokens[text[:, None], slot[:, None] + 1 + np.arange(step + 1)]
        embedded = TARGET.embed(FROZEN, jnp.asarray(behind))[:, None]
        inputs = step + 1, read[slot, text][:, None], embedded
        return case.head.logits_at(weights_of(params), *inputs)[:, 0]

    return at


OF_FEATURES: Any = {"feature_weight": 0.7, "logit_weight": 0.3, "noise": NOISE}
FEATURE_LOSS = {"feature_loss": 0.7, "logit_loss": 0.3}
TOP: Any = {"top_weight": 0.8, "top_k": 4}
OVERLAP: Any = {"distribution_loss": "lk-alpha"}
DEPTHS = 3  # of Medusa and Hydra; a parallel head has one more


def _decayed(weights: dict[str, float], decay: float, steps: Sequence[int]) -> tuple[Any, ...]:
    return tuple({name: weight * decay**step for name, weight in weights.items()} for step in steps)


HASS = HassTraining(align_steps=3, step_decay=0.6, **OF_FEATURES, **TOP)
CASES = {
    "eagle": Case(
        EagleTraining(**OF_FEATURES),
        *heads.eagle_head(VOCAB, layers=1),
        by_drafting,
        (FEATURE_LOSS,),
    ),
    "hass": Case(
        HASS,
        *heads.eagle_head(VOCAB, layers=1),
        by_drafting,
        _decayed(FEATURE_LOSS | {"top_loss": 0.8}, 0.6, (0, 1, 2)),
        is_aligned=True,
    ),
    "eagle3": Case(
        Eagle3Training(draft_vocab=0, test_steps=3, step_decay=0.6, **TOP, **OVERLAP),
        *heads.eagle3_head(VOCAB, layers=1, tap_norm="joined", norm_output=True),
        by_drafts,
        _decayed({"logit_loss": 1.0, "top_loss": 0.8}, 0.6, (0, 1, 2)),
    ),
    "medusa": Case(
        MedusaTraining(head_decay=0.7, **TOP),
        *heads.medusa_head(VOCAB, 1, DEPTHS, has_lm_heads=True),
        by_formula,
        _decayed({"token_loss": 1.0, "top_loss": 0.8}, 0.7, (1, 2, 3)),
        num_tokens=2,
    ),
    "hydra": Case(
        HydraTraining(**TOP, **OVERLAP),
        *heads.hydra_head(True, VOCAB, 1, DEPTHS, has_lm_heads=False),
        by_cache,
        ({"logit_loss": 1.0, "top_loss": 0.8},) * DEPTHS,
    ),
    "parallel-eagle": Case(
        ParallelEagleTraining(**OF_FEATURES, **TOP),
        *heads.parallel_head(True, VOCAB, layers=1),
        by_groups,
        (FEATURE_LOSS | {"top_loss": 0.8},) * (heads.MASKS + 1),
    ),
    "parallel-medusa": Case(
        ParallelMedusaTraining(head_decay=0.6, **TOP, **OVERLAP),
        *heads.parallel_head(False, VOCAB, layers=1),
        by_groups,
        _decayed({"token_loss": 1.0, "top_loss": 0.8}, 0.6, range(heads.MASKS + 1)),
        num_tokens=2,
    ),
}
WITH_FEATURES = Case(
    ParallelMedusaTraining(head_decay=0.6),
    *heads.parallel_head(True, VOCAB, layers=1),
    by_groups,
    _decayed({"token_loss": 1.0}, 0.6, range(heads.MASKS + 1)),
    num_tokens=2,
)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Two pairs of loss and gradient, each leaf of it against its largest entry."""
    np.testing.assert_allclose(found[0], expected[0], rtol=tolerance)
    assert gradients_differ_by(found[1], expected[1]) <= tolerance
