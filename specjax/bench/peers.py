"""Other libraries on the same weights and prompts, as contestants."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.bench.measure import Contestant, GeneratedText, Program, Turn
from specjax.core.errors import SpecjaxError
from specjax.core.provenance import num_cores
from specjax.hub import LoadedTarget
from specjax.models.io.huggingface import save_transformer

PEERS = ("transformers",)
PLD_TOKENS = 10  # what prompt lookup drafts: as many as ours


def check_peer(name: str) -> None:
    """Raises SpecjaxError for a peer that is unknown, or lacks what it needs."""
    if name not in PEERS:
        raise SpecjaxError(f"peer {name!r} is unknown; choose {', '.join(PEERS)}")
    if find_spec("torch") is None:
        raise SpecjaxError(f"the peer {name!r} needs torch; run `pip install torch`")


def peers(
    target: LoadedTarget, max_new_tokens: int, draft: LoadedTarget | None
) -> list[Contestant]:
    """Makes the contestants of transformers: plain, prompt lookup, and assisted by the draft.

    Args:
        target: the model whose weights they share, in float32.
        max_new_tokens: new tokens per prompt at most.
        draft: the assistant; if None, assisted generation is left out.
    """
    import torch

    torch.set_num_threads(num_cores())
    model = _load(target)
    settings = model.generation_config
    settings.eos_token_id = list(target.eos) or None
    settings.pad_token_id = target.eos[0] if target.eos else 0  # what stands there does not matter
    lookup = {"prompt_lookup_num_tokens": PLD_TOKENS}
    shared = model, target.eos, max_new_tokens, target.config.longest_text
    found: list[Contestant] = [
        Transformers("transformers", *shared),
        DraftingTransformers("transformers pld", *shared, lookup),
    ]
    if draft is not None:
        assistant = {"assistant_model": _load(draft)}
        found.append(DraftingTransformers("transformers assisted", *shared, assistant))
    return found


class LeftPadded(NamedTuple):
    """Prompts as tensors [B, P], padded on the left."""

    tokens: Any
    mask: Any  # 1 for tokens of a prompt


class Generated(NamedTuple):
    """The result of one call."""

    tokens: Any  # without the prompts; a row for each
    passes: Sequence[Any] = ()  # the drafted tokens of each target pass, as a tensor


@dataclass(frozen=True, eq=False)
class Transformers(Contestant):
    """The greedy `generate` of transformers: torch in float32, all cores, its own KV cache.

    It runs on CPU, whatever the target runs on, and compiles nothing. Its prefill is part of
    `generate` and is not timed separately.

    A round is a target pass that adds to the text. Our prefill leaves the last token of the prompt
    to the first round; theirs feeds the whole prompt in the pass that gives the first token. So all
    of their passes are rounds, and tokens per round mean the same: 1 for plain decoding in both.
    """

    name: str
    model: Any = field(repr=False)
    eos: tuple[int, ...]
    max_new_tokens: int
    longest: int  # text; the target's
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    dtype = "float32"
    has_prefill = False

    def prepare(self, rows: Sequence[Sequence[int]], turn: Turn = (0, 0)) -> LeftPadded:
        import torch

        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), self.model.generation_config.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, ids in enumerate(rows):
            tokens[row, longest - len(ids) :] = torch.tensor(list(ids))
            mask[row, longest - len(ids) :] = 1
        return LeftPadded(tokens, mask)

    def compile(self, prepared: LeftPadded) -> Program:
        del prepared
        return Program()

    def start(self, prepared: LeftPadded) -> LeftPadded:
        return prepared

    def finish(self, state: LeftPadded) -> Generated:
        import torch

        rooms = [self.longest - length for length in state.mask.sum(1).tolist()]
        rooms = [min(self.max_new_tokens, room) for room in rooms]
        with torch.inference_mode(), _quiet():
            texts = self.model.generate(
                state.tokens,
                attention_mask=state.mask,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                max_new_tokens=max(rooms),
                **self.settings,
            )
        new = texts[:, state.tokens.shape[1] :].tolist()
        return Generated([row[:room] for row, room in zip(new, rooms, strict=True)])

    def read(self, result: Generated) -> tuple[GeneratedText, ...]:
        texts = [until_eos(row, self.eos) for row in result.tokens]
        return tuple(replayed(text, [()] * len(text)) for text in texts)


@dataclass(frozen=True, eq=False)
class DraftingTransformers(Transformers):
    """The same with drafts, as `settings` say, which transformers makes for one row at a time.

    Assisted generation drafts as it does by default: 20 tokens, fewer where the draft is unsure.
    """

    max_rows = 1

    def finish(self, state: LeftPadded) -> Generated:
        fed = []

        def note(model: Any, args: Any, inputs: Mapping[str, Any]) -> None:
            del model, args
            fed.append(inputs["input_ids"])

        watch = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            generated = super().finish(state)
        finally:
            watch.remove()
        # The first pass feeds the prompt before its draft, every other the last token of the text.
        starts = [state.tokens.shape[1]] + [1] * (len(fed) - 1)
        passes = [each[0, start:] for each, start in zip(fed, starts, strict=True)]
        return generated._replace(passes=passes)

    def read(self, result: Generated) -> tuple[GeneratedText, ...]:
        [tokens] = result.tokens
        drafts = [draft.tolist() for draft in result.passes]
        return (replayed(until_eos(tokens, self.eos), drafts),)


def until_eos(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Cuts the tokens after the first EOS."""
    end = next((place for place, token in enumerate(tokens, 1) if token in eos), len(tokens))
    return list(tokens[:end])


def replayed(tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> GeneratedText:
    """Reconstructs the rounds of a greedy text from what was drafted in each.

    A round keeps its draft as far as it agrees with the text, and adds one token.
    """
    committed, from_draft, num_accepted = [], [], 0
    for draft in drafts:
        rest = tokens[len(from_draft) :]
        pairs = zip(draft, rest, strict=False)
        accepted = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(rest)))
        new = ([True] * accepted + [False])[: len(rest)]
        num_accepted += accepted
        committed.append(len(new))
        from_draft += new
    if len(from_draft) != len(tokens):
        raise SpecjaxError(
            f"{len(drafts)} rounds account for {len(from_draft)} of {len(tokens)} tokens: this "
            "version of transformers drafts differently; leave --peers out"
        )
    lengths = [committed.count(length) for length in range(max(committed, default=0) + 1)]
    return GeneratedText(
        tuple(tokens), len(drafts), tuple(lengths), tuple(from_draft), num_accepted
    )


def _load(target: LoadedTarget) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as above, _quiet():
        folder = Path(above) / "target"
        save_transformer(folder, target.config, target.params, jnp.float32)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences progress bars, and advice meant for callers of transformers."""
    from transformers.utils import logging

    has_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
