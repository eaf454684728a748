"""Measurements for the developers of specjax: `python -m benchmarks.NAME --help`."""
