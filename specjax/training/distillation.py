"""Has the target write texts, which drafters learn from best.

HASS, appendix D; ParallelSpec, section 5.3; DISCO, appendix D. A file of answers grows batch by
batch, and the same request resumes it where it stopped.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from specjax.core.chat import TRAINING_DAY, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError
from specjax.core.files import writable
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget
from specjax.models.fingerprint import fingerprint
from specjax.training.conversations import (
    ASSISTANT,
    SYSTEM,
    USER,
    Conversation,
    Turn,
    Warn,
    prompts_of,
    to_stderr,
)
from specjax.training.ranges import check_at_least_one, check_not_negative
from specjax.training.run_folder import claim, keep_lines, whole_lines

BATCH = 8  # prompts that the target continues together
MIN_PROMPT = 2  # tokens
OPENING_SHARE = 0.25  # of a plain text, which the target then continues

Ids = Sequence[int]
Watch = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class DistillOptions:
    """How the target answers.

    Raises:
        SpecjaxError: for a value out of its range.
    """

    distill_temperature: float = 0.0
    """With --distill: the temperature at which the target answers."""
    distill_tokens: int = 256
    """With --distill: new tokens per answer at most."""
    distill_batch: int = 8
    """With --distill: prompts that are answered together."""

    def __post_init__(self):
        check_not_negative(self, "distill_temperature")
        check_at_least_one(self, "distill_tokens", "distill_batch")


def answers_of(
    target: LoadedTarget, max_new_tokens: int, watch: Watch = iter
) -> Callable[[Sequence[Ids]], list[list[int]]]:
    """Returns a function from prompts to greedy continuations; `watch` sees its progress."""

    def answers(prompts: Sequence[Ids]) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, list[int]] = {}
        for start in watch(range(0, len(order), BATCH)):
            numbers = order[start : start + BATCH]
            asked = [prompts[number] for number in numbers]
            asked += [asked[-1]] * (BATCH - len(asked))  # one shape
            texts = _answer(target, asked, max_new_tokens, Sampling(), jax.random.key(0))
            found |= dict(zip(numbers, texts, strict=False))
        return [found[number] for number in range(len(prompts))]

    return answers


def distill(
    target: LoadedTarget,
    conversations: Sequence[Conversation],
    file: Path,
    longest: int,
    options: DistillOptions = DistillOptions(),
    seed: int = 0,
    watch: Watch = iter,
    resume: bool = False,
    warn: Warn = to_stderr,
) -> list[Conversation]:
    """Replaces the answers in conversations by the target's own, turn after turn.

    The user's turns stay, up to the first that does not fit the target or that its chat template
    refuses; a plain text keeps its opening. Conversations without any answer are dropped. `file`
    gets a line per conversation, in a form that `read_conversations` reads; `file.json` beside it
    describes the request.

    Args:
        target: with a tokenizer.
        conversations: of which the user's turns are read.
        file: grows by a batch of lines at a time.
        longest: tokens of a text, its last answer included.
        options: how the target answers.
        seed: of the draws above temperature 0.
        watch: sees the batches go by.
        resume: continue `file` where it stopped.
        warn: called with the number of conversations that are dropped.

    Raises:
        SpecjaxError: if the target has no tokenizer or no room for answers, if the file cannot be
            written, is corrupt or holds the answers to another request, or if nothing is answered.
    """
    target.require_tokenizer()
    check_room(target, longest, options)
    request = asdict(options) | {
        "target": fingerprint(target.config, target.params),
        "longest": longest,
        "seed": seed,
        "prompts": _checksum(conversations),
    }
    with writable(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        claim(file.with_suffix(file.suffix + ".json"), request, resume)
    rows, size = _rows_of(file, len(conversations), options.distill_batch), options.distill_batch
    key = jax.random.key(seed)
    # Conversations of similar length go together, in the same batches each time.
    order = sorted(range(len(conversations)), key=lambda number: _size(conversations[number]))
    for start in watch(range(len(rows), len(order), size)):
        numbers = order[start : start + size]
        asked = [conversations[each] for each in numbers]
        texts = _answered(target, asked, longest, options, jax.random.fold_in(key, start))
        new = [
            {"number": number} | _as_row(text) for number, text in zip(numbers, texts, strict=True)
        ]
        with writable(file), file.open("a", encoding="utf-8") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in new))
        rows += new
    texts = [_from_row(row) for row in sorted(rows, key=itemgetter("number"))]
    return _answered_only(texts, warn)


def check_room(target: LoadedTarget, longest: int, options: DistillOptions) -> None:
    """Raises SpecjaxError if no prompt can be answered within `longest` tokens."""
    room = min(longest, target.config.longest_text)
    if room - options.distill_tokens < MIN_PROMPT:
        raise SpecjaxError(
            f"distill_tokens {options.distill_tokens} leaves no room for a prompt in texts of "
            f"{room} tokens; lower --distill-tokens, or raise --longest"
        )


def _answered_only(texts: Sequence[Conversation | None], warn: Warn) -> list[Conversation]:
    kept = [text for text in texts if text is not None]
    why = "too long to answer, or refused by the chat template"
    if not kept:
        raise SpecjaxError(
            f"none of {len(texts)} conversations is answered: {why}; lower --distill-tokens, or "
            "give other data"
        )
    if len(kept) < len(texts):
        warn(f"Skipped {len(texts) - len(kept)} of {len(texts)} conversations: {why}.")
    return kept


# ---- One batch -----------------------------------------------------------------------------------


def _answered(
    target: LoadedTarget,
    conversations: Sequence[Conversation],
    longest: int,
    options: DistillOptions,
    key: Key[Array, ""],
) -> list[Conversation | None]:
    """Continues texts and answers questions in their order; None where nothing is answered."""
    sampling, new_tokens = Sampling(options.distill_temperature), options.distill_tokens
    found: list[Conversation | None] = [None] * len(conversations)
    num_turns = max(len(prompts_of(each)) for each in conversations)
    for turn in range(max(1, num_turns)):  # a plain text has none, and is continued once
        prompts = {
            number: prompt
            for number, each in enumerate(conversations)
            if (prompt := prompt_of(target, each, longest, new_tokens, found[number]))
        }
        if not prompts:
            break
        asked = list(prompts.values())
        asked += [asked[-1]] * (options.distill_batch - len(asked))  # one shape
        turn_key = jax.random.fold_in(key, turn)
        written = _answer(target, asked, new_tokens, sampling, turn_key)[: len(prompts)]
        for (number, prompt), ids in zip(prompts.items(), written, strict=True):
            found[number] = _with_answer(target, conversations[number], found[number], prompt, ids)
    return found


def _next_turns(asked: Conversation, so_far: Conversation | None) -> list[Turn]:
    """Returns the turns so far and the next question; [] if there is none."""
    turns = [turn for turn in asked.turns[:1] if turn.role == SYSTEM]
    if so_far is not None:
        turns = list(so_far.turns)
    questions = prompts_of(asked)[sum(turn.role == ASSISTANT for turn in turns) :]
    return [*turns, Turn(USER, questions[0])] if questions else []


def prompt_of(
    target: LoadedTarget,
    asked: Conversation,
    longest: int,
    max_new_tokens: int,
    so_far: Conversation | None = None,
) -> Ids:
    """Tokenizes a prompt for the target: a conversation up to its next answer, or a text's opening.

    Args:
        target: with a tokenizer.
        asked: the user's turns, or a text.
        longest: tokens of prompt and continuation together, within the target's positions.
        max_new_tokens: of the continuation.
        so_far: the same with answers; None before the first one.

    Returns:
        Token ids; () if there is no question, no room, or if the chat template refuses it.
    """
    tokenizer = target.require_tokenizer()
    room = min(longest, target.config.longest_text) - max_new_tokens
    if asked.text:
        ids = opening_ids(tokenizer, asked.text) if so_far is None else ()
        length = min(room, max(MIN_PROMPT, round(len(ids) * OPENING_SHARE)))
        return ids[:length] if min(length, len(ids)) >= MIN_PROMPT else ()
    turns = _next_turns(asked, so_far)
    messages = [{"role": turn.role, "content": turn.text} for turn in turns]
    if not messages:
        return ()
    try:
        text = chat_text(tokenizer, messages, is_answer_next=True, today=TRAINING_DAY)
    except SpecjaxError:
        return ()
    ids = encode_chat(tokenizer, text, verbose=False)["input_ids"]
    return ids if len(ids) <= room else ()


def _with_answer(
    target: LoadedTarget, asked: Conversation, so_far: Conversation | None, prompt: Ids, answer: Ids
) -> Conversation | None:
    tokenizer = target.require_tokenizer()
    if answer and answer[-1] in target.eos:
        answer = answer[:-1]
    ids = [*prompt, *answer] if asked.text else answer
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if asked.text:
        return Conversation(text=text) if text else None
    return Conversation((*_next_turns(asked, so_far), Turn(ASSISTANT, text)))


def _answer(
    target: LoadedTarget,
    prompts: Sequence[Ids],
    max_new_tokens: int,
    sampling: Sampling,
    key: Key[Array, ""],
) -> list[list[int]]:
    """Continues all prompts at once, with prompt lookup; end tokens are included."""
    out = speculative_generate(
        Params(target.params),
        from_ids(prompts),
        key,
        target=target.model,
        drafter=PromptLookup(),
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=target.eos,
    )
    tokens, lengths = np.asarray(out.tokens), np.asarray(out.length)
    return [tokens[row, : lengths[row]].tolist() for row in range(len(prompts))]


# ---- Rows of the file ----------------------------------------------------------------------------


def _size(conversation: Conversation) -> int:
    return len(conversation.text) + sum(len(turn.text) for turn in conversation.turns)


def _checksum(conversations: Sequence[Conversation]) -> str:
    text = json.dumps([_as_row(each) for each in conversations])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_row(conversation: Conversation | None) -> dict[str, Any]:
    if conversation is None:
        return {"messages": []}
    if conversation.text:
        return {"text": conversation.text}
    return {"messages": [{"role": turn.role, "content": turn.text} for turn in conversation.turns]}


def _from_row(row: dict[str, Any]) -> Conversation | None:
    if "text" in row:
        return Conversation(text=row["text"])
    turns = tuple(Turn(each["role"], each["content"]) for each in row["messages"])
    return Conversation(turns) if turns else None


def _rows_of(file: Path, num_wanted: int, size: int) -> list[dict[str, Any]]:
    """Reads the whole batches in `file`; cuts off an unfinished one."""
    lines = whole_lines(file)
    if len(lines) < num_wanted:
        lines = lines[: len(lines) // size * size]
    keep_lines(file, lines)
    try:
        rows = [json.loads(line) for line in lines]
        for row in rows:  # each is a conversation with its number
            _from_row(row)
            int(row["number"])
        return rows
    except (ValueError, KeyError, TypeError) as error:
        raise SpecjaxError(f"{file} is corrupt ({error}); delete it and distill again") from None
