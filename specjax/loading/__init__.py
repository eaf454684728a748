"""Loads targets and drafters; the registry of methods."""
