"""Every method at its paper's settings on a random target, with random weights of its own.

And what the papers report of it: accepted length and speed over their plain decoding.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.bench.shapes import CYCLE, SIZES, random_params
from specjax.datastore import build
from specjax.datastore import params as datastore_params
from specjax.decoding.drafter import Drafter
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle
from specjax.decoding.drafters.eagle2 import Eagle2, Eagle2Settings
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.length_rules import Fixed
from specjax.decoding.drafters.lookahead import Lookahead
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import (
    ParallelMedusaSettings,
    ParallelSettings,
    ParallelSpec,
)
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import (
    PromptLookupPlus,
    PromptLookupPlusAttention,
)
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.models.config import TransformerConfig
from specjax.models.heads.eagle import EagleConfig, EagleHead
from specjax.models.heads.hydra import HydraConfig, HydraHeads
from specjax.models.heads.medusa import MedusaConfig, MedusaHeads
from specjax.models.heads.parallel import ParallelConfig, ParallelHead
from specjax.models.transformer import Transformer

NUM_INDUCTION_HEADS = 50  # PLD+, section 5.3
DRAFT_LENGTH = 5
DATASTORE_TOKENS = 2**17


class Base(NamedTuple):
    """A random target that methods are made for."""

    model: Transformer
    params: Any
    dtype: str

    @property
    def config(self) -> TransformerConfig:
        return self.model.config

    @property
    def lm_head(self) -> jax.Array:
        """Its table of all tokens."""
        name = "embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.params[name]["weight"]


class Made(NamedTuple):
    """A drafter, its params, and the bytes that it must read each round beside the target's."""

    drafter: Drafter
    params: Any
    num_bytes: float


class Published(NamedTuple):
    """What a paper reports: accepted length with the bonus, and speed over plain decoding."""

    source: str
    accepted_length: float
    speed_over_plain: float


class Entry(NamedTuple):
    """A method and what is published of it at temperature 0."""

    make: Callable[[Base], Made]
    published: tuple[Published, ...]


def _pld(base: Base) -> Made:
    return Made(PromptLookup(num_tokens=10), None, 0)


def _pld_plus(base: Base) -> Made:
    layer = PromptLookupPlus.layer_for(base.config)
    return Made(PromptLookupPlus(num_tokens=70, layer=layer), None, 0)


def _pld_plus_attention(base: Base) -> Made:
    layers, heads = base.config.num_hidden_layers, base.config.num_attention_heads
    count = min(NUM_INDUCTION_HEADS, layers * heads)
    numbers = np.arange(count) * (layers * heads) // count  # from all layers
    chosen = tuple((int(at) // heads, int(at) % heads) for at in numbers)
    return Made(PromptLookupPlusAttention(num_tokens=70, heads=chosen), None, 0)


def _lookahead(base: Base) -> Made:
    return Made(Lookahead(), None, 0)


def _rest(base: Base) -> Made:
    """Random tokens: what follows a match then differs from match to match, so trees are full."""
    vocabulary = base.config.vocab_size
    text = np.random.default_rng(1).integers(0, min(CYCLE, vocabulary), DATASTORE_TOKENS)
    return Made(Retrieval(), datastore_params(build([text], vocabulary)), 0)


def _draft_model(base: Base) -> Made:
    vocabulary = base.config.vocab_size
    size = "68m" if SIZES["68m"].vocabulary == vocabulary else "tiny"
    shape = SIZES[size]._replace(vocabulary=vocabulary)
    draft = Transformer(shape.config(base.config.max_position_embeddings))
    params = random_params(draft, base.dtype)
    read = _size(params) - _size(params["embed_tokens"])
    drafter = DraftModel(draft, Fixed(DRAFT_LENGTH), DRAFT_LENGTH)
    return Made(drafter, {"draft": params, "rule": None}, DRAFT_LENGTH * read)


def _eagle(base: Base) -> Made:
    return _with_eagle_head(base, Eagle)


def _eagle2(base: Base) -> Made:
    settings = Eagle2Settings(top_k=10, depth=6, num_tokens=60)
    return _with_eagle_head(base, partial(Eagle2, settings=settings))


def _with_eagle_head(base: Base, make: Callable[[EagleHead, Transformer], Eagle | Eagle2]) -> Made:
    """Each depth of the tree takes one pass of the head, and one of the LM head."""
    head = EagleHead(EagleConfig.for_target(base.config))
    params, drafter = _drawn(head, base), make(head, base.model)
    return Made(drafter, params, drafter.max_depth * (_size(params) + base.lm_head.nbytes))


def _medusa(base: Base) -> Made:
    heads = MedusaHeads(MedusaConfig.for_target(base.config))
    params, drafter = _drawn(heads, base), Medusa(heads, base.model)
    return Made(drafter, params, _size(params) * drafter.max_depth / heads.config.num_heads)


def _hydra(base: Base) -> Made:
    heads = HydraHeads(HydraConfig.for_target(base.config))
    params = _drawn(heads, base)
    return Made(Hydra(heads, base.model), params, _size(params))


def _parallel_medusa(base: Base) -> Made:
    return _parallel(base, ParallelMedusaSettings(), reads_features=False)


def _parallel_eagle(base: Base) -> Made:
    return _parallel(base, ParallelSettings(), reads_features=True)


def _parallel(base: Base, settings: ParallelSettings, reads_features: bool) -> Made:
    head = ParallelHead(ParallelConfig.for_target(base.config, reads_features=reads_features))
    params = _drawn(head, base)
    read = _size(params) + base.lm_head.nbytes
    return Made(ParallelSpec(head, base.model, settings), params, read)


def _drawn(head: Any, base: Base) -> Any:
    return jax.jit(partial(head.initialise, dtype=base.dtype))(jax.random.key(1))


def _size(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


# The most wanted first: where time is short, the last ones are left out.
METHODS: dict[str, Entry] = {
    "eagle2": Entry(
        _eagle2,
        (
            Published("EAGLE-2, Llama-2-7B (HASS)", 4.61, 2.81),
            Published("HASS, Llama-2-7B", 5.15, 3.24),
        ),
    ),
    "pld": Entry(_pld, (Published("Vicuna-7B (Spec-Bench)", 1.75, 1.66),)),
    "medusa": Entry(_medusa, (Published("Vicuna-7B (ParallelSpec)", 2.39, 1.42),)),
    "pld-plus": Entry(
        _pld_plus, (Published("Vicuna-7B, summarization (PLD+, table 8)", 3.14, 2.33),)
    ),
    "parallel-eagle": Entry(_parallel_eagle, (Published("Vicuna-7B (ParallelSpec)", 3.52, 2.55),)),
    "eagle": Entry(_eagle, (Published("Llama-2-7B (ParallelSpec)", 3.55, 2.40),)),
    "parallel-medusa": Entry(
        _parallel_medusa, (Published("Vicuna-7B (ParallelSpec)", 3.31, 2.31),)
    ),
    "pld-plus-attention": Entry(
        _pld_plus_attention,
        (Published("Vicuna-7B, summarization (PLD+, table 6)", 3.21, 2.28),),
    ),
    "draft-model": Entry(_draft_model, (Published("Vicuna-7B (Spec-Bench)", 2.28, 1.52),)),
    "hydra": Entry(_hydra, (Published("Vicuna-7B (Spec-Bench)", 3.26, 2.07),)),
    "lookahead": Entry(_lookahead, (Published("Vicuna-7B (Spec-Bench)", 1.64, 1.34),)),
    "rest": Entry(_rest, (Published("Vicuna-7B (Spec-Bench)", 1.82, 1.48),)),
}
