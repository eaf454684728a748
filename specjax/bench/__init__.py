"""Benchmarks: what the methods gain over plain decoding, measured in pairs on the same prompts."""
