"""Every method at its paper's settings on a random target, with random weights.

With the published accepted length and speed over plain decoding, at temperature 0.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.harness import CYCLE, SIZES, random_params
from specjax import Drafter, LoadedTarget, Transformer
from specjax.core.memory import device_bytes
from specjax.data.datastore import build
from specjax.data.datastore import params as datastore_params
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.length_rules import Fixed
from specjax.decoding.drafters.medusa import Medusa
from specjax.loading.methods import METHODS
from specjax.training.objectives.eagle import EagleTraining

NUM_INDUCTION_HEADS = 50  # PLD+, section 5.3
DRAFT_LENGTH = 5
DATASTORE_TOKENS = 2**17


class Made(NamedTuple):
    """A drafter, its params, and the bytes that it reads per round."""

    drafter: Drafter
    params: Any = None
    num_bytes: float = 0.0


class Published(NamedTuple):
    """A paper's figures: accepted length with the bonus, and speed over plain decoding."""

    source: str
    accepted_length: float
    speed_over_plain: float


class PaperMethod(NamedTuple):
    """A method and its published figures."""

    make: Callable[[LoadedTarget], Made]
    published: tuple[Published, ...]


def _drafter(name: str, target: LoadedTarget, *parts: Any, **settings: Any) -> Drafter:
    """Makes a drafter with its published settings, also on a CPU."""
    settings = METHODS[name].published(target.config) | settings
    return METHODS.make(name, target.config, settings, *parts)


def _pld_plus_attention(target: LoadedTarget) -> Made:
    layers, heads = target.config.num_hidden_layers, target.config.num_attention_heads
    count = min(NUM_INDUCTION_HEADS, layers * heads)
    numbers = np.arange(count) * (layers * heads) // count  # from all layers
    chosen = tuple((int(at) // heads, int(at) % heads) for at in numbers)
    return Made(_drafter("pld-plus-attention", target, heads=chosen))


def _rest(target: LoadedTarget) -> Made:
    """Looks up random tokens: their continuations differ, so that trees are full."""
    vocabulary = target.config.vocab_size
    text = np.random.default_rng(1).integers(0, min(CYCLE, vocabulary), DATASTORE_TOKENS)
    return Made(_drafter("rest", target), datastore_params(build([text], vocabulary)))


def _draft_model(target: LoadedTarget) -> Made:
    vocabulary, longest = target.config.vocab_size, target.config.max_position_embeddings
    sizes = SIZES["68m" if SIZES["68m"].vocab_size == vocabulary else "tiny"]
    draft = Transformer(replace(sizes, vocab_size=vocabulary, max_position_embeddings=longest))
    params = random_params(draft, str(target.dtype))
    unread = device_bytes(draft.lm_head(params))  # of the embedding only single rows are read
    drafter = DraftModel(draft, Fixed(DRAFT_LENGTH), DRAFT_LENGTH)
    num_bytes = DRAFT_LENGTH * (device_bytes(params) - unread)
    return Made(drafter, {"draft": params, "rule": None}, num_bytes)


def _with_head(name: str, target: LoadedTarget) -> Made:
    """Makes a drafter with a new head, and counts the weights that one draft reads."""
    training = METHODS[name].training or EagleTraining  # EAGLE-2 drafts with EAGLE's head
    head: Any = training().new_head(target.config)
    params = jax.jit(partial(head.initialise, dtype=target.dtype))(jax.random.key(1))
    drafter, head_bytes = _drafter(name, target, head), device_bytes(params)
    lm_head_bytes = device_bytes(target.model.lm_head(target.params))
    match drafter:
        case Eagle() | Eagle2():  # each depth of the tree takes a pass of both
            num_bytes = drafter.max_depth * (head_bytes + lm_head_bytes)
        case Medusa():  # its heads have LM heads, and a tree may need only the first ones
            num_bytes = head_bytes * drafter.max_depth / head.config.num_heads
        case Hydra():
            num_bytes = head_bytes
        case _:
            num_bytes = head_bytes + lm_head_bytes
    return Made(drafter, params, num_bytes)


def _made(name: str, target: LoadedTarget) -> Made:
    if name in OTHERS:
        return OTHERS[name](target)
    return _with_head(name, target) if METHODS[name].head else Made(_drafter(name, target))


OTHERS = {  # methods with params or settings that the registry cannot make up
    "pld-plus-attention": _pld_plus_attention,
    "draft-model": _draft_model,
    "rest": _rest,
}
# The most wanted first: where time is short, the last ones are left out.
PUBLISHED = {
    "eagle2": [("EAGLE-2, Llama-2-7B (HASS)", 4.61, 2.81), ("HASS, Llama-2-7B", 5.15, 3.24)],
    "pld": [("Vicuna-7B (Spec-Bench)", 1.75, 1.66)],
    "medusa": [("Vicuna-7B (ParallelSpec)", 2.39, 1.42)],
    "pld-plus": [("Vicuna-7B, summarization (PLD+, table 8)", 3.14, 3.39)],
    "parallel-eagle": [("Vicuna-7B (ParallelSpec)", 3.52, 2.55)],
    "eagle": [("Llama-2-7B (ParallelSpec)", 3.55, 2.40)],
    "parallel-medusa": [("Vicuna-7B (ParallelSpec)", 3.31, 2.31)],
    "pld-plus-attention": [("Vicuna-7B, summarization (PLD+, table 6)", 3.21, 3.32)],
    "draft-model": [("Vicuna-7B (Spec-Bench)", 2.28, 1.52)],
    "hydra": [("Vicuna-7B (Spec-Bench)", 3.26, 2.07)],
    "lookahead": [("Vicuna-7B (Spec-Bench)", 1.64, 1.34)],
    "recycling": [("Vicuna-7B (Spec-Bench)", 2.73, 2.22)],
    "rest": [("Vicuna-7B (Spec-Bench)", 1.82, 1.48)],
}
PAPER_METHODS = {
    name: PaperMethod(partial(_made, name), tuple(Published(*each) for each in published))
    for name, published in PUBLISHED.items()
}
