"""The decoding speed of one GPU: `python -m benchmarks.gpu --out DIR`."""
