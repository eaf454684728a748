"""llama.cpp, through llama-cpp-python, as contestants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import finalize

import numpy as np

from specjax import LoadedTarget, SpecjaxError
from specjax.bench.measure import Contestant
from specjax.core.provenance import num_cores
from specjax.run.runner import GeneratedText, Trial

from .gguf_writer import Q8_0, check_writable_as_gguf, save_gguf
from .peer import PLD_TOKENS, Peer, Work, replayed, until_eos

DRAFT_LENGTH = 5  # tokens of a draft model: as many as ours by default
SLOTS = 256  # the size of a cache is a multiple of it
GREEDY = {"temp": 0.0, "repeat_penalty": 1.0}


def check(target: LoadedTarget) -> None:
    """Raises SpecjaxError for a target that cannot be written for llama.cpp."""
    try:
        check_writable_as_gguf(target.config, target.params)
    except SpecjaxError as error:
        raise SpecjaxError(f"--peers llama.cpp cannot run {target.name}: {error}") from None


def make(work: Work) -> list[Contestant]:
    """Makes the contestants of llama.cpp: plain, prompt lookup, and drafts by the draft model.

    A target from a GGUF file also runs with the weights as that file stores them, and in Q8_0.
    """
    from llama_cpp.llama_speculative import (  # pyright: ignore[reportMissingImports]
        LlamaPromptLookupDecoding,
    )

    drafters = {"": None, " pld": Drafts(LlamaPromptLookupDecoding(num_pred_tokens=PLD_TOKENS))}
    if work.draft is not None:
        check(work.draft)
        [draft] = _load(work.draft, work, [None])
        drafters[" draft-model"] = drafts = Drafts(partial(_continuation, draft), draft.reset)
        finalize(drafts, draft.close)
    models = _load(work.target, work, list(drafters.values()))
    contestants = [
        LlamaCpp(f"llama.cpp{name}", work, model)
        for name, model in zip(drafters, models, strict=True)
    ]
    if (file := Path(work.target.name)).suffix == ".gguf":
        for weights, source in (("stored", file), (Q8_0, None)):
            [model] = _load(work.target, work, [None], source, weights)
            contestants.append(LlamaCpp(f"llama.cpp {weights}", work, model, weights))
    for contestant in contestants:
        finalize(contestant, contestant.model.close)  # by itself it fails when Python ends
    return [*contestants]


class Drafts:
    """A drafter in llama.cpp's form that keeps its drafts."""

    def __init__(
        self, draft: Callable[[np.ndarray], np.ndarray], reset: Callable[[], None] = lambda: None
    ):
        self.draft, self._reset = draft, reset
        self.drafts: list[list[int]] = []  # the draft of each target pass

    def reset(self) -> None:
        """Begins a new text, whose first pass feeds the prompt alone."""
        self._reset()
        self.drafts = [[]]

    def __call__(self, input_ids: np.ndarray, /, **settings: Any) -> np.ndarray:
        del settings
        draft = self.draft(input_ids)
        self.drafts.append(draft.tolist())
        return draft


@dataclass(frozen=True, eq=False)
class LlamaCpp(Peer):
    """The greedy `generate` of llama-cpp-python on all cores, with the drafter of its model.

    It runs on a CPU unless it was built for something else. Matrices have the dtype of the
    target's, and activations are float32. The cache is float32 for a float32 target, otherwise
    float16, the default of llama.cpp. With a drafter, the library computes the logits of the whole
    prompt. Its threads spin while they wait for each other, so it needs cores that are otherwise
    idle: beside other work two threads may be slower than one.
    """

    weights: str = ""  # their dtype, if it is not the target's

    max_rows = 1

    @property
    def dtype(self) -> str:
        """The dtype of the weights, and of compute if that is another."""
        if self.weights:
            return f"{self.weights} (float32)"
        weights = self.work.target.dtype.name
        return weights if weights == "float32" else f"{weights} (float32)"

    def prepare(self, rows: Sequence[Sequence[int]], trial: Trial = (0, 0)) -> list[int]:
        [ids] = rows
        return list(ids)

    def decode(self, state: list[int]) -> tuple[list[int], list[list[int]]]:
        """Returns the text and the draft of each target pass."""
        drafts = self.model.draft_model
        self.model.reset()  # otherwise it reuses the prefix shared with the last text
        if drafts is not None:
            drafts.reset()
        text = islice(self.model.generate(state, **GREEDY), self.room(len(state)))
        tokens = until_eos(text, self.eos)
        return tokens, [[]] * len(tokens) if drafts is None else drafts.drafts

    def read(self, result: tuple[list[int], list[list[int]]]) -> tuple[GeneratedText, ...]:
        return (replayed(*result),)


def _load(
    model: LoadedTarget,
    work: Work,
    drafters: Sequence[Drafts | None],
    file: Path | None = None,
    weights: str = "",
) -> list[Any]:
    """Loads the model, or a file of it, once for each drafter; the weights are in memory once."""
    from llama_cpp import (  # pyright: ignore[reportMissingImports]
        GGML_TYPE_F16,
        GGML_TYPE_F32,
        Llama,
    )

    cache_type = GGML_TYPE_F32 if model.dtype == np.float32 else GGML_TYPE_F16
    num_slots = work.max_prompt_length + work.max_new_tokens + PLD_TOKENS
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = file or Path(folder) / "model.gguf"
        if file is None:
            save_gguf(path, model.config, model.params, weights or model.dtype)
        return [
            Llama(
                str(path),
                n_ctx=-(-num_slots // SLOTS) * SLOTS,
                n_threads=num_cores(),
                n_threads_batch=num_cores(),
                type_k=cache_type,
                type_v=cache_type,
                draft_model=drafts,  # pyright: ignore[reportArgumentType]
                logits_all=drafts is not None,
                verbose=False,
            )
            for drafts in drafters
        ]


def _continuation(model: Any, ids: np.ndarray) -> np.ndarray:
    """Continues a text; only its new tokens are computed."""
    tokens = islice(model.generate(ids.tolist(), **GREEDY), DRAFT_LENGTH)
    return np.array(list(tokens), np.intc)
