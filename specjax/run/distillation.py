"""Generates training texts with the target (self-distillation), from which drafters learn best.

HASS, appendix D; ParallelSpec, section 5.3; DISCO, appendix D. A file of answers grows line by
line, and the same request resumes it where it stopped.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array, Key

from specjax.core.chat import FIXED_DAY, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError, warn
from specjax.core.folder import RunFolder
from specjax.core.settings import Checked, setting
from specjax.core.text import UNFINISHED, decode
from specjax.data.conversations import (
    ASSISTANT,
    SYSTEM,
    USER,
    Conversation,
    Turn,
    conversation_of,
    messages_of,
)
from specjax.decoding.continuous import QueuedPrompt, generate_many
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget
from specjax.models.fingerprint import fingerprint
from specjax.training.examples import PLACEHOLDERS

MIN_PROMPT = 2  # tokens
OPENING_SHARE = 0.25  # of a plain text, which the target then continues

Ids = Sequence[int]
Watch = Callable[[Iterable[int]], Iterable[int]]
Numbered = Iterator[tuple[int, Conversation | None]]  # None: without an answer


@dataclass(frozen=True)
class DistillOptions(Checked):
    """Options of the target's answers."""

    distill_temperature: float = setting(0.0, at_least=0)
    """The temperature at which the target answers."""
    distill_tokens: int = setting(256, at_least=1)
    """New tokens per answer at most."""
    distill_batch: int = setting(32, at_least=1)
    """Prompts that are answered at once; the answers do not depend on it."""


def answers_of(
    target: LoadedTarget, max_new_tokens: int, watch: Watch = iter
) -> Callable[[Sequence[Ids]], list[list[int]]]:
    """Returns a function from prompts to greedy continuations; `watch` sees its progress."""

    def answer(prompts: Sequence[Ids]) -> list[list[int]]:
        key = jax.random.key(0)
        queue = [QueuedPrompt(number, tuple(ids), key) for number, ids in enumerate(prompts)]
        done = _generate(target, queue, DistillOptions(0.0, max_new_tokens))
        done = zip(watch(range(len(prompts))), done, strict=True)
        answers = {prompt.name: ids for _, (prompt, ids) in done}
        return [answers[number] for number in range(len(prompts))]

    return answer


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
    """Replaces the answers in conversations by the target's, turn after turn.

    The user's turns stay, up to the first that does not fit in `longest` tokens, that the chat
    template rejects, or that follows an answer cut off at `distill_tokens`; a plain text keeps its
    opening. Conversations without any answer are dropped. `file` gets a line per conversation that
    `read_conversations` reads, as each is done; `file.json` beside it describes the request.
    Answers depend on the seed and the conversation's number, not on batching.
    """
    target.require_tokenizer()
    check_room(target, longest, options)
    records = json.dumps([record_of(conversation) for conversation in conversations])
    request = {
        "distill_temperature": options.distill_temperature,
        "distill_tokens": options.distill_tokens,
        **_model(target),
        "longest": longest,
        "seed": seed,
        "prompts": _digest(records),
    }

    def produce(numbers: Sequence[int]) -> Numbered:
        chosen = {number: conversations[number] for number in numbers}
        return _answer_all(target, chosen, longest, options, jax.random.key(seed))

    texts = _complete(file, request, resume, len(conversations), produce, watch)
    answered = [text for text in texts if text is not None]
    reason = "too long to answer, or rejected by the chat template"
    if not answered:
        raise SpecjaxError(
            f"none of {len(texts)} conversations is answered: {reason}; lower --distill-tokens, or "
            "give other data"
        )
    if num_skipped := len(texts) - len(answered):
        warn(f"skipped {num_skipped} of {len(texts)} conversations: {reason}")
    return answered


def generate_questions(
    target: LoadedTarget,
    count: int,
    file: Path,
    options: DistillOptions = DistillOptions(),
    seed: int = 0,
    watch: Watch = iter,
    resume: bool = False,
) -> list[Conversation]:
    """Generates the user's turn of `count` conversations with the target, at temperature 1.

    Questions that are empty or longer than `distill_tokens` are dropped. `file` grows as in
    `distill`.
    """
    tokenizer, key = target.require_tokenizer(), jax.random.key(seed)
    ids = opening_of_question(target)

    def produce(numbers: Sequence[int]) -> Numbered:
        queue = [QueuedPrompt(number, ids, jax.random.fold_in(key, number)) for number in numbers]
        at_temperature_1 = DistillOptions(1.0, options.distill_tokens, options.distill_batch)
        for prompt, new_ids in _generate(target, queue, at_temperature_1):
            text = decode(tokenizer, new_ids[:-1]).strip()
            is_whole = text and new_ids[-1] in target.eos
            yield prompt.name, Conversation((Turn(USER, text),)) if is_whole else None

    request = {"distill_tokens": options.distill_tokens, "seed": seed, **_model(target)}
    questions = [text for text in _complete(file, request, resume, count, produce, watch) if text]
    if not questions:
        raise SpecjaxError(f"{target.name} generated no whole question; give --data a file")
    return questions


def opening_of_question(target: LoadedTarget) -> tuple[int, ...]:
    """Returns the tokens after which the target writes a user's question."""
    tokenizer, mark = target.require_tokenizer(), chr(PLACEHOLDERS[0])
    question = [{"role": USER, "content": mark}]
    before, has_mark, _ = chat_text(tokenizer, question, today=FIXED_DAY).partition(mark)
    ids = tuple(encode_chat(tokenizer, before)["input_ids"])
    if not has_mark or len(ids) < MIN_PROMPT:
        raise SpecjaxError(
            f"the chat template of {target.name} does not show where a question begins, so the "
            "target cannot generate questions; give --data a file"
        )
    return ids


def _model(target: LoadedTarget) -> dict[str, str]:
    """Returns what decides a target's texts."""
    model, template = fingerprint(target.config, target.params), target.tokenizer.chat_template
    names = {"target": model, "dtype": target.dtype_name}
    return names | {"chat_template": _digest(json.dumps(template))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _complete(
    file: Path,
    request: Mapping[str, Any],
    resume: bool,
    count: int,
    produce: Callable[[Sequence[int]], Numbered],
    watch: Watch,
) -> list[Conversation | None]:
    """Returns conversations 0 to `count` - 1 of a file, after appending those that are missing."""
    folder = RunFolder(file.parent, f"{file.name}.json", f".{file.name}.lock")
    with folder.lock():
        folder.claim(request, resume)
        folder.truncate(file.name)
        texts = dict(folder.records(file.name, lambda line: (int(line["number"]), _parse(line))))
        missing = [number for number in range(count) if number not in texts]
        for _, (number, text) in zip(watch(missing), produce(missing), strict=True):
            folder.append(file.name, {"number": number} | record_of(text))
            texts[number] = text
    return [texts[number] for number in range(count)]


def record_of(conversation: Conversation | None) -> dict[str, Any]:
    """Returns a line of a file of answers; `read_conversations` skips one without turns."""
    if conversation is not None and conversation.text:
        return {"text": conversation.text}
    turns, is_cut = (conversation.turns, conversation.is_cut) if conversation else ((), False)
    return {"messages": messages_of(turns)} | ({"is_cut": True} if is_cut else {})


def _parse(record: dict[str, Any]) -> Conversation | None:
    return None if record.get("messages") == [] else conversation_of(record)


def check_room(target: LoadedTarget, longest: int, options: DistillOptions) -> None:
    """Raises SpecjaxError if no prompt can be answered within `longest` tokens."""
    room = min(longest, target.config.longest_text)
    if room - options.distill_tokens < MIN_PROMPT:
        raise SpecjaxError(
            f"distill_tokens {options.distill_tokens} leaves no room for a prompt in texts of "
            f"{room} tokens; lower --distill-tokens, or raise --longest"
        )


# ---- Answers -------------------------------------------------------------------------------------


def _answer_all(
    target: LoadedTarget,
    conversations: Mapping[int, Conversation],
    longest: int,
    options: DistillOptions,
    key: Key[Array, ""],
) -> Numbered:
    """Continues texts, and answers questions in their order; yields each conversation once done."""
    answered: dict[int, Conversation | None] = {}

    def next_prompt(number: int) -> QueuedPrompt | None:
        so_far = answered.get(number)
        if so_far is not None and so_far.is_cut:
            return None
        turn = 0 if so_far is None else len(so_far.turns)
        ids = prompt_of(target, conversations[number], longest, options.distill_tokens, so_far)
        turn_key = jax.random.fold_in(jax.random.fold_in(key, number), turn)
        return QueuedPrompt(number, tuple(ids), turn_key) if ids else None

    queue: list[QueuedPrompt] = []
    for number in conversations:
        if queued := next_prompt(number):
            queue.append(queued)
        else:
            yield number, None
    for prompt, ids in _generate(target, queue, options):
        number, so_far = prompt.name, answered.get(prompt.name)
        answered[number] = with_answer(target, conversations[number], so_far, prompt.ids, ids)
        is_empty = answered[number] is None  # the same prompt would give the same again
        if not is_empty and (follow_up := next_prompt(number)):
            queue.append(follow_up)
        else:
            yield number, answered[number]


def _next_turns(conversation: Conversation, so_far: Conversation | None) -> list[Turn]:
    """Returns the turns so far and the next question; [] if there is none."""
    turns = [turn for turn in conversation.turns[:1] if turn.role == SYSTEM]
    turns = turns if so_far is None else list(so_far.turns)
    questions = conversation.questions[sum(turn.role == ASSISTANT for turn in turns) :]
    return [*turns, Turn(USER, questions[0])] if questions else []


def prompt_of(
    target: LoadedTarget,
    conversation: Conversation,
    longest: int,
    max_new_tokens: int,
    so_far: Conversation | None = None,
) -> Ids:
    """Tokenizes a prompt for the target: a conversation up to its next answer, or a text's opening.

    `so_far` holds the answers before. Returns () if there is no question, if prompt and answer do
    not fit in `longest` tokens or the target's positions, or if the chat template rejects the
    messages.
    """
    tokenizer = target.require_tokenizer()
    room = min(longest, target.config.longest_text) - max_new_tokens
    if conversation.text:
        ids = opening_ids(tokenizer, conversation.text) if so_far is None else ()
        length = min(room, max(MIN_PROMPT, round(len(ids) * OPENING_SHARE)))
        while length > 0 and decode(tokenizer, ids[:length]).endswith(UNFINISHED):
            length -= 1  # part of a character would be learned
        ids = ids[:length] if min(length, len(ids)) >= MIN_PROMPT else ()
        return ids if len(ids) + max_new_tokens <= target.config.longest_from(len(ids)) else ()
    turns = _next_turns(conversation, so_far)
    if not turns:
        return ()
    try:
        text = chat_text(tokenizer, messages_of(turns), is_answer_next=True, today=FIXED_DAY)
    except SpecjaxError:
        return ()
    ids = encode_chat(tokenizer, text, verbose=False)["input_ids"]
    end = len(ids) + max_new_tokens
    return ids if end <= min(longest, target.config.longest_from(len(ids))) else ()


def with_answer(
    target: LoadedTarget,
    conversation: Conversation,
    so_far: Conversation | None,
    prompt: Ids,
    answer: Ids,
) -> Conversation | None:
    """Appends the answer to a conversation, or to a plain text, which is None if it is blank."""
    is_cut = not answer or answer[-1] not in target.eos
    answer = answer if is_cut else answer[:-1]
    ids = [*prompt, *answer] if conversation.text else answer
    text = decode(target.require_tokenizer(), ids)
    text = text.rstrip(UNFINISHED) if is_cut else text  # part of a character would be learned
    if conversation.text:
        return Conversation(text=text) if text.strip() else None
    turns = _next_turns(conversation, so_far)
    return Conversation((*turns, Turn(ASSISTANT, text)), is_cut=is_cut)


def _generate(
    target: LoadedTarget, queue: list[QueuedPrompt], options: DistillOptions
) -> Iterator[tuple[QueuedPrompt, list[int]]]:
    return generate_many(
        target.params,
        queue,
        target=target.model.clone(padded_width=0),  # a single method needs no padding
        sampling=Sampling(options.distill_temperature),
        max_new_tokens=options.distill_tokens,
        eos=target.eos,
        batch_size=options.distill_batch,
    )
