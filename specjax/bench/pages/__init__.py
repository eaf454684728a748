"""The report of a benchmark, as one HTML page and as Markdown."""
