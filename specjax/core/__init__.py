"""Errors, files, text and pytrees for all packages; only `companions` imports others, by name."""
