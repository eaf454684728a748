"""Has the target write texts, which drafters learn from best.

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

from specjax.core.chat import TRAINING_DAY, chat_text, encode_chat, opening_ids
from specjax.core.errors import SpecjaxError, warn
from specjax.core.folder import RunFolder
from specjax.core.settings import check_fields, setting
from specjax.data.conversations import ASSISTANT, SYSTEM, USER, Conversation, Turn, messages_of
from specjax.decoding.continuous import QueuedPrompt, generate_many
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget
from specjax.models.fingerprint import fingerprint
from specjax.training.examples import PLACEHOLDERS

MIN_PROMPT = 2  # tokens
OPENING_SHARE = 0.25  # of a plain text, which the target then continues

Ids = Sequence[int]
Watch = Callable[[Iterable[int]], Iterable[int]]
Rows = Iterator[tuple[int, Conversation | None]]  # numbered; None: nothing was said


@dataclass(frozen=True)
class DistillOptions:
    """Options of the target's answers."""

    distill_temperature: float = setting(0.0, at_least=0)
    """The temperature at which the target answers."""
    distill_tokens: int = setting(256, at_least=1)
    """New tokens per answer at most."""
    distill_batch: int = setting(32, at_least=1)
    """Prompts that are answered at once; the answers do not depend on it."""

    def __post_init__(self):
        check_fields(self)


def answers_of(
    target: LoadedTarget, max_new_tokens: int, watch: Watch = iter
) -> Callable[[Sequence[Ids]], list[list[int]]]:
    """Returns a function from prompts to greedy continuations; `watch` sees its progress."""

    def answers(prompts: Sequence[Ids]) -> list[list[int]]:
        key = jax.random.key(0)
        queue = [QueuedPrompt(number, tuple(ids), key) for number, ids in enumerate(prompts)]
        done = _continued(target, queue, Sampling(), max_new_tokens, DistillOptions.distill_batch)
        found = {
            ask.name: ids for _, (ask, ids) in zip(watch(range(len(prompts))), done, strict=True)
        }
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

    The user's turns stay, up to the first that does not fit the target, that its chat template
    refuses, or that follows an answer cut off at `distill_tokens`; a plain text keeps its opening.
    Conversations without any answer are dropped. `file` gets a line per conversation, in a form
    that `read_conversations` reads, as each is done; `file.json` beside it describes the request.
    What is said depends on the seed and on the conversation's number, not on the batch. `longest`
    bounds the tokens of a text, its last answer included; `watch` sees the conversations go by.

    Raises:
        SpecjaxError: if the target has no tokenizer or no room for answers, if the file cannot be
            written, is corrupt or holds the answers to another request, or if nothing is answered.
    """
    target.require_tokenizer()
    check_room(target, longest, options)
    request = {
        "distill_temperature": options.distill_temperature,
        "distill_tokens": options.distill_tokens,
        "target": fingerprint(target.config, target.params),
        "longest": longest,
        "seed": seed,
        "prompts": _checksum(conversations),
    }

    def produce(numbers: Sequence[int]) -> Rows:
        asked = {number: conversations[number] for number in numbers}
        return _answered(target, asked, longest, options, jax.random.key(seed))

    texts = _grown(file, request, resume, len(conversations), produce, watch)
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


def own_questions(
    target: LoadedTarget,
    count: int,
    file: Path,
    options: DistillOptions = DistillOptions(),
    seed: int = 0,
    watch: Watch = iter,
    resume: bool = False,
) -> list[Conversation]:
    """Has the target write the user's turn of `count` conversations, at temperature 1.

    A chat model has learned user turns as well, so its own need no data. Those that are empty or
    longer than `distill_tokens` are dropped. `file` grows as in `distill`.

    Raises:
        SpecjaxError: if the target has no tokenizer, its chat template does not say where the
            user's text begins, the file is corrupt or of another request, or nothing is left.
    """
    tokenizer, mark = target.require_tokenizer(), chr(PLACEHOLDERS[0])
    before, found, _ = chat_text(
        tokenizer, [{"role": USER, "content": mark}], today=TRAINING_DAY
    ).partition(mark)
    ids = tuple(encode_chat(tokenizer, before)["input_ids"])
    if not found or len(ids) < MIN_PROMPT:
        raise SpecjaxError(
            f"the chat template of {target.name} does not show where a question begins, so it "
            "cannot write its own; give --data a file"
        )
    key = jax.random.key(seed)

    def produce(numbers: Sequence[int]) -> Rows:
        queue = [QueuedPrompt(number, ids, jax.random.fold_in(key, number)) for number in numbers]
        size, tokens = options.distill_batch, options.distill_tokens
        for ask, said in _continued(target, queue, Sampling(1.0), tokens, size):
            text = tokenizer.decode(said[:-1], skip_special_tokens=True).strip()
            is_whole = text and said[-1] in target.eos
            yield ask.name, Conversation((Turn(USER, text),)) if is_whole else None

    request = {
        "distill_tokens": options.distill_tokens,
        "target": fingerprint(target.config, target.params),
        "seed": seed,
    }
    asked = [each for each in _grown(file, request, resume, count, produce, watch) if each]
    if not asked:
        raise SpecjaxError(f"{target.name} wrote no question that ends; give --data a file")
    return asked


def _grown(
    file: Path,
    request: Mapping[str, Any],
    resume: bool,
    count: int,
    produce: Callable[[Sequence[int]], Rows],
    watch: Watch,
) -> list[Conversation | None]:
    """Returns the rows 0 to `count` - 1 of a file, after producing and appending those missing."""
    folder = RunFolder(file.parent, f"{file.name}.json", f".{file.name}.lock")
    with folder.lock():
        folder.claim(request, resume)
        folder.truncate(file.name)
        texts = dict(folder.records(file.name, lambda row: (int(row["number"]), _from_row(row))))
        left = [number for number in range(count) if number not in texts]
        for _, (number, text) in zip(watch(left), produce(left), strict=True):
            folder.append(file.name, {"number": number} | _as_row(text))
            texts[number] = text
    return [texts[number] for number in range(count)]


def check_room(target: LoadedTarget, longest: int, options: DistillOptions) -> None:
    """Raises SpecjaxError if no prompt can be answered within `longest` tokens."""
    room = min(longest, target.config.longest_text)
    if room - options.distill_tokens < MIN_PROMPT:
        raise SpecjaxError(
            f"distill_tokens {options.distill_tokens} leaves no room for a prompt in texts of "
            f"{room} tokens; lower --distill-tokens, or raise --longest"
        )


# ---- Answers -------------------------------------------------------------------------------------


def _answered(
    target: LoadedTarget,
    conversations: Mapping[int, Conversation],
    longest: int,
    options: DistillOptions,
    key: Key[Array, ""],
) -> Rows:
    """Continues texts and answers questions in their order; yields each conversation once done."""
    new_tokens = options.distill_tokens
    found: dict[int, Conversation | None] = {}

    def next_ask(number: int) -> QueuedPrompt | None:
        asked, so_far = conversations[number], found.get(number)
        if so_far is not None and so_far.is_cut:
            return None
        turn = 0 if so_far is None else len(so_far.turns)
        ids = prompt_of(target, asked, longest, new_tokens, so_far)
        own_key = jax.random.fold_in(jax.random.fold_in(key, number), turn)
        return QueuedPrompt(number, tuple(ids), own_key) if ids else None

    queue: list[QueuedPrompt] = []
    for number in conversations:
        if ask := next_ask(number):
            queue.append(ask)
        else:
            yield number, None
    sampling = Sampling(options.distill_temperature)
    for ask, ids in _continued(target, queue, sampling, new_tokens, options.distill_batch):
        number = ask.name
        asked, so_far = conversations[number], found.get(number)
        found[number] = _with_answer(target, asked, so_far, ask.ids, ids)
        if follow_up := next_ask(number):
            queue.append(follow_up)
        else:
            yield number, found[number]


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
    is_cut = not answer or answer[-1] not in target.eos
    answer = answer if is_cut else answer[:-1]
    ids = [*prompt, *answer] if asked.text else answer
    text = target.require_tokenizer().decode(ids, skip_special_tokens=True)
    if asked.text:
        return Conversation(text=text) if text else None
    return Conversation((*_next_turns(asked, so_far), Turn(ASSISTANT, text)), is_cut=is_cut)


def _continued(
    target: LoadedTarget,
    queue: list[QueuedPrompt],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[QueuedPrompt, list[int]]]:
    model = target.model.clone(padded_width=0)  # a single method needs no padding
    return generate_many(
        target.params,
        queue,
        target=model,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=target.eos,
        batch_size=batch_size,
    )


# ---- Rows of the file ----------------------------------------------------------------------------


def _checksum(conversations: Sequence[Conversation]) -> str:
    text = json.dumps([_as_row(each) for each in conversations])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _as_row(conversation: Conversation | None) -> dict[str, Any]:
    if conversation is None:
        return {"messages": []}
    if conversation.text:
        return {"text": conversation.text}
    row: dict[str, Any] = {"messages": messages_of(conversation.turns)}
    return row | {"is_cut": True} if conversation.is_cut else row


def _from_row(row: dict[str, Any]) -> Conversation | None:
    if "text" in row:
        return Conversation(text=row["text"])
    turns = tuple(Turn(each["role"], each["content"]) for each in row["messages"])
    return Conversation(turns, is_cut=row.get("is_cut", False)) if turns else None
