"""Builds the automaton of a regular expression over bytes, in a process with limits.

A short expression can have an automaton of any size, such as `(.{1,200}){1,200}`, and the library
that builds it has no limits. Run as a script, this file reads an expression and writes a table.
"""

import io
import subprocess
import sys

import numpy as np

from specjax.core.errors import SpecjaxError, check_characters

MAX_STATES = 10_000
MAX_SECONDS, MAX_BYTES = 60, 2**32  # of the process
NUM_BYTES = 256
FINAL = NUM_BYTES  # the column of a table that is 1 in final states
DEAD = -1
INVALID = 2  # exit code
# Ends each text inside the library, which drops the transitions out of states where texts may end.
TERMINATOR = "\U0010ffff"


def byte_automaton(regex: str) -> np.ndarray:
    """Returns the next state of each state at each byte, DEAD if none; the start is state 0.

    Column FINAL holds 1 in the states where the text may end.
    """
    check_characters("the regular expression", regex)
    command = [sys.executable, "-P", __file__]
    try:
        process = subprocess.run(
            command, input=regex.encode(), capture_output=True, timeout=2 * MAX_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise _too_large(regex) from None
    if process.returncode == INVALID:
        raise SpecjaxError(process.stderr.decode())
    if process.returncode:
        problem = process.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if process.returncode < 0 or "MemoryError" in problem:
            raise _too_large(regex)
        raise SpecjaxError(
            f"the automaton of {regex[:60]!r} cannot be built ({problem}); reinstall outlines-core "
            "if this happens with every expression, or simplify this one"
        )
    table = np.load(io.BytesIO(process.stdout))
    if len(table) > MAX_STATES:
        raise SpecjaxError(
            f"the automaton of {regex[:60]!r} has {len(table):,} states, and {MAX_STATES:,} are "
            "the limit; use fewer or shorter counted repetitions, such as maxLength"
        )
    return table


def _too_large(regex: str) -> SpecjaxError:
    return SpecjaxError(
        f"the automaton of {regex[:60]!r} needs more than {MAX_SECONDS} seconds or "
        f"{MAX_BYTES >> 30} GiB; use fewer or shorter counted repetitions, such as maxLength"
    )


def _build(regex: str) -> np.ndarray:
    try:
        from outlines_core import Index, Vocabulary
    except ImportError:
        raise SpecjaxError(
            "structured output needs outlines-core; run pip install 'specjax[structured]'"
        ) from None
    try:
        bytes_of = Vocabulary(FINAL, {bytes([byte]): [byte] for byte in range(NUM_BYTES)})
        Index(regex, bytes_of)  # an error if its parentheses do not match
        index = Index(f"({regex}){TERMINATOR}", bytes_of)
    except ValueError as error:
        raise SpecjaxError(
            f"the regular expression {regex[:60]!r} is not supported ({str(error)[:200]}); the "
            "whole text must match, so leave out ^ and $, look-around and back references"
        ) from None
    transitions = index.get_transitions()
    number = {index.get_initial_state(): 0}
    for state in transitions:
        number.setdefault(state, len(number))
    table = np.full((len(number) + 1, NUM_BYTES + 1), DEAD, np.int32)  # the last row is DEAD's
    for state, after in transitions.items():
        for byte, next_state in after.items():
            table[number[state], byte] = number[next_state]
    ends = [number[state] for state in index.get_final_states()]
    states = np.arange(len(table))
    for byte in TERMINATOR.encode():
        states = table[states, byte]
    table[np.isin(table, ends)] = DEAD
    table[:, FINAL] = np.isin(states, ends)
    return table[:-1]


def _main() -> None:
    import resource

    limits = {resource.RLIMIT_CPU: MAX_SECONDS}
    if sys.platform == "linux":
        limits[resource.RLIMIT_AS] = MAX_BYTES
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    try:
        table = io.BytesIO()  # since `save` asks for the position in a file, and a pipe has none
        np.save(table, _build(sys.stdin.buffer.read().decode()))
        sys.stdout.buffer.write(table.getvalue())
    except SpecjaxError as error:
        sys.stderr.write(str(error))
        raise SystemExit(INVALID) from None


if __name__ == "__main__":
    _main()
