"""Grows the best static tree of a head from the accuracy of each rank at each depth.

Medusa's sparse tree (Cai et al. 2024, section 2.3.3). If depths are right independently of each
other, a path is accepted with the product of its accuracies, and the expected accepted length is
the sum over all nodes. So the best tree is the one with the highest products.

The accuracies are measured on the target's answers, with teacher forcing: at every position that
may precede a root, the head predicts the tokens at the depths below.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.bench.measure import with_progress
from specjax.core.errors import SpecjaxError
from specjax.decoding.prompt import from_ids
from specjax.models.target import Target
from specjax.training.blocks import map_slots
from specjax.training.objectives.base import later, target_features
from specjax.tuning.induction_heads import answers
from specjax.tuning.runs import Workload

Choices = tuple[tuple[int, ...], ...]

NUM_RANKS = 10  # that a tree is grown from, as Medusa's published one
BUCKET = 256  # texts share the program of the next multiple


def tune_tree(
    workload: Workload,
    head: Any,
    params: Any,
    published: Choices,
    num_choices: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Choices:
    """Returns the best tree of a head on the target's answers.

    Args:
        workload: target and prompts.
        head: as in `answer_ranks`.
        params: the head's.
        published: the tree to compare with.
        num_choices: nodes below the root; by default as many as the published tree has.
        report: called with each line of the results.
    """
    target = workload.target
    texts = with_progress(answers(workload), "Ranking the target's answers", len(workload.prompts))
    ranks = answer_ranks(texts, head, params, target.model, target.params)
    if not (ranks >= 0).any():
        raise SpecjaxError(
            "the target's answers to these prompts are too short; give other --tasks"
        )
    published = tuple(choice for choice in published if len(choice) <= ranks.shape[1])
    accuracies = rank_accuracies(ranks, min(NUM_RANKS, target.config.vocab_size))
    choices = greedy_tree(accuracies, num_choices or len(published))
    report(f"share of correct tokens over {len(ranks)} positions")
    for depth, (first, *others) in enumerate(accuracies.tolist(), 1):
        report(f"  at depth {depth}: {first:.3f} by the first choice, {sum(others):.3f} by others")
    for name, tree in (("published", published), ("new", choices)):
        expected = expected_length(tree, accuracies)
        report(f"{name} tree of {len(tree)} nodes: {expected:.2f} tokens per round expected")
    return choices


def greedy_tree(accuracies: Float[np.ndarray, "D R"], num_choices: int) -> Choices:
    """Returns the tree of `num_choices` nodes, root not counted, in the order they were taken.

    Starting with (0,), it takes the neighbour (next sibling or first child of a taken node) with
    the highest product; among equals the shallower, then the smaller. No tree of that size is
    better if accuracies never rise with the rank. There are fewer choices if D and R allow no more.

    Args:
        accuracies: P(the correct token has rank r at depth d), ranks counted from 0.
        num_choices: nodes below the root.
    """
    depths, ranks = accuracies.shape
    choices: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...], float]] = []  # the last: product above it

    def offer(choice: tuple[int, ...], above: float) -> None:
        if len(choice) <= depths and choice[-1] < ranks:
            product = above * float(accuracies[len(choice) - 1, choice[-1]])
            heappush(waiting, (-product, len(choice), choice, above))

    offer((0,), 1.0)
    while waiting and len(choices) < num_choices:
        product, _, choice, above = heappop(waiting)
        choices.append(choice)
        offer((*choice[:-1], choice[-1] + 1), above)
        offer((*choice, 0), -product)
    return tuple(choices)


def expected_length(choices: Choices, accuracies: Float[np.ndarray, "D R"]) -> float:
    """Returns the accepted length of a tree whose depths are right independently.

    Choices beyond D or R count as misses.
    """
    padded = np.pad(accuracies, ((0, max(map(len, choices))), (0, 1 + max(map(max, choices)))))
    path = lambda choice: [padded[depth, rank] for depth, rank in enumerate(choice)]  # noqa: E731
    return 1 + sum(float(np.prod(path(choice))) for choice in set(choices))


def rank_accuracies(ranks: Int[np.ndarray, "T D"], num_ranks: int) -> Float[np.ndarray, "D R"]:
    """Returns the share of positions where the correct token had each rank, at each depth.

    Args:
        ranks: of the correct token at T positions, counted from 0; -1 beyond the end of the text.
        num_ranks: R; lower ranks count as misses.
    """
    counted = np.maximum(np.sum(ranks >= 0, axis=0), 1)
    hits = ranks[:, :, None] == np.arange(num_ranks)
    return np.sum(hits, axis=0) / counted[:, None]


# ---- The ranks of a target's answers ------------------------------------------------------------


def answer_ranks(
    texts: Iterable[tuple[Sequence[int], int]],
    head: Any,
    params: Any,
    target: Target,
    target_params: Any,
) -> Int[np.ndarray, "N D"]:
    """Returns the rank, from 0, of each token of the answers at every depth; -1 beyond the end.

    Args:
        texts: pairs of tokens (prompt and answer) and the prompt's length.
        head: it has a method `teacher_forced`, as `MedusaHeads` does.
        params: the head's.
        target: the model the head was trained for.
        target_params: the target's.
    """
    parts = []
    for text, prompt_length in texts:
        tokens = from_ids([text], BUCKET).tokens
        ranks = np.asarray(_ranks(params, target_params, tokens, head, target))
        # Slot t stands for a root at t + 1; the first root is the last token of the prompt.
        slots = np.arange(prompt_length - 2, len(text) - 2)
        depths = 1 + np.arange(ranks.shape[1])
        is_there = slots[:, None] + 1 + depths[None, :] < len(text)
        parts.append(np.where(is_there, ranks[slots], -1))
    return np.concatenate(parts)


@partial(jax.jit, static_argnames=("head", "target"))
def _ranks(
    params: Any, target_params: Any, tokens: Int[Array, "1 T"], head: Any, target: Target
) -> Int[Array, "T D"]:
    positions = jnp.arange(tokens.shape[1])[None]
    features = target_features(target, target_params, tokens, positions, jnp.zeros_like(tokens))
    columns = []
    depths = head.teacher_forced(params, target, target_params, tokens, features)
    for depth, (read, logits_of) in enumerate(depths, 1):
        values = map_slots(
            lambda arrays, logits_of=logits_of: {"rank": rank_of(logits_of(arrays[0]), arrays[1])},
            (read, later(tokens, 1 + depth)),
        )
        columns.append(values["rank"][0])
    return jnp.stack(columns, axis=1)


def rank_of(logits: Float[Array, "B T V"], tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the number of tokens before this one in the order of `lax.top_k`."""
    score = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    is_earlier = jnp.arange(logits.shape[-1])[None, None, :] < tokens[..., None]
    return jnp.sum((logits > score) | ((logits == score) & is_earlier), axis=-1, dtype=jnp.int32)
