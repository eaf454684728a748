"""Benchmarks methods against plain decoding, in pairs on the same prompts."""
