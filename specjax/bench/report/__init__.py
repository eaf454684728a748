"""The report of a benchmark: in the terminal, as one HTML page, and as Markdown."""
