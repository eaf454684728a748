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
from specjax.core.errors import SpecjaxError, warn
from specjax.core.files import locked, writable
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.decoding.sampling import Sampling
from specjax.hub import LoadedTarget
from specjax.models.fingerprint import fingerprint
from specjax.training.conversations import ASSISTANT, SYSTEM, USER, Conversation, Turn, messages_of
from specjax.training.ranges import check_at_least_one, check_not_negative
from specjax.training.run_folder import claim, keep_lines, whole_lines

BATCH = 8  # prompts that the target continues together
MIN_PROMPT = 2  # tokens
OPENING_SHARE = 0.25  # of a plain text, which the target then continues

Ids = Sequence[int]
Watch = Callable[[Iterable[int]], Iterable[int]]


@dataclass(frozen=True)
class DistillOptions:
    """Options of the target's answers; values out of range are refused."""

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
            texts = _answer(target, asked, BATCH, max_new_tokens, Sampling(), jax.random.key(0))
            found |= dict(zip(numbers, texts, strict=True))
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
) -> list[Conversation]:
    """Replaces the answers in conversations by the target's own, turn after turn.

    The user's turns stay, up to the first that does not fit the target or that its chat template
    refuses; a plain text keeps its opening. Conversations without any answer are dropped. `file`
    gets a line per conversation, in a form that `read_conversations` reads, batch by batch;
    `file.json` beside it describes the request. `longest` bounds the tokens of a text, its last
    answer included; `watch` sees the batches go by.

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
    # Conversations of similar length go together, in the same batches each time.
    order = sorted(range(len(conversations)), key=lambda number: conversations[number].size)
    key, size = jax.random.key(seed), options.distill_batch
    with writable(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent, f".{file.name}.lock"):
        with writable(file):
            claim(file.with_suffix(file.suffix + ".json"), request, resume)
        rows = _rows_of(file, len(conversations), size)
        for start in watch(range(len(rows), len(order), size)):
            numbers = order[start : start + size]
            asked = [conversations[each] for each in numbers]
            texts = _answered(target, asked, longest, options, jax.random.fold_in(key, start))
            numbered = zip(numbers, texts, strict=True)
            new = [{"number": number} | _as_row(text) for number, text in numbered]
            with writable(file), file.open("a", encoding="utf-8") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in new))
            rows += new
    texts = [_from_row(row) for row in sorted(rows, key=itemgetter("number"))]
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


def check_room(target: LoadedTarget, longest: int, options: DistillOptions) -> None:
    """Raises SpecjaxError if no prompt can be answered within `longest` tokens."""
    room = min(longest, target.config.longest_text)
    if room - options.distill_tokens < MIN_PROMPT:
        raise SpecjaxError(
            f"distill_tokens {options.distill_tokens} leaves no room for a prompt in texts of "
            f"{room} tokens; lower --distill-tokens, or raise --longest"
        )


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
    num_turns = max(len(each.questions) for each in conversations)
    for turn in range(max(1, num_turns)):  # a plain text has none, and is continued once
        prompts = {
            number: prompt
            for number, each in enumerate(conversations)
            if (prompt := prompt_of(target, each, longest, new_tokens, found[number]))
        }
        if not prompts:
            break
        asked, turn_key = list(prompts.values()), jax.random.fold_in(key, turn)
        answers = _answer(target, asked, options.distill_batch, new_tokens, sampling, turn_key)
        for (number, prompt), ids in zip(prompts.items(), answers, strict=True):
            found[number] = _with_answer(target, conversations[number], found[number], prompt, ids)
    return found


def _next_turns(asked: Conversation, so_far: Conversation | None) -> list[Turn]:
    """Returns the turns so far and the next question; [] if there is none."""
    turns = [turn for turn in asked.turns[:1] if turn.role == SYSTEM]
    turns = turns if so_far is None else list(so_far.turns)
    questions = asked.questions[sum(turn.role == ASSISTANT for turn in turns) :]
    return [*turns, Turn(USER, questions[0])] if questions else []


def prompt_of(
    target: LoadedTarget,
    asked: Conversation,
    longest: int,
    max_new_tokens: int,
    so_far: Conversation | None = None,
) -> Ids:
    """Tokenizes a prompt for the target: a conversation up to its next answer, or a text's opening.

    Prompt and continuation together have at most `longest` tokens, and fit the target's positions.
    `so_far` holds the answers before. Returns () if there is no question, no room, or if the chat
    template refuses it.
    """
    tokenizer = target.require_tokenizer()
    room = min(longest, target.config.longest_text) - max_new_tokens
    if asked.text:
        ids = opening_ids(tokenizer, asked.text) if so_far is None else ()
        length = min(room, max(MIN_PROMPT, round(len(ids) * OPENING_SHARE)))
        return ids[:length] if min(length, len(ids)) >= MIN_PROMPT else ()
    turns = _next_turns(asked, so_far)
    if not turns:
        return ()
    try:
        text = chat_text(tokenizer, messages_of(turns), is_answer_next=True, today=TRAINING_DAY)
    except SpecjaxError:
        return ()
    ids = encode_chat(tokenizer, text, verbose=False)["input_ids"]
    return ids if len(ids) <= room else ()


def _with_answer(
    target: LoadedTarget, asked: Conversation, so_far: Conversation | None, prompt: Ids, answer: Ids
) -> Conversation | None:
    if answer and answer[-1] in target.eos:
        answer = answer[:-1]
    ids = [*prompt, *answer] if asked.text else answer
    text = target.require_tokenizer().decode(ids, skip_special_tokens=True)
    if asked.text:
        return Conversation(text=text) if text else None
    return Conversation((*_next_turns(asked, so_far), Turn(ASSISTANT, text)))


def _answer(
    target: LoadedTarget,
    prompts: Sequence[Ids],
    batch_size: int,
    max_new_tokens: int,
    sampling: Sampling,
    key: Key[Array, ""],
) -> list[list[int]]:
    """Continues up to `batch_size` prompts at once, by prompt lookup; end tokens are included."""
    filling = [prompts[-1]] * (batch_size - len(prompts))  # so that all batches have one shape
    out = speculative_generate(
        Params(target.params),
        from_ids([*prompts, *filling]),
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


def _checksum(conversations: Sequence[Conversation]) -> str:
    text = json.dumps([_as_row(each) for each in conversations])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_row(conversation: Conversation | None) -> dict[str, Any]:
    if conversation is None:
        return {"messages": []}
    if conversation.text:
        return {"text": conversation.text}
    return {"messages": messages_of(conversation.turns)}


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
