"""Other libraries on the same weights and prompts, as one more contestant."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp

from specjax.bench.measure import Answer
from specjax.errors import SpecjaxError
from specjax.models.config import LlamaConfig
from specjax.models.convert import save_llama

PEERS = ("transformers",)


def check_peer(name: str) -> None:
    """Raises SpecjaxError for a peer that is unknown, or lacks what it needs."""
    if name not in PEERS:
        raise SpecjaxError(f"peer {name!r} is unknown; choose {', '.join(PEERS)}")
    if find_spec("torch") is None:
        raise SpecjaxError(f"the peer {name!r} needs torch; run `pip install torch`")


class Transformers:
    """The plain greedy `generate` of transformers: torch in float32, all cores, its own KV cache.

    It runs on CPU, whatever the target runs on. Each of its tokens is one round.
    """

    name = "transformers"
    dtype = "float32"

    def __init__(
        self, config: LlamaConfig, params: Any, eos: tuple[int, ...], max_new_tokens: int
    ) -> None:
        import torch

        torch.set_num_threads(_num_cores())
        self._model = _load(config, params)
        settings = self._model.generation_config
        settings.eos_token_id = list(eos) or None
        settings.pad_token_id = eos[0] if eos else 0  # read only to pad batches, or warned about
        self._max_new_tokens = max_new_tokens

    def prepare(self, ids: Sequence[int]) -> Any:
        """The prompt as a tensor, not padded: transformers compiles nothing."""
        import torch

        return torch.tensor([list(ids)])

    def run(self, request: Any) -> Any:
        """Prompt and new tokens."""
        import torch

        with torch.inference_mode():
            texts = self._model.generate(
                request,
                attention_mask=torch.ones_like(request),
                do_sample=False,
                num_beams=1,
                use_cache=True,
                max_new_tokens=self._max_new_tokens,
            )
        return texts[0, request.shape[1] :]

    def read(self, result: Any) -> Answer:
        """Its new tokens, EOS included."""
        tokens = tuple(result.tolist())
        return Answer(tokens, rounds=len(tokens))


def _load(config: LlamaConfig, params: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as above, _no_progress_bar():
        folder = Path(above) / "target"
        save_llama(folder, config, params, jnp.float32)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        )
        return model.eval()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils.logging import (
        disable_progress_bar,
        enable_progress_bar,
        is_progress_bar_enabled,
    )

    if not is_progress_bar_enabled():
        yield
        return
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
