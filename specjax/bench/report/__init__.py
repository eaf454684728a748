"""The report of a benchmark: in the terminal, and as Markdown with charts."""
