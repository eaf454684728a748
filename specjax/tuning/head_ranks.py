"""How well a head ranks what a target says, depth by depth: what its tree is grown from.

The target's own answers are read once more, as in training. At every place that may be the last
before a root the head says its tokens for the depths below, and the rank of the answer's own token
there is told. Heads that read drafted tokens (Hydra's) get those of the answer, as on the path that
is accepted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.decoding.prompt import from_ids
from specjax.models.heads.eagle import Stream
from specjax.models.heads.hydra import HydraHeads
from specjax.models.heads.medusa import MedusaHeads
from specjax.models.heads.parallel import ParallelHead
from specjax.models.target import Target
from specjax.training.features import target_features
from specjax.training.objectives.hydra import prefixed
from specjax.training.objectives.slots import later, over_slots

NUM_RANKS = 10  # that a tree is grown from, as Medusa's published one
BUCKET = 256  # texts share the program of the next multiple

# For each depth, from 1: what is read at every slot, and how logits come of it.
Depths = Iterator[tuple[Any, Callable[[Any], Float[Array, "1 T V"]]]]


def answer_ranks(
    texts: Iterable[tuple[Sequence[int], int]],
    head: MedusaHeads | HydraHeads | ParallelHead,
    params: Any,
    target: Target,
    target_params: Any,
) -> Int[np.ndarray, "N D"]:
    """The rank, from 0, of each token of the answers at every depth; -1 beyond an answer's end.

    Args:
        texts: pairs of tokens (prompt and answer) and the prompt's length.
        head: whose ranks are wanted.
        params: the head's.
        target: that it was trained for.
        target_params: the target's.
    """
    found = []
    for text, prompt_length in texts:
        tokens = from_ids([text], BUCKET).tokens
        ranks = np.asarray(_ranks(params, target_params, tokens, head, target))
        # Slot t stands for a root at t + 1; the first root is the last token of the prompt.
        slots = np.arange(prompt_length - 2, len(text) - 2)
        depths = 1 + np.arange(ranks.shape[1])
        is_there = slots[:, None] + 1 + depths[None, :] < len(text)
        found.append(np.where(is_there, ranks[slots], -1))
    return np.concatenate(found)


@partial(jax.jit, static_argnames=("head", "target"))
def _ranks(
    params: Any, frozen: Any, tokens: Int[Array, "1 T"], head: Any, target: Target
) -> Int[Array, "T D"]:
    features = target_features(target, frozen, tokens, *_one_text(tokens))
    columns = []
    for depth, (read, logits_of) in enumerate(
        _depths(head, params, target, frozen, tokens, features), 1
    ):
        values = over_slots(
            lambda arrays, logits_of=logits_of: {"rank": rank_of(logits_of(arrays[0]), arrays[1])},
            (read, later(tokens, 1 + depth)),
            recompute=True,  # so that the logits of a whole text are never there
        )
        columns.append(values["rank"][0])
    return jnp.stack(columns, axis=1)


def rank_of(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """How many tokens stand before this one in the order of `lax.top_k`."""
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    is_earlier = jnp.arange(logits.shape[-1])[None, None, :] < tokens[..., None]
    return jnp.sum((logits > own) | ((logits == own) & is_earlier), axis=-1, dtype=jnp.int32)


def _depths(
    head: Any,
    params: Any,
    target: Target,
    frozen: Any,
    tokens: Int[Array, "1 T"],
    features: Float[Array, "1 T D"],
) -> Depths:
    if isinstance(head, MedusaHeads):
        for depth in range(1, head.config.num_heads + 1):
            yield features, partial(head.logits_at, params, target, frozen, depth=depth)
    elif isinstance(head, HydraHeads):
        seen = prefixed(head, params, features, tokens, *_one_text(tokens))
        for depth in range(1, head.config.num_heads + 1):
            behind = [later(tokens, ahead) for ahead in range(1, depth + 1)]
            embedded = jnp.stack([target.embed(frozen, each) for each in behind], axis=2)
            yield (
                (seen, embedded),
                lambda read, depth=depth: head.logits(params, target, frozen, depth, *read),
            )
    else:
        embedded, streams = target.embed(frozen, later(tokens)), ()
        read = features if head.config.reads_features else features[..., :0]
        for _ in range(head.config.num_depths):
            predicted, own = head.step(params, embedded, read, streams, *_one_text(tokens))
            streams: tuple[Stream, ...] = (*streams, own)
            yield predicted, partial(target.logits, frozen)


def _one_text(tokens: Int[Array, "1 T"]) -> tuple[Int[Array, "1 T"], Int[Array, "1 T"]]:
    """Positions and segments; the filling behind the text is seen by nothing in it."""
    return jnp.arange(tokens.shape[1])[None, :], jnp.zeros_like(tokens)
