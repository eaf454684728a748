"""Accepted length by construction: a drafter does all its work, and its tokens are then replaced.

So one reads off how fast a method would be at an accepted length that another drafter, or a paper,
has reached; random weights do.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from specjax import Drafter, Params, SpecjaxError, Target
from specjax.core.pytree import pytree
from specjax.decoding import Context, DraftTree, Draw, Outcome, Proposal, Start
from specjax.decoding.drafter import State

CYCLE_ROUNDS = 100  # rounds after which a script starts over: means to a hundredth


@pytree
class ScriptedState:
    """The state from round to round."""

    inner: State
    round: Int[Array, ""]
    prompt_length: Int[Array, " B"]


@dataclass(frozen=True)
class Scripted(Drafter):
    """Lets `inner` draft and learn, and replaces its tokens so that a script of them is accepted.

    `params.drafter` is a script from `script_of`. The last nodes of a tree are rearranged to one
    path from the root, as deep as trees of `inner` can be; a chain is such a path. In round r its
    first `pattern[r]` tokens are those that the target will generate, as `text` has them, valid or
    not, and no other node carries the target's token in its place. All other tokens stay those of
    `inner`, so that none of its work is optimised away.

    The target still decides what is accepted. But only the cost is that of `inner`, not the
    quality: a drafter that caches what it has drafted does not see the change. Only for `coupled`
    verification, as tokens no longer follow the distribution that they were drawn from.
    """

    inner: Drafter

    def __post_init__(self):
        for name in ("num_nodes", "num_probes", "taps", "pass_widths"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def max_depth(self) -> int:
        return self.inner.max_depth

    def check(self, target: Target, params: Any) -> None:
        if not isinstance(params, dict) or set(params) != {"inner", "text", "pattern"}:
            raise SpecjaxError("Scripted needs a script as params; make one with script_of")
        self.inner.check(target, params["inner"])

    def init(self, start: Start) -> ScriptedState:
        inner = self.inner.init(start._replace(params=_of_inner(start.params)))
        return ScriptedState(inner, jnp.zeros((), jnp.int32), start.prompt.length)

    def propose(
        self, target: Target, params: Params, state: ScriptedState, context: Context, draw: Draw
    ) -> tuple[Proposal, ScriptedState]:
        if draw.sampling.verification != "coupled":
            raise SpecjaxError("a script is for coupled verification; leave verification out")
        proposal, inner = self.inner.propose(target, _of_inner(params), state.inner, context, draw)
        pattern = params.drafter["pattern"]
        num_right = pattern[state.round % len(pattern)]
        num_new = context.length - state.prompt_length
        text = params.drafter["text"]
        tree = _scripted(proposal.tree, text, num_new, num_right, self.max_depth)
        return proposal._replace(tree=tree), replace(state, inner=inner)

    def update(
        self, target: Target, params: Params, state: ScriptedState, outcome: Outcome
    ) -> ScriptedState:
        inner = self.inner.update(target, _of_inner(params), state.inner, outcome)
        return replace(state, inner=inner, round=state.round + 1)


def script_of(
    inner: Drafter, params: Any, text: Int[Array, "B M"], accepted_length: float
) -> dict[str, Any]:
    """Makes the params of a `Scripted(inner)`.

    `text` is the target's text after each prompt, from the first new token on.
    """
    if not 1 <= accepted_length <= inner.max_depth + 1:
        raise SpecjaxError(
            f"accepted length {accepted_length} is outside 1 to {inner.max_depth + 1}, the drafter "
            "cannot reach it; ask for another, or draft deeper"
        )
    return {"inner": params, "text": text, "pattern": jnp.asarray(pattern_of(accepted_length))}


def pattern_of(accepted_length: float) -> np.ndarray:
    """Returns how many drafted tokens each of `CYCLE_ROUNDS` rounds accepts, spread evenly.

    int32; with the bonus, their mean is `accepted_length` to the hundredth.
    """
    so_far = np.arange(CYCLE_ROUNDS + 1) * (accepted_length - 1)
    return np.diff(np.floor(so_far + 0.5)).astype(np.int32)


def _of_inner(params: Params) -> Params:
    return Params(params.target, params.drafter["inner"])


def _scripted(
    tree: DraftTree,
    text: Int[Array, "B M"],
    num_new: Int[Array, " B"],
    num_right: Int[Array, ""],
    max_depth: int,
) -> DraftTree:
    """Makes the first `num_right` nodes of one path right and all others wrong.

    `num_new` tokens of `text` are committed.
    """
    tree, on_path = _with_path(tree, max_depth)
    place = num_new[:, None] + tree.depth - 1  # in `text`
    is_known = (tree.depth > 0) & (place < text.shape[1])
    right = jnp.take_along_axis(text, jnp.clip(place, 0, text.shape[1] - 1), axis=1)
    is_right = is_known & on_path & (tree.depth <= num_right)
    other = jnp.where(right > 0, right - 1, 1)
    wrong = jnp.where(is_known & (tree.tokens == right), other, tree.tokens)
    tokens = jnp.where(is_right, right, wrong)
    return replace(tree, tokens=tokens, valid=tree.valid | is_right, draft_probs=None)


def _with_path(tree: DraftTree, length: int) -> tuple[DraftTree, Bool[Array, "B N"]]:
    """Rearranges `length` nodes to a path below the root, and returns which nodes those are.

    They are the last valid ones, as what is below them is among them. Where fewer are valid, others
    follow.
    """
    if tree.is_chain:
        return tree, tree.depth > 0
    numbers = jnp.arange(tree.num_nodes)[None, :]
    first = jnp.clip(tree.num_valid() - length, 1, tree.num_nodes - length)[:, None]
    on_path = (numbers >= first) & (numbers < first + length)
    above = jnp.where(numbers == first, 0, numbers - 1)
    return replace(
        tree,
        parents=jnp.where(on_path, above, tree.parents),
        depth=jnp.where(on_path, numbers - first + 1, tree.depth),
    ), on_path
