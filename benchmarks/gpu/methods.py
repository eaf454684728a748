"""Every method at its paper's settings on a random target, with random weights.

With the published accepted length and speed over plain decoding, at temperature 0.
"""

from collections.abc import Callable
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
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec, ParallelSpecMedusa
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus, PromptLookupPlusAttention
from specjax.decoding.drafters.recycling import Recycling
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.parallel import ParallelConfig, ParallelHead

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


def _pld_plus(target: LoadedTarget) -> Made:
    return Made(PromptLookupPlus(70, layer=PromptLookupPlus.layer_for(target.config)))


def _pld_plus_attention(target: LoadedTarget) -> Made:
    layers, heads = target.config.num_hidden_layers, target.config.num_attention_heads
    count = min(NUM_INDUCTION_HEADS, layers * heads)
    numbers = np.arange(count) * (layers * heads) // count  # from all layers
    chosen = tuple((int(at) // heads, int(at) % heads) for at in numbers)
    return Made(PromptLookupPlusAttention(70, heads=chosen))


def _rest(target: LoadedTarget) -> Made:
    """Looks up random tokens: their continuations differ, so that trees are full."""
    vocabulary = target.config.vocab_size
    text = np.random.default_rng(1).integers(0, min(CYCLE, vocabulary), DATASTORE_TOKENS)
    return Made(Retrieval(), datastore_params(build([text], vocabulary)))


def _draft_model(target: LoadedTarget) -> Made:
    vocabulary = target.config.vocab_size
    size = "68m" if SIZES["68m"].vocabulary == vocabulary else "tiny"
    shape = SIZES[size]._replace(vocabulary=vocabulary)
    draft = Transformer(shape.config(target.config.max_position_embeddings))
    params = random_params(draft, str(target.dtype))
    unread = device_bytes(draft.lm_head(params))  # of the embedding only single rows are read
    drafter = DraftModel(draft, Fixed(DRAFT_LENGTH), DRAFT_LENGTH)
    num_bytes = DRAFT_LENGTH * (device_bytes(params) - unread)
    return Made(drafter, {"draft": params, "rule": None}, num_bytes)


def _eagle(drafter: Callable[[EagleHead], Eagle | Eagle2], target: LoadedTarget) -> Made:
    """Each depth of the tree takes one pass of the head, and one of the LM head."""
    head = EagleHead(EagleConfig.for_target(target.config))
    params, drafts = _drawn(head, target), drafter(head)
    return Made(drafts, params, drafts.max_depth * (device_bytes(params) + _lm_head_bytes(target)))


def _medusa(target: LoadedTarget) -> Made:
    heads = MedusaHeads(MedusaConfig.for_target(target.config))
    params, drafter = _drawn(heads, target), Medusa(heads)
    return Made(drafter, params, device_bytes(params) * drafter.max_depth / heads.config.num_heads)


def _hydra(target: LoadedTarget) -> Made:
    heads = HydraHeads(HydraConfig.for_target(target.config))
    params = _drawn(heads, target)
    return Made(Hydra(heads), params, device_bytes(params))


def _parallel(drafter: Callable[[ParallelHead], ParallelSpec], target: LoadedTarget) -> Made:
    reads_features = drafter is ParallelSpec
    head = ParallelHead(ParallelConfig.for_target(target.config, reads_features=reads_features))
    params = _drawn(head, target)
    return Made(drafter(head), params, device_bytes(params) + _lm_head_bytes(target))


def _drawn(head: Any, target: LoadedTarget) -> Any:
    return jax.jit(partial(head.initialise, dtype=target.dtype))(jax.random.key(1))


def _lm_head_bytes(target: LoadedTarget) -> int:
    return device_bytes(target.model.lm_head(target.params))


def _entry(make: Callable[[LoadedTarget], Made], *published: tuple[str, float, float]):
    return PaperMethod(make, tuple(Published(*each) for each in published))


# The most wanted first: where time is short, the last ones are left out.
PAPER_METHODS: dict[str, PaperMethod] = {
    "eagle2": _entry(
        partial(_eagle, Eagle2),
        ("EAGLE-2, Llama-2-7B (HASS)", 4.61, 2.81),
        ("HASS, Llama-2-7B", 5.15, 3.24),
    ),
    "pld": _entry(lambda _: Made(PromptLookup()), ("Vicuna-7B (Spec-Bench)", 1.75, 1.66)),
    "medusa": _entry(_medusa, ("Vicuna-7B (ParallelSpec)", 2.39, 1.42)),
    "pld-plus": _entry(_pld_plus, ("Vicuna-7B, summarization (PLD+, table 8)", 3.14, 2.33)),
    "parallel-eagle": _entry(
        partial(_parallel, ParallelSpec), ("Vicuna-7B (ParallelSpec)", 3.52, 2.55)
    ),
    "eagle": _entry(partial(_eagle, Eagle), ("Llama-2-7B (ParallelSpec)", 3.55, 2.40)),
    "parallel-medusa": _entry(
        partial(_parallel, ParallelSpecMedusa), ("Vicuna-7B (ParallelSpec)", 3.31, 2.31)
    ),
    "pld-plus-attention": _entry(
        _pld_plus_attention, ("Vicuna-7B, summarization (PLD+, table 6)", 3.21, 2.28)
    ),
    "draft-model": _entry(_draft_model, ("Vicuna-7B (Spec-Bench)", 2.28, 1.52)),
    "hydra": _entry(_hydra, ("Vicuna-7B (Spec-Bench)", 3.26, 2.07)),
    "lookahead": _entry(lambda _: Made(Lookahead()), ("Vicuna-7B (Spec-Bench)", 1.64, 1.34)),
    "recycling": _entry(lambda _: Made(Recycling()), ("Vicuna-7B (Spec-Bench)", 2.73, 2.22)),
    "rest": _entry(_rest, ("Vicuna-7B (Spec-Bench)", 1.82, 1.48)),
}
