"""`specjax tune tree`: the static tree of a head."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specjax.bench.measure import Request
from specjax.bench.progress import watched
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafters.hydra import Hydra
from specjax.decoding.drafters.medusa import Medusa
from specjax.decoding.drafters.parallel_spec import ParallelSpec
from specjax.hub import LoadedTarget
from specjax.loading import TUNED_HEAD, load_drafter
from specjax.methods import METHODS
from specjax.models.fingerprint import params_fingerprint
from specjax.tuning.head_ranks import NUM_RANKS, answer_ranks
from specjax.tuning.induction_heads import answers
from specjax.tuning.tree import expected_length, greedy_tree, rank_accuracies

if TYPE_CHECKING:
    from specjax.cli.tune import Tune


def tune_tree(options: "Tune", target: LoadedTarget, requests: Sequence[Request]) -> dict[str, Any]:
    """The best tree of the head of `options.method`, and which head it is for.

    Raises:
        SpecjaxError: for a head that is missing or does not fit, or if the target says nothing.
    """
    published = METHODS[options.method].drafter().choices
    drafter, params = load_drafter(options.method, target, options.source, choices=published)
    assert isinstance(drafter, Medusa | Hydra | ParallelSpec)
    texts = answers(target, requests, options.max_new_tokens)
    texts = watched(texts, "Ranking what the target says", len(requests))
    ranks = answer_ranks(texts, drafter.head, params, target.model, target.params)
    if not (ranks >= 0).any():
        raise SpecjaxError("the target says too little on these prompts; give other --tasks")
    published = tuple(choice for choice in published if len(choice) <= ranks.shape[1])
    accuracies = rank_accuracies(ranks, min(NUM_RANKS, target.config.vocab_size))
    choices = greedy_tree(accuracies, options.num_choices or len(published))
    print(f"{options.method}: over {len(ranks)} places, right at depth")
    for depth, (first, *others) in enumerate(accuracies.tolist(), 1):
        print(f"  {depth}: {first:.3f} with the first token, {sum(others):.3f} with the next")
    for name, tree in (("published", published), ("found", choices)):
        expected = expected_length(tree, accuracies)
        print(f"{name} tree of {len(tree)} nodes: {expected:.2f} tokens per round expected")
    return {"choices": choices, TUNED_HEAD: params_fingerprint(params)}
