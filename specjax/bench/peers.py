"""Other libraries on the same weights and prompts, as more contestants."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.bench.measure import Contestant, Program, Text
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
    """What transformers makes of the target: plain, prompt lookup, and assisted by the draft.

    Args:
        target: whose weights they share, in float32.
        max_new_tokens: stop after so many new tokens.
        draft: the assistant; if None, assisted generation is left out.
    """
    import torch

    torch.set_num_threads(num_cores())
    model = _load(target)
    settings = model.generation_config
    settings.eos_token_id = list(target.eos) or None
    settings.pad_token_id = target.eos[0] if target.eos else 0  # what stands there does not matter
    lookup = {"prompt_lookup_num_tokens": PLD_TOKENS}
    found: list[Contestant] = [
        Transformers("transformers", model, target.eos, max_new_tokens),
        Drafting("transformers pld", model, target.eos, max_new_tokens, lookup),
    ]
    if draft is not None:
        assistant = {"assistant_model": _load(draft)}
        own = Drafting("transformers assisted", model, target.eos, max_new_tokens, assistant)
        found.append(own)
    return found


class Rows(NamedTuple):
    """Prompts as tensors [B, P], padded on the left."""

    tokens: Any
    mask: Any  # 1 where a prompt stands


class Answer(NamedTuple):
    """What one call returned."""

    tokens: Any  # [B, M], without the prompts
    passes: Sequence[Any] = ()  # a tensor of what was drafted for each pass of the target


@dataclass(frozen=True, eq=False)
class Transformers:
    """The greedy `generate` of transformers: torch in float32, all cores, its own KV cache.

    It runs on CPU, whatever the target runs on, and compiles nothing. Its prefill is part of
    `generate`, and not timed apart.

    A round is a pass of the target that adds to the text. Ours caches the prompt but for its last
    token, which the first round feeds; theirs feeds the whole prompt in the pass that gives the
    first token. So all of their passes are rounds, the first one too, and tokens per round mean
    the same: 1 for plain decoding, in both.
    """

    name: str
    model: Any = field(repr=False)
    eos: tuple[int, ...]
    max_new_tokens: int
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    dtype = "float32"
    has_prefill = False

    @property
    def most_rows(self) -> int | None:
        """Any batch."""
        return None

    def prepare(self, rows: Sequence[Sequence[int]]) -> Rows:
        """The prompts as tensors, padded to the longest only."""
        import torch

        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), self.model.generation_config.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, ids in enumerate(rows):
            tokens[row, longest - len(ids) :] = torch.tensor(list(ids))
            mask[row, longest - len(ids) :] = 1
        return Rows(tokens, mask)

    def compile(self, prepared: Rows) -> Program:
        """Nothing is compiled."""
        del prepared
        return Program()

    def start(self, prepared: Rows) -> Rows:
        """Nothing happens: the prefill is part of `finish`."""
        return prepared

    def finish(self, state: Rows) -> Answer:
        """The new texts."""
        import torch

        with torch.inference_mode(), _quiet():
            texts = self.model.generate(
                state.tokens,
                attention_mask=state.mask,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                max_new_tokens=self.max_new_tokens,
                **self.settings,
            )
        return Answer(texts[:, state.tokens.shape[1] :])

    def read(self, result: Answer) -> tuple[Text, ...]:
        """The new tokens of each row, EOS included; each took one round."""
        texts = [until_eos(row, self.eos) for row in result.tokens.tolist()]
        return tuple(replayed(text, [()] * len(text)) for text in texts)


@dataclass(frozen=True, eq=False)
class Drafting(Transformers):
    """The same with drafts, as `settings` say, which transformers makes for one row at a time.

    Assisted generation drafts as it does by default: 20 tokens, fewer where the draft is unsure.
    """

    @property
    def most_rows(self) -> int | None:
        """One row."""
        return 1

    def finish(self, state: Rows) -> Answer:
        """The new text, and what was fed to each pass of the target."""
        fed = []

        def note(model: Any, args: Any, inputs: Mapping[str, Any]) -> None:
            del model, args
            fed.append(inputs["input_ids"])

        watch = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            answer = super().finish(state)
        finally:
            watch.remove()
        # The first pass feeds the prompt before its draft, every other the last token of the text.
        starts = [state.tokens.shape[1]] + [1] * (len(fed) - 1)
        passes = [each[0, start:] for each, start in zip(fed, starts, strict=True)]
        return answer._replace(passes=passes)

    def read(self, result: Answer) -> tuple[Text, ...]:
        """The new tokens, EOS included, and their rounds."""
        [tokens] = result.tokens.tolist()
        drafts = [draft.tolist() for draft in result.passes]
        return (replayed(until_eos(tokens, self.eos), drafts),)


def until_eos(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """The tokens up to the first EOS, which is kept."""
    end = next((place for place, token in enumerate(tokens, 1) if token in eos), len(tokens))
    return list(tokens[:end])


def replayed(tokens: Sequence[int], drafts: Sequence[Sequence[int]]) -> Text:
    """How greedy tokens came, from what was drafted in each round.

    A round keeps its draft as far as that agrees with the text, and adds one token.
    """
    committed, from_draft = [], []
    for draft in drafts:
        rest = tokens[len(from_draft) :]
        pairs = zip(draft, rest, strict=False)
        accepted = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(draft), len(rest)))
        new = ([True] * accepted + [False])[: len(rest)]
        committed.append(len(new))
        from_draft += new
    if len(from_draft) != len(tokens):
        raise SpecjaxError(
            f"{len(drafts)} rounds account for {len(from_draft)} of {len(tokens)} tokens: this "
            "transformers drafts otherwise; leave --peers out"
        )
    lengths = [committed.count(length) for length in range(max(committed, default=0) + 1)]
    return Text(tuple(tokens), len(drafts), tuple(lengths), tuple(from_draft))


def _load(target: LoadedTarget) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as above, _quiet():
        folder = Path(above) / "target"
        save_transformer(folder, target.config, target.params, jnp.float32)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        return model.eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, and no advice that is meant for who calls transformers."""
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
