"""Runs a method on prompts: one runner, its parts timed, and what is built on it."""
