"""Texts that the target writes itself, several at a time: what drafters learn from best.

HASS, appendix D; ParallelSpec, section 5.3; DISCO, appendix D. A file of answers grows batch by
batch, and the same request goes on with it where it stopped.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.chat import chat_text, encode_chat, opening_ids
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.sampling import Sampling
from specjax.files import writable
from specjax.hub import Target
from specjax.training.config import DistillOptions
from specjax.training.conversations import ASSISTANT, USER, Conversation, Turn
from specjax.training.run_folder import claim
from specjax.tuned import fingerprint

BATCH = 8  # prompts that the target continues together
OPENING_SHARE = 0.25  # of a plain text, which the target then continues

Ids = Sequence[int]
Watch = Callable[[Iterable[int]], Iterable[int]]


def answers_of(
    target: Target, max_new_tokens: int, watch: Watch = iter
) -> Callable[[Sequence[Ids]], list[list[int]]]:
    """A function from prompts to the target's greedy continuations; `watch` sees its progress."""

    def answers(prompts: Sequence[Ids]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, list[int]] = {}
        for start in watch(range(0, len(order), BATCH)):
            numbers = order[start : start + BATCH]
            texts = _answer(target, [prompts[number] for number in numbers], max_new_tokens)
            found |= dict(zip(numbers, texts, strict=True))
        return [found[number] for number in range(len(prompts))]

    return answers


def distill(
    target: Target,
    conversations: Sequence[Conversation],
    file: Path,
    options: DistillOptions = DistillOptions(),
    seed: int = 0,
    watch: Watch = iter,
    resume: bool = False,
) -> list[Conversation]:
    """The same conversations with the target's own answers, turn after turn, in their order.

    What the user says stays, up to what would not fit the target; a plain text keeps its opening.
    `file` gets a line per conversation, in a form that `read_conversations` reads, and `file.json`
    beside it tells what it is.

    Args:
        target: with a tokenizer.
        conversations: of which the user's turns are read.
        file: grows by a batch of lines at a time.
        options: how the target answers.
        seed: of what is drawn above temperature 0.
        watch: sees the batches go by.
        resume: go on with `file` where it stopped.

    Raises:
        SpecjaxError: if the file cannot be written, or holds the answers to another request.
    """
    request = asdict(options) | {
        "target": fingerprint(target.config, target.params),
        "seed": seed,
        "prompts": _checksum(conversations),
    }
    with writable(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        claim(file.with_suffix(file.suffix + ".json"), request, resume)
    found = _lines_of(file, len(conversations))
    # Conversations of like length together; the order, and so every batch, is the same each time.
    order = sorted(range(len(conversations)), key=lambda number: _size(conversations[number]))
    for start in watch(range(len(found), len(order), BATCH)):
        numbers = order[start : start + BATCH]
        texts = [conversations[number] for number in numbers]
        written = _answered(target, texts, options, seed=seed + start)
        rows = [
            {"number": number} | _as_row(text)
            for number, text in zip(numbers, written, strict=True)
        ]
        with writable(file), file.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in rows))
        found += rows
    by_number = {row["number"]: _from_row(row) for row in found}
    return [by_number[number] for number in range(len(conversations))]


def _answered(
    target: Target, conversations: Sequence[Conversation], options: DistillOptions, seed: int
) -> list[Conversation]:
    """One batch: every text continued, every question answered, the first ones first."""
    tokenizer = target.require_tokenizer()
    sampling = Sampling(options.distill_temperature)
    texts, said = {}, {}
    for number, each in enumerate(conversations):
        if each.text:
            texts[number] = prompt_ids(tokenizer, each)
        else:
            said[number] = [turn for turn in each.turns if turn.role not in (USER, ASSISTANT)]
    if texts:
        written = _answer(target, list(texts.values()), options.distill_tokens, sampling, seed)
        for (number, opening), ids in zip(texts.items(), written, strict=True):
            whole = [*opening, *_without_end(target, ids)]
            texts[number] = tokenizer.decode(whole, skip_special_tokens=True)
    questions = {
        number: [turn for turn in conversations[number].turns if turn.role == USER]
        for number in said
    }
    for turn in range(max(map(len, questions.values()), default=0)):
        prompts = {}
        for number, turns in questions.items():
            if turn < len(turns) and len(said[number]) >= 2 * turn:  # all before were answered
                ids = _chat_ids(tokenizer, [*said[number], turns[turn]])
                if len(ids) + options.distill_tokens <= target.config.longest_text:
                    said[number].append(turns[turn])
                    prompts[number] = ids
        if not prompts:
            break
        written = _answer(
            target, list(prompts.values()), options.distill_tokens, sampling, seed + turn
        )
        for number, ids in zip(prompts, written, strict=True):
            answer = tokenizer.decode(_without_end(target, ids), skip_special_tokens=True)
            said[number].append(Turn(ASSISTANT, answer))
    return [
        Conversation(text=texts[number]) if number in texts else Conversation(tuple(said[number]))
        for number in range(len(conversations))
    ]


def _answer(
    target: Target,
    prompts: Sequence[Ids],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> Iterator[list[int]]:
    """The continuations of up to `BATCH` prompts, end tokens included; drafted by prompt lookup."""
    rows = [*prompts, *prompts[-1:] * (BATCH - len(prompts))]  # one shape
    out = speculative_generate(
        Params(target.params),
        from_ids(rows),
        jax.random.key(seed),
        target=target.model,
        drafter=PromptLookup(),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=target.eos,
    )
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.length)
    return (tokens[row, : lengths[row]].tolist() for row in range(len(prompts)))


def _chat_ids(tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    return encode_chat(tokenizer, chat_text(tokenizer, messages, is_answer_next=True))["input_ids"]


def prompt_ids(tokenizer: Any, conversation: Conversation) -> Ids:
    """What the target is asked first: all up to its first answer, or a plain text's opening."""
    if not conversation.text:
        first = [turn.role for turn in conversation.turns].index(USER)
        return _chat_ids(tokenizer, conversation.turns[: first + 1])
    ids = opening_ids(tokenizer, conversation.text)
    return ids[: max(2, round(len(ids) * OPENING_SHARE))]


def _without_end(target: Target, ids: list[int]) -> list[int]:
    return ids[:-1] if ids and ids[-1] in target.eos else ids


def _size(conversation: Conversation) -> int:
    return len(conversation.text) + sum(len(turn.text) for turn in conversation.turns)


def _checksum(conversations: Sequence[Conversation]) -> str:
    import hashlib

    text = json.dumps([_as_row(each) for each in conversations])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_row(conversation: Conversation) -> dict[str, Any]:
    if conversation.text:
        return {"text": conversation.text}
    return {"messages": [{"role": turn.role, "content": turn.text} for turn in conversation.turns]}


def _from_row(row: dict[str, Any]) -> Conversation:
    if "text" in row:
        return Conversation(text=row["text"])
    return Conversation(tuple(Turn(each["role"], each["content"]) for each in row["messages"]))


def _lines_of(file: Path, num_wanted: int) -> list[dict[str, Any]]:
    """The whole batches that `file` holds; cuts off what a stopped run left unfinished."""
    if not file.exists():
        return []
    with writable(file):
        whole = [line for line in file.read_bytes().splitlines(True) if line.endswith(b"\n")]
        if len(whole) < num_wanted:
            whole = whole[: len(whole) // BATCH * BATCH]
        file.write_bytes(b"".join(whole))
    return [json.loads(line) for line in whole]
