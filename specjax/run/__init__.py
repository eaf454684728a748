"""Runs methods on prompts: the timed runner, tasks, distillation and attribution."""
