"""Training of drafters: one loop for all, one objective per kind.

Names are imported when they are first used: loading a drafter does not import what trains one.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specjax.training.conversations import Conversation, Turn, read_conversations
    from specjax.training.data import DataOptions, batches
    from specjax.training.examples import Example, tokenize_all
    from specjax.training.heads import HeadSettings, train_head
    from specjax.training.loop import LoopOptions, Trained, train
    from specjax.training.objectives.base import FrozenModel, HeadTraining, Step
    from specjax.training.optimizer import OptimizerOptions

__all__ = [
    # data
    "Conversation",
    "Turn",
    "read_conversations",
    "Example",
    "tokenize_all",
    "DataOptions",
    "batches",
    # train
    "HeadSettings",
    "train_head",
    "LoopOptions",
    "OptimizerOptions",
    "Trained",
    "train",
    # write an objective
    "FrozenModel",
    "HeadTraining",
    "Step",
]

_HOMES = {
    "conversations": ("Conversation", "Turn", "read_conversations"),
    "data": ("DataOptions", "batches"),
    "examples": ("Example", "tokenize_all"),
    "heads": ("HeadSettings", "train_head"),
    "loop": ("LoopOptions", "Trained", "train"),
    "objectives.base": ("FrozenModel", "HeadTraining", "Step"),
    "optimizer": ("OptimizerOptions",),
}


def __getattr__(name: str):
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
