"""transformers, on torch, as contestants."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax import LoadedTarget, SpecjaxError
from specjax.bench.measure import Contestant
from specjax.core.provenance import num_cores
from specjax.models.io.huggingface import save_transformer
from specjax.models.quantize import has_quantized
from specjax.run.runner import GeneratedText, Trial

from .peer import PLD_TOKENS, Peer, Work, replayed, until_eos


def check(target: LoadedTarget) -> None:
    """Raises SpecjaxError for a target that cannot be written for transformers."""
    if has_quantized(target.params):
        raise SpecjaxError("--peers transformers takes no quantised target; leave out --quantize")


def make(work: Work) -> list[Contestant]:
    """Makes the contestants of transformers: plain, prompt lookup, and assisted by the draft."""
    import torch

    torch.set_num_threads(num_cores())
    model, eos = _load(work.target), work.target.eos
    settings = model.generation_config
    settings.eos_token_id = list(eos) or None
    settings.pad_token_id = eos[0] if eos else 0  # any value works
    lookup = {"prompt_lookup_num_tokens": PLD_TOKENS}
    contestants: list[Contestant] = [
        Transformers("transformers", work, model),
        DraftingTransformers("transformers pld", work, model, lookup),
    ]
    if work.draft is not None:
        assistant = {"assistant_model": _load(work.draft)}
        contestants.append(DraftingTransformers("transformers assisted", work, model, assistant))
    return contestants


class LeftPadded(NamedTuple):
    """Prompts as tensors [B, P], padded on the left."""

    tokens: Any
    mask: Any  # 1 for tokens of a prompt


class Generated(NamedTuple):
    """The result of one call."""

    tokens: Any  # without the prompts; a row for each
    passes: Sequence[Any] = ()  # the drafted tokens of each target pass, as a tensor


@dataclass(frozen=True, eq=False)
class Transformers(Peer):
    """The greedy `generate` of transformers: torch in float32, all cores, its own KV cache.

    It runs on CPU, whatever the target runs on.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)

    dtype = "float32"

    def prepare(self, rows: Sequence[Sequence[int]], trial: Trial = (0, 0)) -> LeftPadded:
        import torch

        longest = max(map(len, rows))
        tokens = torch.full((len(rows), longest), self.model.generation_config.pad_token_id)
        mask = torch.zeros_like(tokens)
        for row, ids in enumerate(rows):
            tokens[row, longest - len(ids) :] = torch.tensor(list(ids))
            mask[row, longest - len(ids) :] = 1
        return LeftPadded(tokens, mask)

    def decode(self, state: LeftPadded) -> Generated:
        import torch

        rooms = [self.room(length) for length in state.mask.sum(1).tolist()]
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
    """Transformers with drafts, chosen by `settings`, for one sequence at a time.

    Assisted generation drafts as it does by default: 20 tokens, fewer where the draft is unsure.
    """

    max_rows = 1

    def decode(self, state: LeftPadded) -> Generated:
        fed = []

        def note(model: Any, args: Any, inputs: Mapping[str, Any]) -> None:
            del model, args
            fed.append(inputs["input_ids"])

        watch = self.model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            generated = super().decode(state)
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
