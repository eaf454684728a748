"""Reads an optimised XLA program as text: the parts of a round, their bytes, kernels and copies.

Bytes are counted as the kernels' operands, each read once: of what a kernel only slices or gathers
from, the rows it takes, and nothing of what it updates in place. Of a program for several devices
they are those of one. A collective moves the bytes of its result.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}  # others end in their number
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
NO_KERNEL = set(
    "parameter constant get-tuple-element tuple bitcast after-all optimization-barrier domain "
    "copy-done async-done slice-done send recv partition-id replica-id iota broadcast".split()
    + [f"{name}-done" for name in COLLECTIVES]
)
TAKES_ROWS = ("dynamic-slice", "slice", "gather")
IN_PLACE = ("dynamic-update-slice", "scatter")
PASS = re.compile(r"pass_of_(\d+)")
DRAFT = "draft"  # the part of a round outside the target pass: drafting and commit

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
# [ROOT] %name = type opcode(inputs), attributes; types may have brackets too.
_INSTRUCTION = re.compile(r"\s+(ROOT |)%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, |$)(.*)")


class ArrayType(NamedTuple):
    """One array of a type."""

    dtype: str
    shape: tuple[int, ...]
    is_on_chip: bool  # in the vector memory of a TPU

    @property
    def num_bytes(self) -> float:
        """Its bytes, also where elements are packed."""
        bits = BITS.get(self.dtype)
        if bits is None:
            bits = int(_first(r"(\d+)", self.dtype) or 0)
        return prod(self.shape) * bits / 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    is_root: bool
    name: str
    type: str
    opcode: str
    inputs: str  # operands; the number of a parameter or constant
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        """The names of what it reads."""
        return _NAME.findall(self.inputs)

    @cached_property
    def arrays(self) -> list[ArrayType]:
        """The arrays it returns: several for a tuple."""
        return [
            ArrayType(dtype, tuple(map(int, re.findall(r"\d+", sizes))), "S(1)" in layout)
            for dtype, sizes, layout in _ARRAY.findall(self.type)
        ]

    @property
    def num_bytes(self) -> float:
        """Bytes it returns."""
        return sum(array.num_bytes for array in self.arrays)

    @property
    def size(self) -> int:
        """The number of elements it returns."""
        return sum(prod(array.shape) for array in self.arrays)

    @property
    def scope(self) -> str:
        """The names of the functions that it comes from."""
        return _first(r'op_name="([^"]*)"', self.attributes) or ""

    @property
    def cycles(self) -> int:
        """XLA's own estimate, on TPU."""
        return int(_first(r'"estimated_cycles":"(\d+)"', self.attributes) or 0)

    @property
    def called(self) -> list[str]:
        """The computations that it runs; of a loop the body, of a conditional all branches."""
        if several := _first(r"branch_computations=\{([^}]*)\}", self.attributes):
            return _NAME.findall(several)
        kinds = "body|calls|to_apply|true_computation|false_computation"
        return re.findall(rf"\b(?:{kinds})=%([\w.\-]+)", self.attributes)

    @property
    def value(self) -> int | None:
        """The number that a constant is; None for others."""
        is_number = self.opcode == "constant" and re.fullmatch(r"-?\d+", self.inputs)
        return int(self.inputs) if is_number else None


Computation = dict[str, Instruction]


@dataclass
class Cost:
    """The costs of one part of a round."""

    read: float = 0.0  # bytes
    kernels: float = 0.0
    cycles: float = 0.0
    cache_copies: float = 0.0  # arrays of the KV cache that are written anew
    collectives: float = 0.0
    moved: float = 0.0  # bytes, by collectives

    def add(self, other: "Cost", times: float = 1) -> None:
        """Adds the costs of another part, run several times."""
        for name, cost in vars(other).items():
            setattr(self, name, getattr(self, name) + times * cost)


Costs = dict[str, Cost]  # by part: `DRAFT`, and the rows of each target pass


class Program:
    """An optimised program, as XLA prints it."""

    def __init__(self, text: str):
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        current: Computation = {}
        for line in text.splitlines():
            if line.endswith("{") and not line.startswith(" ") and " -> " in line:
                name = _NAME.search(line)
                assert name is not None
                current = self.computations[name[1]] = {}
                self.entry = name[1] if line.startswith("ENTRY") else self.entry
            elif found := _INSTRUCTION.match(line):
                root, name, *texts = found.groups()
                current[name] = Instruction(bool(root), name, *texts)

    def round_body(self) -> str:
        """Returns the computation that runs one round: the body of the loop with target passes."""
        for op in self.loops(self.entry):
            if self._has_pass(op.called[0]):
                return op.called[0]
        raise ValueError("the program has no loop with a target pass")

    def loops(self, name: str) -> Iterable[Instruction]:
        """Yields the loops of a computation and of those that it calls."""
        for op in self.computations[name].values():
            if op.opcode == "while":
                yield op
            elif op.opcode in ("call", "async-start"):
                for called in op.called:
                    yield from self.loops(called)

    def costs(self, name: str, cache_shape: tuple[int, ...], part: str = DRAFT) -> Costs:
        """Returns the costs of a computation by part.

        An instruction without a scope belongs to the part of the first one that uses it, else to
        that of the one before it; what a TPU loads for the next round belongs to the pass.
        """
        costs: Costs = {}
        scopes, last_pass = self._scopes(name), part
        for op in self.computations[name].values():
            if scope := scopes[op.name]:
                found = PASS.search(scope)
                part = found[1] if found else DRAFT
                last_pass = found[1] if found else last_pass
            elif op.opcode.endswith("-start"):
                part = last_pass
            if op.opcode in ("while", "conditional", "call"):
                for called in op.called:
                    for inner, cost in self.costs(called, cache_shape, part).items():
                        turns = self._num_turns(op, self.computations[name])
                        costs.setdefault(inner, Cost()).add(cost, turns)
            elif op.opcode not in NO_KERNEL:
                read = self._read(op, self.computations[name])
                copies = self._copies(op, cache_shape)
                moved = self._moved(op)
                cost = Cost(read, 1, op.cycles, copies, len(moved), sum(moved))
                costs.setdefault(part, Cost()).add(cost)
        return costs

    def _scopes(self, name: str) -> dict[str, str]:
        """Returns the scope of each instruction, or of the first one that uses its result."""
        computation = self.computations[name]
        scopes = {each.name: each.scope for each in computation.values()}
        for each in reversed(computation.values()):
            for operand in each.operands:
                if operand in computation and not computation[operand].scope:
                    scopes[operand] = scopes[each.name] or scopes[operand]
        return scopes

    def _num_turns(self, loop: Instruction, outside: Computation) -> int:
        """Returns the iterations of a loop; 1 where they are not known.

        A TPU's program shows only the end of a count, its start, and what a turn adds.
        """
        if loop.opcode != "while":
            return 1
        if count := _first(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(count)
        condition = self.computations[_first(r"condition=%([\w.\-]+)", loop.attributes) or ""]
        body = self.computations[loop.called[0]]
        test, last = (_root(part) for part in (condition, body))
        if test.opcode != "compare" or "direction=LT" not in test.attributes:
            return 1
        counter, end = (_source(name, condition) for name in test.operands)
        place = int(_first(r"index=(\d+)", counter.attributes) or 0)
        start, added = outside[loop.operands[0]], _source(last.operands[place], body)
        if start.opcode != "tuple" or end.value is None:
            return 1
        first, step = _source(start.operands[place], outside).value, 0
        while added.opcode == "add":
            terms = [_source(name, body) for name in added.operands]
            step += sum(term.value or 0 for term in terms)
            added = next(term for term in terms if term.value is None)
        if first is None or added.opcode != "get-tuple-element" or step < 1:
            return 1
        return max(-(-(end.value - first) // step), 0)

    def _has_pass(self, name: str) -> bool:
        return any(
            PASS.search(op.scope) or any(map(self._has_pass, op.called))
            for op in self.computations[name].values()
        )

    def _read(self, op: Instruction, computation: Computation) -> float:
        """Bytes that an instruction reads from main memory."""
        operands = [computation[name] for name in op.operands if name in computation]
        if op.opcode in TAKES_ROWS:
            return _off_chip(operands[0]) and op.num_bytes
        if op.opcode in IN_PLACE:
            return sum(map(_off_chip, operands[1:]))
        if op.opcode == "slice-start":  # to the chip, while something else runs
            return sum(array.num_bytes for array in op.arrays[1:2])
        inner = self.computations.get(op.called[0]) if op.called else None
        if inner is None or op.opcode not in ("fusion", "async-start", "custom-call"):
            return sum(map(_off_chip, operands))
        shares = self._shares(inner)
        return sum(_off_chip(operand) * shares.get(at, 0.0) for at, operand in enumerate(operands))

    def _moved(self, op: Instruction) -> list[float]:
        """Returns the bytes of the results of the collectives that an instruction starts."""
        if op.opcode.removesuffix("-start") in COLLECTIVES:
            sizes = [array.num_bytes for array in op.arrays]
            has_operands = op.opcode.endswith("-start") and op.opcode != "all-reduce-start"
            return [sum(sizes[len(op.operands) :][: len(op.operands)] if has_operands else sizes)]
        if op.opcode not in ("fusion", "async-start"):
            return []
        inner = (self.computations.get(name, {}) for name in op.called)
        return [size for part in inner for one in part.values() for size in self._moved(one)]

    def _shares(self, computation: Computation, used: float = 1.0) -> dict[int, float]:
        """Returns the share of each parameter that a fused computation reads, by its number.

        `used` is the share of the result that is wanted.
        """
        shares = dict.fromkeys(computation, 0.0)
        for op in reversed(computation.values()):  # users first
            share = used if op.is_root else min(shares[op.name], 1.0)
            if op.opcode == "fusion":
                inner = self._shares(self.computations[op.called[0]], share)
                for place, name in enumerate(op.operands):
                    shares[name] += inner.get(place, 0.0)
                continue
            for place, name in enumerate(op.operands):
                if place == 0 and op.opcode in IN_PLACE:
                    continue
                fraction = 1.0
                if place == 0 and op.opcode in TAKES_ROWS:
                    fraction = op.size / max(computation[name].size, 1)
                shares[name] += share * fraction
        parameters = [op for op in computation.values() if op.opcode == "parameter"]
        return {int(op.inputs): min(shares[op.name], 1.0) for op in parameters}

    def _copies(self, op: Instruction, cache_shape: tuple[int, ...]) -> int:
        """Counts the arrays of the KV cache's shape that are written anew, not in place."""
        shape = _without_ones(cache_shape)
        if op.opcode == "copy-start":
            # From the chip it is the write-back of changes there.
            arrays = op.arrays[:2]
            return int(all(_without_ones(a.shape) == shape and not a.is_on_chip for a in arrays))
        count = sum(_without_ones(a.shape) == shape and not a.is_on_chip for a in op.arrays)
        if not count or op.opcode != "fusion":
            return count if op.opcode == "copy" else 0
        inner = self.computations[op.called[0]]
        root = _root(inner)
        roots = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        return sum(
            _without_ones(value.arrays[0].shape) == shape and not self._is_update(value, inner)
            for value in roots
        )

    def _is_update(self, value: Instruction, computation: Computation) -> bool:
        """Whether a value is a parameter changed in place."""
        while value.opcode in ("bitcast", "reshape", "copy") and value.operands:
            value = computation[value.operands[0]]
        if value.opcode == "fusion":
            inner = self.computations[value.called[0]]
            return self._is_update(_root(inner), inner)
        return value.opcode in IN_PLACE or value.opcode == "parameter"


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found[1] if found else None


def _source(name: str, computation: Computation) -> Instruction:
    """Returns the source of a copy."""
    found = computation[name]
    while found.opcode in ("copy", "bitcast") and found.operands:
        found = computation[found.operands[0]]
    return found


def _root(computation: Computation) -> Instruction:
    return next(each for each in computation.values() if each.is_root)


def _off_chip(value: Instruction) -> float:
    return sum(each.num_bytes for each in value.arrays if not each.is_on_chip)


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size > 1]


def host_synchronisations(thunks: str) -> int:
    """Counts the loops and conditionals of a CUDA program that the host decides.

    `thunks` is the sequence that XLA dumps; what is inside a CUDA graph needs no host.
    """
    count, above = 0, []
    for line in thunks.splitlines():
        found = re.match(r"( *)\d+: (k\w+)", line)
        if found is None:
            continue
        depth, kind = len(found[1]), found[2]
        above = [(at, name) for at, name in above if at < depth]
        is_in_graph = any(name == "kCommandBuffer" for _, name in above)
        count += kind in ("kWhile", "kConditional") and not is_in_graph
        above.append((depth, kind))
    return count
