"""Linen Llama as pure functions: rows, cache and taps in, outputs and cache out."""
