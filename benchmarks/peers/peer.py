"""Measures other libraries: the base class of their contestants, and the replay of their rounds."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from specjax import LoadedTarget, SpecjaxError
from specjax.core.text import num_equal
from specjax.run.runner import GeneratedText, Program

PLD_TOKENS = 10  # tokens of prompt lookup: as many as ours


class Work(NamedTuple):
    """The work that is measured."""

    target: LoadedTarget
    draft: LoadedTarget | None  # a draft model; None: drafting by one is left out
    max_prompt_length: int
    max_new_tokens: int


@dataclass(frozen=True, eq=False)
class Peer:
    """Greedy decoding by another library; it compiles nothing, and its prefill is not timed alone.

    A round is a target pass that adds to the text. Our prefill leaves the last token of the prompt
    to the first round; peers feed the whole prompt in the pass that gives the first token. So all
    of their passes are rounds, and tokens per round mean the same: 1 for plain decoding in both.
    """

    name: str
    work: Work = field(repr=False)
    model: Any = field(repr=False)

    has_prefill = False
    max_rows: ClassVar[int | None] = None  # the largest batch that it serves; None: any

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.work.target.eos

    def room(self, prompt_length: int) -> int:
        """Returns how many new tokens a prompt of this length may get."""
        room = self.work.target.config.longest_text - prompt_length
        return min(self.work.max_new_tokens, room)

    def compile(self, prepared: Any) -> Program:
        del prepared
        return Program()

    def prefill(self, prepared: Any) -> Any:
        return prepared


def until_eos(tokens: Iterable[int], eos: Sequence[int]) -> list[int]:
    """Takes tokens up to the first EOS, which is the last one that is taken."""
    prefix = []
    for token in tokens:
        prefix.append(token)
        if token in eos:
            break
    return prefix


def replayed(tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> GeneratedText:
    """Reconstructs the rounds of a greedy text from what was drafted in each.

    A round keeps its draft as far as it agrees with the text, and adds one token.
    """
    committed, from_draft, num_accepted = [], [], 0
    for draft in drafts:
        rest = tokens[len(from_draft) :]
        accepted = num_equal(draft, rest)
        new = ([True] * accepted + [False])[: len(rest)]
        num_accepted += accepted
        committed.append(len(new))
        from_draft += new
    if len(from_draft) != len(tokens):
        raise SpecjaxError(
            f"{len(drafts)} rounds account for {len(from_draft)} of {len(tokens)} tokens: this "
            "version of the peer drafts differently; leave it out of --peers"
        )
    lengths = [committed.count(length) for length in range(max(committed, default=0) + 1)]
    return GeneratedText(
        tuple(tokens), len(drafts), tuple(lengths), tuple(from_draft), num_accepted
    )
