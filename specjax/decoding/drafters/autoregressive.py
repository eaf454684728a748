"""Plain decoding: no draft, one token per target pass. The baseline that all others must beat."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from specjax.decoding.drafter import Context, Outcome, Params, Proposal, State, refuse_params
from specjax.decoding.prompt import Prompt
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import chain
from specjax.models.config import TransformerConfig
from specjax.models.target import ModelOutput, Taps


@dataclass(frozen=True)
class Autoregressive:
    """Proposes the root alone, through the same loop as every other method."""

    @property
    def taps(self) -> Taps:
        return Taps(logits=False)

    num_nodes = 1
    num_probes = 0
    max_depth = 0

    def check(self, config: TransformerConfig, params: Any) -> None:
        refuse_params("Autoregressive", params)

    def init(self, params: Params, prompt: Prompt, prefill: ModelOutput, num_slots: int) -> State:
        return None

    def propose(
        self, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        root = context.root
        nothing = jnp.zeros((root.shape[0], 0), root.dtype)
        return Proposal(chain(root, nothing, jnp.zeros_like(root))), state

    def update(self, params: Params, state: State, outcome: Outcome) -> State:
        return state
