"""REST: drafts a tree of continuations from a datastore."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from specjax.core.errors import SpecjaxError
from specjax.core.settings import check_at_most, setting
from specjax.decoding.drafter import Context, Drafter, Params, Proposal, State
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import NO_PARENT, DraftTree
from specjax.models.target import Target

SORTED_TOKENS = 32  # the datastore sorts suffixes by this many tokens
MAX_QUERY = 30  # tokens; with the next one, each needs a bit of an int32 in `_bounds`
MAX_MATCHES = 2**15  # so that its square is an int32


@dataclass(frozen=True)
class Retrieval(Drafter):
    """REST (He et al. 2023, "REST: Retrieval-Based Speculative Decoding"): no weights, no taps.

    `params.drafter` is a datastore: `tokens`, documents with a negative separator after each, and
    `suffixes`, the sorted start positions of their suffixes. The longest suffix of the text in the
    datastore, of `longest_query` to `shortest_query` tokens, is looked up; its continuations, of up
    to `num_tokens`, are counted, and the `max_drafted` most frequent prefixes become the tree. Ties
    go to the shallower, then to smaller tokens.

    It differs from the published code, which:

    - joins documents without separators, so drafts run from one into the next;
    - stores ids as 16 bits, which many vocabularies exceed;
    - counts the first 5000 matches, which continue with the smallest ids; here `max_matches` are
      taken evenly from all;
    - breaks ties by the order of a hash map, and limits the tree's depth by a sum over all prefixes
      before its 64 nodes are used; here the limit counts nodes;
    - drafts token 100 without a match; here nothing;
    - searches on one CPU thread; here the search is part of the compiled round.
    """

    longest_query: int = setting(16, at_least=1, at_most=MAX_QUERY)
    """Longest suffix of the text to look up, in tokens."""
    shortest_query: int = setting(2, at_least=1)
    """Shortest suffix of the text to look up; no longer than longest_query."""
    num_tokens: int = setting(10, at_least=1)
    """Maximum number of tokens of a continuation."""
    max_drafted: int = setting(64, at_least=1)
    """Nodes of the tree without the root."""
    max_matches: int = setting(1000, at_least=1, at_most=MAX_MATCHES)
    """Positions in the datastore whose continuations are counted."""

    def check_settings(self) -> None:
        longest = self.longest_query
        check_at_most("shortest_query", self.shortest_query, "longest_query", longest)
        limit_name, limit = f"{SORTED_TOKENS} minus longest_query", SORTED_TOKENS - longest
        check_at_most("num_tokens", self.num_tokens, limit_name, limit)

    @property
    def num_nodes(self) -> int:
        return 1 + min(self.max_drafted, self.max_matches * self.num_tokens)

    @property
    def max_depth(self) -> int:
        return self.num_tokens

    def check(self, target: Target, params: Any) -> None:
        is_fit = isinstance(params, dict) and sorted(params) == ["suffixes", "tokens"]
        if not is_fit or not all(map(_are_ids, params.values())):
            raise SpecjaxError(
                "REST needs the params of a datastore; build one with `specjax datastore build` "
                "and pass specjax.data.datastore.params(datastore)"
            )
        tokens, suffixes = params["tokens"], params["suffixes"]
        if isinstance(tokens, Tracer) or isinstance(suffixes, Tracer):
            return
        with jax.ensure_compile_time_eval():  # they may be constants of an outer program
            largest = int(tokens[suffixes[-1]])  # suffixes are sorted
        if largest >= target.config.vocab_size:
            raise SpecjaxError(
                f"the datastore holds token id {largest}, outside the target's vocabulary of "
                f"{target.config.vocab_size}; build one with this target: `specjax datastore build`"
            )

    def propose(
        self, target: Target, params: Params, state: State, context: Context, draw: Draw
    ) -> tuple[Proposal, State]:
        def draft(text, length):
            return self._most_frequent(*self._retrieve(params.drafter, text, length))

        tokens, parents, depth, valid = jax.vmap(draft)(context.tokens, context.length)
        tree = DraftTree(
            tokens=jnp.concatenate([context.root[:, None], tokens], axis=1),
            parents=jnp.pad(parents, ((0, 0), (1, 0)), constant_values=NO_PARENT),
            depth=jnp.pad(depth, ((0, 0), (1, 0))),
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
        )
        return Proposal(tree), state

    def _retrieve(
        self, datastore: dict[str, Array], text: Int[Array, " S"], length: Int[Array, ""]
    ) -> tuple[Int[Array, "D M"], Int[Array, ""]]:
        """Returns the sorted continuations of the longest match, as columns, and their number."""
        sizes = jnp.arange(self.shortest_query, self.longest_query + 1)
        steps = jnp.arange(self.longest_query + 1)
        at = (length - sizes)[:, None] + steps[None, :]
        queries = jnp.take(text, at, mode="clip")
        queries = jnp.where(steps[None, :] < sizes[:, None], queries, 0)
        first, end = _bounds(datastore["tokens"], datastore["suffixes"], queries, sizes)
        is_hit = (first < end) & (sizes <= length)
        longest = jnp.max(jnp.where(is_hit, jnp.arange(len(sizes)), 0))
        num_matches = jnp.where(is_hit[longest], end[longest] - first[longest], 0)

        count = jnp.minimum(num_matches, self.max_matches)
        stride, rest = jnp.divmod(num_matches, jnp.maximum(count, 1))
        number = jnp.arange(self.max_matches)
        # This equals number * num_matches // count, which might exceed an int32.
        match = first[longest] + number * stride + number * rest // jnp.maximum(count, 1)
        starts = jnp.take(datastore["suffixes"], match, mode="clip") + sizes[longest]
        at = starts[None, :] + jnp.arange(self.num_tokens)[:, None]
        return jnp.take(datastore["tokens"], at, mode="clip"), count

    def _most_frequent(
        self, continuations: Int[Array, "D M"], count: Int[Array, ""]
    ) -> tuple[Int[Array, " K"], Int[Array, " K"], Int[Array, " K"], Bool[Array, " K"]]:
        """Returns tokens, parents, depth and validity of the nodes below the root.

        These are the most frequent prefixes of the first `count` continuations, in that order.
        """
        deepest, width = continuations.shape
        frequency = _frequencies(continuations, count)
        # A prefix ranks before its extensions, however top_k breaks ties. float32 is the only type
        # with a fast top_k on CPU.
        rank = jnp.maximum(frequency * deepest - jnp.arange(deepest)[:, None], 0)
        best, chosen = lax.top_k(rank.reshape(-1).astype(jnp.float32), self.num_nodes - 1)
        level, first = jnp.divmod(chosen, width)
        end = first + frequency[level, first]
        is_parent = (
            (level[None, :] == level[:, None] - 1)
            & (first[None, :] <= first[:, None])
            & (first[:, None] < end[None, :])
        )
        parents = jnp.where(level > 0, jnp.argmax(is_parent, axis=1) + 1, 0)
        valid = best > 0
        nodes = (continuations[level, first], parents, level + 1)
        tokens, parents, depth = (jnp.where(valid, values, 0) for values in nodes)
        return tokens, parents, depth, valid


def _are_ids(array: Any) -> bool:
    return getattr(array, "dtype", None) == jnp.int32 and array.ndim == 1 and array.size > 0


def _bounds(
    tokens: Int[Array, " T"],
    suffixes: Int[Array, " M"],
    queries: Int[Array, "Q W"],
    sizes: Int[Array, " Q"],
) -> tuple[Int[Array, " Q"], Int[Array, " Q"]]:
    """Finds the range of suffixes that start with each query, by binary search.

    Query q has `sizes[q]` tokens, followed by a 0. Separators are negative, so the suffix that ends
    with the query sorts before the query and a 0, where the range begins.
    """
    width = queries.shape[1]
    steps = jnp.arange(width)
    used = jnp.stack([sizes + 1, sizes])[..., None] > steps[None, None, :]
    weights = jnp.where(used, 2 ** (width - 1 - steps)[None, None, :], 0)
    threshold = jnp.array([0, 1])[:, None]  # suffixes that compare below it are before the bound

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        starts = jnp.take(suffixes, middle, mode="clip")
        window = jnp.take(tokens, starts[..., None] + steps[None, None, :], mode="clip")
        # The sign of the first difference: its weight exceeds those of all later ones together.
        order = jnp.sum(jnp.sign(window - queries[None]) * weights, axis=-1)
        is_below = (order < threshold) & (low < high)
        return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

    low = jnp.zeros(used.shape[:2], jnp.int32)
    rounds = suffixes.shape[0].bit_length()
    first, end = lax.fori_loop(0, rounds, halve, (low, low + suffixes.shape[0]))[0]
    return first, end


def _frequencies(continuations: Int[Array, "D M"], count: Int[Array, ""]) -> Int[Array, "D M"]:
    """Returns how many of the first `count` continuations share the first d + 1 tokens of m.

    Only the first of those that share them has an entry [d, m], and only up to a separator; others
    are 0. Continuations are sorted, so those that share a prefix are adjacent.
    """
    number = jnp.arange(continuations.shape[1])[None, :]
    before = jnp.pad(continuations[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    is_used = _all_so_far(continuations >= 0) & (number < count)
    is_first = ~_all_so_far(continuations == before) | (number >= count)
    next_first = lax.cummin(jnp.where(is_first, number, number.shape[1]), axis=1, reverse=True)
    next_first = jnp.pad(next_first[:, 1:], ((0, 0), (0, 1)), constant_values=number.shape[1])
    return jnp.where(is_first & is_used, next_first - number, 0)


def _all_so_far(holds: Bool[Array, "D M"]) -> Bool[Array, "D M"]:
    return jnp.cumprod(holds, axis=0).astype(bool)
