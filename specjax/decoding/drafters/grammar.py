"""Grammar: drafts the tokens that the grammar of the text nearly forces."""

from dataclasses import dataclass

import jax.numpy as jnp

from specjax.decoding.automaton import FREE, Grammar
from specjax.decoding.drafter import ChainDrafter, Context, Params, Proposal, State
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import chain
from specjax.models.target import Target


@dataclass(frozen=True)
class GrammarDrafter(ChainDrafter):
    """Drafts a chain of the tokens that the automaton of the grammar considers likely.

    These are the only tokens allowed, and those that spell names, quotes and punctuation up to the
    next value. Without a grammar nothing is drafted.
    """

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        drafted = jnp.full((*context.length.shape, self.num_tokens), FREE, jnp.int32)
        controls = draw.controls
        if controls is not None and Grammar() in controls.processors:
            place = controls.processors.index(Grammar())
            automaton, at = controls.params[place], controls.states[place]
            for number in range(self.num_tokens):
                token = automaton.likely_after(at)
                drafted = drafted.at[:, number].set(token)
                at = automaton.after(at, jnp.maximum(token, 0))
        count = jnp.sum(jnp.cumprod(drafted != FREE, axis=1), axis=1, dtype=jnp.int32)
        return Proposal(chain(context.root, jnp.maximum(drafted, 0), count)), state
