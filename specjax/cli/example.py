"""The edit task that `specjax generate` runs without a prompt."""

INSTRUCTION = "Rename `count` to `run_length`."
SOURCE = '''\
def longest_run(values):
    """How many equal values follow each other at most."""
    best, count = 0, 0
    previous = None
    for value in values:
        if count > 0 and value == previous:
            count += 1
        else:
            count = 1
        previous = value
        best = max(best, count)
    return best'''
MESSAGE = f"{INSTRUCTION}\n{SOURCE}"
