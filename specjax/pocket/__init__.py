"""Pocket, the embedded model: the code and edit tasks it learned from, and its weights."""
