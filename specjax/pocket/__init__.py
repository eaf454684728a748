"""Pocket, the embedded model: its weights, and its tasks and conversations, made by `recipes`."""

from pathlib import Path

TASKS = Path(__file__).parent / "tasks"
