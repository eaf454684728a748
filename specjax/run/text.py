"""Text in, text out: the short way to try a target and a method."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.core.chat import Message
from specjax.core.errors import SpecjaxError, check_type, check_whole
from specjax.core.text import EndingText, token_ids
from specjax.decoding.drafter import Drafter
from specjax.decoding.generate import ROUNDS_PER_CALL, stream_states
from specjax.decoding.prompt import chat_ids, encode, from_ids
from specjax.decoding.sampling import Sampling
from specjax.decoding.state import Generation
from specjax.loading.drafters import load_drafter
from specjax.loading.grammar import load_grammar
from specjax.loading.targets import LoadedTarget, load
from specjax.run.engines import make_engine

Prompts = str | Sequence[Message] | Sequence[str] | Sequence[Sequence[Message]]


@dataclass(frozen=True)
class Completion:
    """A new text with all that is known about it; `str` of it is the text alone."""

    text: str
    tokens: tuple[int, ...]  # up to the one that completes a stop text, or EOS included
    finish_reason: str | None  # stop, eos or length; None while it grows
    # With `logprobs`, a record of each token: raw and processed log-probability, and the most
    # likely tokens by each, pairs of id and log-probability without those that filters cut.
    logprobs: tuple[dict[str, Any], ...] | None
    rounds: int  # target passes
    mean_accepted_length: float  # tokens per target pass, bonus included

    def __str__(self) -> str:
        return self.text


def generate_text(
    target: LoadedTarget | str | Path,
    prompt: Prompts,
    method: str | tuple[Drafter, Any] = "pld",
    *,
    chat: bool = False,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Continues texts, or answers conversations, and returns a `Completion` for each.

    A list of prompts is one batch and gives a list of completions. `print` shows the new text.

    Args:
        target: from `specjax.load`, or the name that it takes.
        prompt: a text to continue, used exactly as given; the messages of a conversation, such as
            `[{"role": "user", "content": "..."}]`; or a list of such texts or conversations.
        method: a name from `specjax methods`, or what `specjax.load_drafter` returned; load a head
            or a draft model once that way if you call this often.
        chat: whether texts are a user's messages, for the tokenizer's chat template.
        sampling: how tokens are drawn; by default the most likely one is taken.
        max_new_tokens: new tokens at most.
        stop: texts, each of which ends a completion before it would appear.
        ignore_eos: whether to go on after EOS; not with a grammar.
        seed: of the draws.
        settings: fields of `Sampling` to replace, such as `temperature=0.8`; `bad_words` may be
            texts. Also one of `json_schema={...}`, `regex="..."` and `choices=[...]`, which a text
            then follows from start to end, unless `max_new_tokens` or `stop` ends it.

    Raises:
        SpecjaxError: for a target without a tokenizer, a method that this target cannot have, an
            unknown option, or a prompt that is empty or too long.
    """
    if "rounds_per_call" in settings:
        raise SpecjaxError("rounds_per_call is an option of stream_text alone; leave it out")
    *_, last = stream_text(
        *(target, prompt, method),
        chat=chat,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
        seed=seed,
        rounds_per_call=ROUNDS_PER_CALL if stop else max_new_tokens,
        **settings,
    )
    return last


def stream_text(
    target: LoadedTarget | str | Path,
    prompt: Prompts,
    method: str | tuple[Drafter, Any] = "pld",
    *,
    chat: bool = False,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    stop: str | Sequence[str] = (),
    ignore_eos: bool = False,
    seed: int = 0,
    rounds_per_call: int = ROUNDS_PER_CALL,
    json_schema: Mapping[str, Any] | None = None,
    regex: str | None = None,
    choices: Sequence[str] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """Yields what `generate_text` returns as it grows, every `rounds_per_call` rounds.

    Characters appear when all their bytes are there, and the beginning of a stop text only when
    the text goes on otherwise. Other arguments are those of `generate_text`.
    """
    check_type("prompt", prompt, (str, list, tuple), "a text, messages, or a list of either")
    check_type("method", method, (str, tuple), "a name, or the pair from specjax.load_drafter")
    check_type("sampling", sampling, Sampling, "specjax.Sampling(temperature=...)")
    check_whole("seed", seed, 0)
    target = target if isinstance(target, LoadedTarget) else load(target)
    tokenizer = target.require_tokenizer()
    drafter = load_drafter(method, target) if isinstance(method, str) else method
    check_type("stop", stop, (str, Iterable, type(None)), "a text, or a list of texts")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise SpecjaxError(f"stop must hold texts that are not empty, got {stop!r}")
    prompts: Sequence[Any] = [prompt] if _is_one(prompt) else prompt
    is_chat = chat or not all(isinstance(each, str) for each in prompts)
    encoded = (
        from_ids([chat_ids(tokenizer, each) for each in prompts])
        if is_chat
        else encode(tokenizer, list(prompts))
    )
    automaton = load_grammar(target, json_schema=json_schema, regex=regex, choices=choices)
    sampling = _with_settings(sampling, settings, tokenizer)
    engine, params = make_engine(target, drafter, max_new_tokens, sampling, automaton, ignore_eos)
    check_whole("rounds_per_call", rounds_per_call, 1)  # may be max_new_tokens, which is valid here
    engine.check(params, encoded)
    state = engine.prefill(params, encoded, jax.random.key(seed))
    endings = [EndingText(tokenizer, stops, () if is_chat else ids) for ids in encoded.ids]
    parts: list[Completion] = []
    for generation, after in stream_states(engine, params, state, rounds_per_call):
        generation, is_done = jax.device_get((generation, after.is_done))
        parts = [  # a text that has ended stays, even if its sequence runs on after a stop text
            parts[number]
            if parts and parts[number].finish_reason
            else completion(ending, generation, number, engine.eos, bool(is_done[number]))
            for number, ending in enumerate(endings)
        ]
        yield parts[0] if _is_one(prompt) else parts
        if all(part.finish_reason for part in parts):
            return


def _is_one(prompt: Prompts) -> bool:
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict))


def _with_settings(sampling: Sampling, settings: dict[str, Any], tokenizer: Any) -> Sampling:
    """Returns the sampling with some fields replaced; bad words may be texts."""
    names = [field.name for field in fields(Sampling)]
    if unknown := sorted(set(settings) - set(names)):
        raise SpecjaxError(
            f"{unknown[0]} is not an option of generate_text; sampling has {', '.join(names)}"
        )
    if "bad_words" in settings:
        words: Any = () if settings["bad_words"] is None else settings["bad_words"]
        words = [words] if isinstance(words, (str, int)) else list(words)
        for word in words:
            check_type("a word in bad_words", word, Iterable, "a text, or a list of token ids")
        settings["bad_words"] = token_ids(tokenizer, words)
    return replace(sampling, **settings)


def completion(
    ending: EndingText, generation: Generation, sequence: int, eos: tuple[int, ...], is_done: bool
) -> Completion:
    """Returns the text of one sequence so far; `ending` holds what earlier calls have read."""
    tokens, length = np.asarray(generation.tokens[sequence]), int(generation.length[sequence])
    for token in tokens[ending.num_tokens : length].tolist():
        ending.add(token)
    if is_done:
        ending.finish()
    read = tuple(tokens[: ending.num_tokens].tolist())
    reason = None
    if ending.is_stopped:
        reason = "stop"
    elif is_done:
        reason = "eos" if read and read[-1] in eos else "length"
    counts = np.asarray(generation.stats.accepted_lengths[sequence])
    rounds = int(generation.stats.rounds[sequence])
    return Completion(
        text=ending.text[: None if reason else ending.num_settled],
        tokens=read,
        finish_reason=reason,
        logprobs=_logprobs(generation, sequence, read, ending.records),
        rounds=rounds,
        mean_accepted_length=float(counts @ np.arange(len(counts)) / max(rounds, 1)),
    )


def _logprobs(
    generation: Generation, sequence: int, tokens: Sequence[int], records: list[dict[str, Any]]
) -> tuple[dict[str, Any], ...] | None:
    if generation.logprobs is None:
        return None
    logprobs = jax.device_get(generation.logprobs)
    kinds = {"raw": logprobs.raw, "processed": logprobs.processed}
    for place in range(len(records), len(tokens)):
        record: dict[str, Any] = {"token": tokens[place]}
        for name, values in kinds.items():
            top_tokens, top = values.top_tokens[sequence, place], values.top[sequence, place]
            pairs = zip(top_tokens.tolist(), top.tolist(), strict=True)
            record[name] = float(values.token[sequence, place])
            record[f"top_{name}"] = [(token, value) for token, value in pairs if np.isfinite(value)]
        records.append(record)
    return tuple(records)
