"""Settings of every method that are worth a thought, in families that one observed run stands for.

The run has the largest settings of its family. What smaller ones would do is told from it: a chain
may be cut (`observation.cut`), and a tree accepts less with the logarithm of its nodes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specjax.methods import METHODS

Shape = Literal["chain", "tree", "as it is"]
Settings = Mapping[str, Any]

COPIED = (3, 5, 7, 10, 15, 20, 30, 40, 63)  # tokens of a chain that is found in the text
DRAFTED = (1, 2, 3, 4, 5, 6, 7, 8, 10)  # of one that is drafted token by token
AHEAD = (1, 2, 3, 4, 5)  # of one that costs one pass; heads predict no more
NODES = (6, 8, 12, 16, 24, 32, 48, 64)  # of a tree, its root included


@dataclass(frozen=True)
class Family:
    """Settings of one method: for each size, of which the last is observed, those that make it.

    A size is the tokens of a chain or the nodes of a tree; of a family that is taken as it is
    there is one, 0. Settings come in place of the tuned and the default ones.
    """

    method: str
    shape: Shape
    members: Mapping[int, Settings] = field(default_factory=lambda: {0: {}})
    is_sequential: bool = False  # a draft costs by its tokens, one pass each

    @property
    def largest(self) -> Settings:
        """The settings that are observed."""
        return self.members[max(self.members)]

    @property
    def part(self) -> str:
        """Which head it drafts with, if any; methods may share one."""
        return METHODS[self.method].part if METHODS[self.method].head else ""

    @property
    def has_tree(self) -> bool:
        """Whether it drafts a tree with a head, which a chain of that head tells something of."""
        return self.shape != "chain" and self.part != ""


def families(methods: Iterable[str]) -> list[Family]:
    """Those of the named methods, chains first: they tell which trees are worth a run."""
    found = [family for method in methods for family in _of_method(method)]
    return sorted(found, key=lambda family: family.has_tree)


def _of_method(method: str) -> list[Family]:
    if METHODS[method].copies:
        shorter = {"allow_shorter": True} if method == "pld" else {}
        return [_chain(method, COPIED, lambda n: {"num_tokens": n, **shorter})]
    if method == "draft-model":
        rules = ("fixed", "confidence", "disco")
        return [_chain(method, DRAFTED, _draft_rule(rule), True) for rule in rules]
    if method in ("eagle2", "hass"):
        return [_chain(method, DRAFTED, lambda n: _beam(1, n, n + 1), True), *_beams(method)]
    if method in ("medusa", "hydra", "parallel-medusa", "parallel-eagle"):
        line = _chain(method, AHEAD, lambda n: {"choices": _line(n)}, method == "hydra")
        return [line, *_depth_trees(method)]
    if method == "rest":
        members = {n: {"max_drafted": n - 1} for n in NODES}
        return [Family(method, "tree", members)]
    return [Family(method, "as it is")]


def _chain(method: str, lengths: Iterable[int], settings: Any, is_sequential: bool = False):
    return Family(method, "chain", {n: settings(n) for n in lengths}, is_sequential)


def _draft_rule(rule: str):
    if rule == "fixed":
        return lambda n: {"rule": rule, "length": n, "max_length": n}
    return lambda n: {"rule": rule, "max_length": n}


def _beam(top_k: int, depth: int, num_tokens: int) -> Settings:
    return {"top_k": top_k, "depth": depth, "num_tokens": num_tokens}


def _beams(method: str) -> list[Family]:
    """A narrow and shallow tree, and the published one."""
    return [
        Family(method, "tree", {n: _beam(top_k, depth, n) for n in NODES if least <= n <= most})
        for top_k, depth, least, most in ((4, 4, 6, 24), (10, 6, 24, 64))
    ]


def _depth_trees(method: str) -> list[Family]:
    """The static tree (the tuned or the published one), and those that grow by confidence."""
    static = Family(method, "as it is")
    if method == "hydra":
        return [static]
    members = {n: {"tree": "dynamic", "num_tokens": n} for n in NODES}
    return [static, Family(method, "tree", members)]


def _line(length: int) -> tuple[tuple[int, ...], ...]:
    """The choices of a tree that is a chain."""
    return tuple((0,) * depth for depth in range(1, length + 1))
