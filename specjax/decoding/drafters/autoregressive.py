"""Plain decoding: the baseline of every method and every benchmark."""

from dataclasses import dataclass

import jax.numpy as jnp

from specjax.decoding.drafter import Context, Drafter, Params, Proposal, State
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import chain
from specjax.models.target import Target


@dataclass(frozen=True)
class Autoregressive(Drafter):
    """Proposes the root alone."""

    num_nodes = 1

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        root = context.root
        nothing = jnp.zeros((root.shape[0], 0), root.dtype)
        return Proposal(chain(root, nothing, jnp.zeros_like(root))), state
