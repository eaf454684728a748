"""What drafters for pocket learn from: edit tasks as conversations, and plain code.

Both are of the training modules only; what `bench` and `tune` measure on is held out.
"""

import random

from specjax.pocket import corpus
from specjax.pocket.edits import KINDS, EditTask, make_edit
from specjax.training.conversations import ASSISTANT, USER, Conversation, Turn

EDIT_SHARE = 0.8
WINDOW_CHARACTERS = 1500  # of plain code at most


def pocket_conversations(
    count: int, seed: int = 0, edit_share: float = EDIT_SHARE, max_characters: int = 900
) -> tuple[Conversation, ...]:
    """`count` conversations, each decided by the seed and its own number.

    Args:
        count: how many.
        seed: decides which.
        edit_share: how many of them, from 0 to 1, are edit tasks; the others are plain code.
        max_characters: of the code that an edit task shows.
    """
    pieces = [piece for piece in corpus.pieces(held_out=False) if len(piece) <= max_characters]
    made = []
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        is_edit = rng.random() < edit_share
        made.append(as_conversation(_task(pieces, rng)) if is_edit else _code(rng))
    return tuple(made)


def as_conversation(task: EditTask) -> Conversation:
    """The message in which pocket was taught such tasks, and the edited code as its answer."""
    message = f"{task.instruction}\n{task.source}"
    return Conversation((Turn(USER, message), Turn(ASSISTANT, task.result)))


def _task(pieces: list[str], rng: random.Random) -> EditTask:
    """The kinds are equally likely; of each, any piece that allows it."""
    kind = rng.choice(KINDS)
    while True:
        task = make_edit(kind, rng.choice(pieces), rng)
        if task is not None:
            return task


def _code(rng: random.Random) -> Conversation:
    """Some lines; the longer a module, the likelier they are its own."""
    modules = corpus.module_texts(held_out=False)
    [text] = rng.choices(modules, weights=list(map(len, modules)))
    start = rng.randrange(max(1, len(text) - WINDOW_CHARACTERS))
    start = text.rfind("\n", 0, start) + 1
    return Conversation(text=text[start : start + WINDOW_CHARACTERS])
