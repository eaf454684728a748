"""What the drafters with an EAGLE head share: a state that follows the committed text."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.decoding.drafter import Context, Outcome, Params, Proposal
from specjax.decoding.drafters.length_rules import misfits
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.errors import SpecjaxError
from specjax.models.cache import KVCache
from specjax.models.config import LlamaConfig
from specjax.models.heads.eagle import EagleHead
from specjax.models.llama import Llama
from specjax.models.outputs import ModelOutput, Taps
from specjax.models.prefill import PREFILL_CHUNK
from specjax.models.rows import QueryRows, causal_rows
from specjax.pytree import pytree


@pytree
class HeadState:
    """What is carried from round to round. P = max_depth + 1, H the width of a feature."""

    cache: KVCache  # of the head: slots made of the target's own features only
    pending: Float[Array, "B P H"]  # the target's features of the tokens committed last
    num_pending: Int[Array, " B"]  # so many of them; the head has not seen them yet


@dataclass(frozen=True)
class HeadDrafter(ABC):
    """Feeds a head with what the target reveals; drafting itself is left to the methods.

    Slot t of the head takes the target's feature of token t and the embedding of token t + 1. With
    the root at position r, the features up to r - 1 are known. `propose` first feeds those that the
    last round has revealed, one to P in the same pass; the last row of that pass predicts the
    feature of the root. Slots of drafted tokens take predicted features and are forgotten after the
    round. Embedding and LM head are the target's.

    `params.drafter` is the weights of `head`.
    """

    head: EagleHead
    target: Llama  # that the head was made for

    num_probes = 0

    @property
    def taps(self) -> Taps:
        return Taps(hidden_layers=(self.target.config.num_hidden_layers,), logits=False)

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """Nodes of the tree, root included."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The longest path, root not counted."""

    @property
    @abstractmethod
    def num_fed(self) -> int:
        """Nodes per round that the head is fed, to draft below them."""

    @abstractmethod
    def propose(
        self, params: Params, state: HeadState, context: Context, draw: Draw
    ) -> tuple[Proposal, HeadState]:
        """Drafts below the root; begins with `catch_up`."""

    def check(self, config: LlamaConfig, params: Any) -> None:
        own = self.head.config.layers
        for name in ("hidden_size", "vocab_size"):
            mine, its = getattr(own, name), getattr(config, name)
            if mine != its:
                raise SpecjaxError(
                    f"the head was made for a target of {name} {mine}, this one has {its}; use a "
                    "head that was trained for this target"
                )
        if self.target.config != config:
            raise SpecjaxError(
                "the drafter was built with another target than the one that it drafts for; build "
                "it with that target"
            )
        wrong = misfits(params, self.head) if isinstance(params, Mapping) else "there are none"
        if wrong:
            raise SpecjaxError(
                f"the params are not the weights of this head ({wrong}); pass those that were "
                "loaded with it"
            )

    def init(
        self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int
    ) -> HeadState:
        assert prefill.hidden is not None
        features = prefill.hidden[:, :, 0]
        batch, width, _ = features.shape
        dtype = params.drafter["fc"]["weight"].dtype
        slots = num_slots + self.num_fed
        cache = KVCache.create(self.head.config.layers, batch, slots, dtype, num_slots)
        behind = prompt.tokens[:, 1:]
        behind = jnp.pad(behind, ((0, 0), (0, width - behind.shape[1])))
        length = prompt.length - 2  # one feature stays pending, so that no round is special
        cache = prefill_head(self.head, params, behind, features, length, cache)
        last = jnp.take_along_axis(features, length[:, None, None], axis=1)
        return HeadState(
            cache=cache,
            pending=jnp.pad(last, ((0, 0), (0, self.max_depth), (0, 0))),
            num_pending=jnp.ones_like(length),
        )

    def update(self, params: Params, state: HeadState, outcome: Outcome) -> HeadState:
        # Committed tokens, not accepted ones: EOS or the room may have cut the path.
        hidden, count = outcome.output.hidden, outcome.context.length - 1 - outcome.root_slot
        assert hidden is not None
        return replace(state, pending=outcome.along_path(hidden[:, :, 0]), num_pending=count)

    def catch_up(
        self, params: Params, state: HeadState, context: Context
    ) -> tuple[Float[Array, "B 1 H"], HeadState]:
        """Feeds the pending features; returns the predicted feature of the root.

        A finished row has none pending: nothing is committed for it, and what it drafts is void.
        """
        cache, count = state.cache, state.num_pending
        at = cache.length[:, None] + 1 + jnp.arange(state.pending.shape[1])[None, :]
        tokens = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
        rows = causal_rows(tokens, cache.length)
        features, cache = self.head.run(params.drafter, params.target, rows, state.pending, cache)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        root = jnp.take_along_axis(features, last, axis=1)
        return root, replace(state, cache=cache.advance(count), num_pending=jnp.zeros_like(count))

    def feed(
        self,
        params: Params,
        cache: KVCache,
        tokens: Int[Array, "B F"],
        features: Float[Array, "B F H"],
        visible: Bool[Array, "B F C"],
        slot: Int[Array, " B"],
    ) -> tuple[Float[Array, "B F H"], KVCache]:
        """Predicts the features of F nodes of one depth from those of their parents.

        `visible` tells which of the C nodes fed so far are a node's ancestors or itself.
        """
        rows = QueryRows(tokens, jnp.broadcast_to(slot[:, None], tokens.shape), visible)
        return self.head.run(params.drafter, params.target, rows, features, cache)


def prefill_head(
    head: EagleHead,
    params: Params,
    tokens: Int[Array, "B W"],
    features: Float[Array, "B W H"],
    length: Int[Array, " B"],
    cache: KVCache,
) -> KVCache:
    """Writes the first `length` slots of each text to an empty cache, in chunks; W is whole chunks.

    `tokens[b, t]` follows the token whose feature is `features[b, t]`.
    """
    chunk = min(PREFILL_CHUNK, tokens.shape[1])

    def write_chunk(index, cache):
        parts = (
            lax.dynamic_slice_in_dim(values, index * chunk, chunk, axis=1)
            for values in (tokens, features)
        )
        part, part_features = parts
        rows = causal_rows(part, cache.length)
        _, cache = head.run(params.drafter, params.target, rows, part_features, cache)
        return cache.advance(jnp.full_like(cache.length, chunk))

    num_chunks = (jnp.max(length) + chunk - 1) // chunk
    cache = lax.fori_loop(0, num_chunks, write_chunk, cache)
    return replace(cache, length=length)
