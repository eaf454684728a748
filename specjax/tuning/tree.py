"""Which tree serves a head best, from how often each rank at each depth is right.

Medusa's sparse tree (Cai et al. 2024, section 2.3.3). With depths that are right independently of
each other, a path is accepted with the product of its accuracies, and the expected accepted length
is the sum over all nodes. So the best tree is the one with the highest products.
"""

from heapq import heappop, heappush

import numpy as np
from jaxtyping import Float, Int

from specjax.core.errors import SpecjaxError

Choices = tuple[tuple[int, ...], ...]


def greedy_tree(accuracies: Float[np.ndarray, "D R"], num_choices: int) -> Choices:
    """The tree of `num_choices` nodes, root not counted, in the order in which they were taken.

    From (0,) on, the neighbour (next sibling or first child of what is there) with the highest
    product is taken; of equals the shallower, then the smaller. No tree of that size is better, if
    accuracies never rise with the rank. There are fewer choices where D and R allow no more.

    Args:
        accuracies: P(the wanted token has rank r at depth d), ranks counted from 0.
        num_choices: nodes below the root.

    Raises:
        SpecjaxError: for no choices, accuracies of no rank, or any outside [0, 1].
    """
    depths, ranks = accuracies.shape
    if num_choices < 1 or not accuracies.size:
        raise SpecjaxError(
            f"a tree of {num_choices} choices over {depths} depths and {ranks} ranks is empty; ask "
            "for at least 1 of each"
        )
    if not np.all((accuracies >= 0) & (accuracies <= 1)):
        raise SpecjaxError("an accuracy lies outside [0, 1]; give shares, not percent or counts")
    taken: list[tuple[int, ...]] = []
    waiting: list[tuple[float, int, tuple[int, ...], float]] = []  # the last: product above it

    def offer(choice: tuple[int, ...], above: float) -> None:
        if len(choice) <= depths and choice[-1] < ranks:
            product = above * float(accuracies[len(choice) - 1, choice[-1]])
            heappush(waiting, (-product, len(choice), choice, above))

    offer((0,), 1.0)
    while waiting and len(taken) < num_choices:
        product, _, choice, above = heappop(waiting)
        taken.append(choice)
        offer((*choice[:-1], choice[-1] + 1), above)
        offer((*choice, 0), -product)
    return tuple(taken)


def expected_length(choices: Choices, accuracies: Float[np.ndarray, "D R"]) -> float:
    """The accepted length, bonus included, of a tree whose depths are right independently.

    Choices beyond D or R are taken for misses.
    """
    known = np.pad(accuracies, ((0, max(map(len, choices))), (0, 1 + max(map(max, choices)))))
    path = lambda choice: [known[depth, rank] for depth, rank in enumerate(choice)]  # noqa: E731
    return 1 + sum(float(np.prod(path(choice))) for choice in set(choices))


def rank_accuracies(ranks: Int[np.ndarray, "T D"], num_ranks: int) -> Float[np.ndarray, "D R"]:
    """The share of places where the wanted token had rank 0, 1, ... R - 1 at each depth.

    Args:
        ranks: of the wanted token at T places of a text, counted from 0; -1 where none is wanted.
        num_ranks: R; what ranks lower counts as a miss.
    """
    counted = np.maximum(np.sum(ranks >= 0, axis=0), 1)
    hits = ranks[:, :, None] == np.arange(num_ranks)
    return np.sum(hits, axis=0) / counted[:, None]
