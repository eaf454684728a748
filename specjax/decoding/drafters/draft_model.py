"""Speculative sampling: a small model drafts token by token."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax.core.errors import SpecjaxError, errors_at
from specjax.core.pytree import pytree, static
from specjax.core.ranking import best_token
from specjax.core.settings import setting
from specjax.decoding.drafter import Context, Drafter, Outcome, Params, Proposal, Start, State
from specjax.decoding.drafters import length_rules
from specjax.decoding.drafters.length_rules import LastDrafted, LengthRule
from specjax.decoding.sampling import Draw
from specjax.decoding.tree import chain
from specjax.models.cache import KVCache
from specjax.models.heads.length_classifier import PositionKind
from specjax.models.prefill import prefill
from specjax.models.target import Taps, Target, causal_rows

RULES = ("fixed", "heuristic", "confidence", "disco")


@pytree
class SharedVocabulary:
    """The tokens that a draft with another tokenizer shares with the target."""

    readable: Int[Array, " V"]  # the draft's token that it reads for each of the target's
    target_ids: Int[Array, " R"]  # of the shared tokens, ascending
    draft_ids: Int[Array, " R"]


@pytree
class DraftState:
    """The draft's cache, the rule's state, and what was drafted last."""

    cache: KVCache  # of the draft: the text without its last `max_missing` tokens at most
    rule: State
    prompt_length: Int[Array, " B"]
    is_finished: Bool[Array, " B"]  # nothing was committed last time, and nothing will be
    tokens: Int[Array, "B D"]  # drafted last, each by a pass
    num_drafted: Int[Array, " B"]
    max_missing: int = static()  # tokens, root included, that the draft may not have read


@pytree
class Draft:
    """A growing chain. D: its maximum length; N = D + 1."""

    cache: KVCache
    tokens: Int[Array, "B D"]
    draft_probs: Float[Array, "B N V"] | None  # distributions, if verification needs them
    length: Int[Array, " B"]
    goes_on: Bool[Array, " B"]
    num_passes: Int[Array, ""]


@dataclass(frozen=True)
class DraftModel(Drafter):
    """Speculative sampling (SpS): a chain drafted by `draft`; `rule` decides its length.

    Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Chen et al.
    2023, "Accelerating Large Language Model Decoding with Speculative Sampling".

    `params.drafter` is `{"draft": weights, "rule": the rule's params or None}`. Tokens are drawn
    from the draft's distribution after the target's temperature and filters, or, unless `is_drawn`,
    the most likely is taken. Under `coupled` verification they are drawn with the noise that the
    target will use at the same position; under `rejection` with separate noise, and the tree
    carries the distribution.

    The loop runs one pass of the draft per token and ends when the rule has stopped all sequences;
    stopped ones do not change. The draft's cache is cut to the committed text by setting its
    length. After a fully accepted draft it also lacks the last drafted token, which the first pass
    of the next round feeds with the root: that pass has up to 2 tokens, in a hybrid as many as a
    round may commit.

    If the vocabularies are padded to different sizes, tokens of both are drafted, and the draft
    reads its last token in place of tokens that it lacks. A draft with another tokenizer has a
    `SharedVocabulary` in `params.drafter["vocabulary"]`: it drafts shared tokens, and reads one of
    its tokens for each of the target's.

    Differences from the published code: each sequence of a batch has its own draft length and
    accepted length; `coupled` drafts, see above; beyond the draft's last position (`longest_text`)
    texts continue without drafts. A drafter does not know EOS and `max_new_tokens`, so it drafts
    beyond them once per sequence.
    """

    draft: Target
    rule: str | LengthRule = setting("fixed", choices=RULES)  # noqa: RUF009 - not mutable
    """When to stop drafting: a name, or a `LengthRule`."""
    length: int = setting(5, at_least=1)
    """Tokens per draft for fixed, the initial number for heuristic; at most max_length."""
    threshold: float | None = setting(None, above=0, below=1)
    """Threshold of confidence or disco; by default 0.4 for confidence, and
    for disco 0.5 or that of the loaded classifier."""
    max_length: int = setting(20, at_least=1)
    """Maximum number of drafted tokens."""
    is_drawn: bool = True
    """Draw tokens with the target's noise, rather than take the most likely; true or false."""
    classifier: str = ""
    """Folder of disco's classifier; by default pocket's."""
    position: PositionKind = "draft"
    """Positions that disco's classifier reads; set when it is loaded."""

    def check_settings(self) -> None:
        self.length_rule.longest(self.max_length)  # checks it

    @property
    def length_rule(self) -> LengthRule:
        """The rule that `rule` names, with its settings."""
        if isinstance(self.rule, LengthRule):
            return self.rule
        if self.rule == "fixed":
            return length_rules.Fixed(self.length)
        if self.rule == "heuristic":
            return length_rules.Heuristic(self.length)
        threshold = {} if self.threshold is None else {"threshold": self.threshold}
        if self.rule == "confidence":
            return length_rules.Confidence(**threshold)
        return length_rules.Disco(**threshold, position=self.position)

    @property
    def num_nodes(self) -> int:
        return self.max_depth + 1

    @property
    def max_depth(self) -> int:
        return self.length_rule.longest(self.max_length)

    def check(self, target: Target, params: Any) -> None:
        if not isinstance(params, Mapping) or {*params} - {"vocabulary"} != {"draft", "rule"}:
            raise SpecjaxError(
                "DraftModel needs the params {'draft': the draft's weights, 'rule': those of its "
                "length rule, or None}"
            )
        vocabulary, vocab_size = params.get("vocabulary"), target.config.vocab_size
        if vocabulary is not None and len(vocabulary.readable) != vocab_size:
            raise SpecjaxError(
                f"the shared vocabulary is that of {len(vocabulary.readable)} target tokens, not "
                f"of {vocab_size}; load the draft for this target"
            )
        with errors_at("the draft"):
            self.draft.check(params["draft"])
        self.length_rule.check(params["rule"])

    def init(self, start: Start) -> DraftState:
        prompt, batch = start.prompt, len(start.prompt.length)
        weights = start.params.drafter["draft"]
        tokens = self._readable(prompt.tokens, start.target, start.params)
        cache = self.draft.new_cache(weights, batch, start.num_slots, prompt.length)
        length = prompt.length - 1
        _, cache = prefill(weights, tokens, length, cache, self.draft, Taps(logits=False))
        return DraftState(
            cache=cache,
            rule=self.length_rule.init(batch),
            prompt_length=prompt.length,
            is_finished=jnp.zeros((batch,), bool),
            tokens=jnp.zeros((batch, self.max_depth), jnp.int32),
            num_drafted=jnp.zeros((batch,), jnp.int32),
            max_missing=start.max_depth + 1 if start.is_part else 2,
        )

    def propose(
        self, target: Target, params: Params, state: DraftState, context: Context, draw: Draw
    ) -> tuple[Proposal, DraftState]:
        # A token is drawn after a pass over its predecessor, which must have a position.
        room = self.draft.config.longest_text - context.length + 1
        max_length = jnp.where(state.is_finished, 0, jnp.clip(room, 0, self.max_depth))
        sizes = self.draft.config.vocab_size, target.config.vocab_size
        vocabulary = params.drafter.get("vocabulary")
        if vocabulary is not None:
            draw = draw.restricted_to(vocabulary.target_ids, sizes[1])
        elif sizes[0] != sizes[1]:
            draw = draw.restricted_to(jnp.arange(min(sizes)), sizes[1])

        def draft_one(draft: Draft, fed: Int[Array, "B Q"], count: Int[Array, " B"]) -> Draft:
            """Feeds the first `count` tokens of `fed` and draws the next one."""
            fed = self._readable(fed, target, params)
            rows = causal_rows(fed, draft.cache.length, jnp.max(count))
            output, cache = self.draft.run(params.drafter["draft"], rows, draft.cache)
            assert output.logits is not None
            logits = jnp.take_along_axis(output.logits, count[:, None, None] - 1, axis=1)
            if vocabulary is not None:
                logits = logits[..., vocabulary.draft_ids]
            elif sizes[0] > sizes[1]:
                logits = logits[..., : sizes[1]]
            place = draft.num_passes
            at = (context.length + place)[:, None]
            drawn = best_token((draw.perturbed(logits, at) if self.is_drawn else logits)[:, 0])
            token = drawn if vocabulary is None else vocabulary.target_ids[drawn]
            last = LastDrafted(
                probs=jax.nn.softmax(logits[:, 0], axis=-1),
                token=drawn,
                in_draft=place,
                in_new_text=context.length + place - state.prompt_length,
                in_text=context.length + place,
            )
            draft_probs = draft.draft_probs
            if draft_probs is not None:
                probs = draw.over_vocabulary(jnp.exp(draw.filtered(logits[:, 0])))
                draft_probs = _with_column(draft_probs, probs, place)
            wants_more = self.length_rule.draft_another(params.drafter["rule"], state.rule, last)
            return Draft(
                cache=cache.advance(jnp.where(draft.goes_on, count, 0)),
                tokens=_with_column(draft.tokens, token, place),
                draft_probs=draft_probs,
                length=draft.length + draft.goes_on,
                goes_on=draft.goes_on & wants_more & (place + 1 < max_length),
                num_passes=place + 1,
            )

        def draft_next(draft: Draft) -> Draft:
            fed = lax.dynamic_slice_in_dim(draft.tokens, draft.num_passes - 1, 1, axis=1)
            return draft_one(draft, fed, jnp.ones_like(draft.length))

        at = state.cache.length[:, None] + jnp.arange(state.max_missing)[None, :]
        missing = jnp.take_along_axis(context.tokens, at, axis=1, mode="clip")
        count = jnp.clip(context.length - state.cache.length, 1, state.max_missing)
        draft = draft_one(self._empty(state.cache, max_length > 0, draw, sizes[1]), missing, count)
        draft = lax.while_loop(self._goes_on, draft_next, draft)
        tree = chain(context.root, draft.tokens, draft.length, draft.draft_probs)
        return Proposal(tree), replace(
            state, cache=draft.cache, tokens=draft.tokens, num_drafted=draft.length
        )

    def update(
        self, target: Target, params: Params, state: DraftState, outcome: Outcome
    ) -> DraftState:
        # In a hybrid the path may be the other drafter's, so compare with the text.
        steps = jnp.arange(self.max_depth)[None, :]
        at = outcome.root_slot[:, None] + 1 + steps
        committed = jnp.take_along_axis(outcome.context.tokens, at, axis=1, mode="clip")
        is_drafted = (steps < state.num_drafted[:, None]) & (at < outcome.context.length[:, None])
        is_right = (committed == state.tokens) & is_drafted
        num_right = jnp.sum(jnp.cumprod(is_right, axis=1), axis=1)
        num_cached = jnp.minimum(outcome.context.length - 1, at[:, 0] + num_right)
        return replace(
            state,
            cache=replace(state.cache, length=jnp.minimum(state.cache.length, num_cached)),
            rule=self.length_rule.update(state.rule, state.num_drafted, num_right, self.max_depth),
            is_finished=outcome.num_committed == 0,
        )

    def _goes_on(self, draft: Draft) -> Bool[Array, ""]:
        # The comparison changes nothing, but a condition of a single sequence must compute
        # something: in a CUDA graph XLA orders a loop by the kernels of its condition.
        return jnp.any(draft.goes_on) & (draft.num_passes < self.max_depth)

    def _readable(
        self, tokens: Int[Array, "B S"], target: Target, params: Params
    ) -> Int[Array, "B S"]:
        """Replaces tokens that the draft lacks, which a gather would clip silently."""
        if (vocabulary := params.drafter.get("vocabulary")) is not None:
            return vocabulary.readable[tokens]
        vocab_size = self.draft.config.vocab_size
        is_whole = vocab_size >= target.config.vocab_size
        return tokens if is_whole else jnp.minimum(tokens, vocab_size - 1)

    def _empty(
        self, cache: KVCache, goes_on: Bool[Array, " B"], draw: Draw, vocab_size: int
    ) -> Draft:
        batch, has_probs = len(goes_on), self.is_drawn and draw.sampling.needs_draft_probs
        shape = (batch, self.num_nodes, vocab_size)
        return Draft(
            cache=cache,
            tokens=jnp.zeros((batch, self.max_depth), jnp.int32),
            draft_probs=jnp.zeros(shape) if has_probs else None,
            length=jnp.zeros((batch,), jnp.int32),
            goes_on=goes_on,
            num_passes=jnp.zeros((), jnp.int32),
        )


def _with_column(values: Array, column: Array, at: Int[Array, ""]) -> Array:
    """Replaces index `at` of axis 1 by `column`."""
    return lax.dynamic_update_slice_in_dim(values, column[:, None], at, axis=1)
