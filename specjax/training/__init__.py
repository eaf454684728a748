"""Training of drafters: one loop for all, one objective per kind."""

from specjax.data.conversations import Conversation, Turn, read_conversations
from specjax.models.fingerprint import FrozenModel
from specjax.training.data import DataOptions, batches
from specjax.training.examples import Example, tokenize_all
from specjax.training.heads import HeadSettings, train_head
from specjax.training.loop import LoopOptions, Trained, train
from specjax.training.objectives.base import HeadTraining, Step
from specjax.training.optimizer import OptimizerOptions

__all__ = [
    "Conversation",
    "Turn",
    "read_conversations",
    "DataOptions",
    "batches",
    "Example",
    "tokenize_all",
    "HeadSettings",
    "train_head",
    "LoopOptions",
    "Trained",
    "train",
    "FrozenModel",
    "HeadTraining",
    "Step",
    "OptimizerOptions",
]
