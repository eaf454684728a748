"""One round's target pass: who sees whom, what probes get, and that its width changes nothing.

And the branches that it is made of: one that is not taken computes nothing.
"""

import re
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.decoding import Drafter, DraftTree, Draw, Probe, Proposal, Sampling, merge_paths
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import sequence_keys
from specjax.decoding.widths import compiled_widths, if_in_place, query_rows, verify_pass
from specjax.models.cache import KVCache
from specjax.models.prefill import prefill
from specjax.models.target import Taps
from tests.decoding.test_tree import path_of
from tests.decoding.tiny import BATCH, plain_pass, prompt, target

VOCAB, DEPTH, NODES = 6, 5, 16
PROBES = 5  # two runs of text: 3 rows and 2 rows
FILLED = 27  # rows of a filled pass
RUNS = np.array([0, 0, 0, 1, 1])
assert_close = partial(np.testing.assert_allclose, atol=1e-4)


@dataclass(frozen=True)
class Reader(Drafter):
    """Taps everything; `verify_pass` gets its proposal from the test."""

    pass_widths: tuple[int, ...] | None = None  # the engine's: 1, 8 or 16 nodes

    max_depth = DEPTH
    num_nodes = NODES
    num_probes = PROBES
    taps = Taps(hidden_layers=(1, 2), attention_heads=((0, 1), (1, 3)))

    def propose(self, target, params, state, context, draw):
        raise NotImplementedError


@cache
def random_tree(seed: int, num_nodes: int = NODES) -> DraftTree:
    """Trees of random paths; the second is what the target will say, greedily."""
    numbers = np.random.default_rng(seed)
    paths = numbers.integers(0, VOCAB, (BATCH, 12, DEPTH))
    paths[:, 1] = truth()
    lengths = numbers.integers(2, DEPTH + 1, (BATCH, 12))
    lengths[:, :2] = 2, DEPTH
    merge = jax.jit(merge_paths, static_argnums=3)
    tree = jax.device_get(merge(roots(), paths, lengths, num_nodes))
    assert tree.valid.all()
    return tree


@cache
def truth() -> np.ndarray:
    model, params = target(VOCAB)
    settings = {"target": model, "max_new_tokens": DEPTH}
    tokens, _ = reference_generate(params, prompt(BATCH, VOCAB), jax.random.key(0), **settings)
    return np.asarray(tokens)


def on_device(tree: DraftTree) -> DraftTree:
    return jax.tree.map(jnp.asarray, tree)


def random_probe(seed: int, num_nodes: int) -> Probe:
    numbers = np.random.default_rng(seed)
    limits = (0, VOCAB), (1, 9), (0, num_nodes)  # of tokens, offsets and anchors
    arrays = [numbers.integers(*limit, (BATCH, PROBES)) for limit in limits]
    visible = numbers.random((BATCH, PROBES, PROBES)) < 0.5
    return Probe(*map(jnp.asarray, (*arrays, visible)))


@cache
def start() -> KVCache:
    """A cache that holds the ragged prompts without their roots, with room for one round."""
    model, params = target(VOCAB)
    given = prompt(BATCH, VOCAB)
    cache = KVCache.create(model.config, BATCH, 32 + FILLED)
    run = jax.jit(prefill, static_argnums=(4, 5))
    _, cache = run(params, given.tokens, given.length - 1, cache, model, Taps())
    return replace(cache, length=given.length - 1)


def roots() -> np.ndarray:
    given = jax.device_get(prompt(BATCH, VOCAB))
    return given.tokens[np.arange(BATCH), given.length - 1]


def verified(proposal: Proposal, drafter: Reader, padded_width: int = 0):
    found = _verified(proposal, start(), target(VOCAB)[1], drafter, padded_width)
    return jax.device_get(found)


@partial(jax.jit, static_argnums=(3, 4))
def _verified(proposal: Proposal, cache: KVCache, params, drafter: Drafter, padded_width: int):
    model = target(VOCAB)[0].clone(padded_width=padded_width)
    draw = Draw(sequence_keys(jax.random.key(3), BATCH), cache.length + 1, Sampling())
    return verify_pass(model, drafter, params, cache, proposal, draw)


def test_nodes_and_probes_get_the_logits_of_their_text_alone():
    """Probes here are two runs of text, each going on from some node."""
    tree, numbers = random_tree(0), np.random.default_rng(0)
    anchor = numbers.integers(1, NODES, (BATCH, 2))[:, RUNS]
    step = np.array([1, 2, 3, 1, 2])
    is_before = step[:, None] >= step
    depth = np.take_along_axis(tree.depth, anchor, axis=1)
    probe = replace(
        random_probe(0, NODES),
        anchor=jnp.asarray(anchor),
        offset=jnp.asarray(depth + step),
        visible=jnp.asarray(np.tile(is_before & (RUNS[:, None] == RUNS), (BATCH, 1, 1))),
    )
    output, _, _ = verified(Proposal(tree, probe), Reader(()))
    probe = jax.device_get(probe)
    given, texts = jax.device_get(prompt(BATCH, VOCAB)), []
    for row in range(BATCH):
        before = given.tokens[row, : given.length[row] - 1].tolist()

        def along(node, row=row, before=before):
            return before + tree.tokens[row, path_of(tree, row, node)].tolist()

        texts += [along(node) for node in range(NODES)]
        for at in range(PROBES):
            run = np.flatnonzero((RUNS[at] == RUNS) & (step <= step[at]))
            texts.append(along(int(anchor[row, at])) + probe.tokens[row, run].tolist())
    model, params = target(VOCAB)
    padded = jnp.asarray([text + [0] * (max(map(len, texts)) - len(text)) for text in texts])
    expected = np.asarray(plain_pass(params, padded, model)[0].logits)
    expected = expected[np.arange(len(texts)), [len(text) - 1 for text in texts]]
    expected = expected.reshape(BATCH, NODES + PROBES, VOCAB)
    assert_close(output.logits, expected)


def test_the_padding_of_a_pass_changes_nothing():
    proposal = Proposal(random_tree(2), random_probe(2, NODES))
    output, found, cache = verified(proposal, Reader(()))
    filled, again, filled_cache = verified(proposal, Reader(()), FILLED)
    jax.tree.map(np.testing.assert_array_equal, again, found)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), filled, output)
    path, count = again.path, again.num_accepted
    keep = jax.jit(lambda cache, path, count: cache.keep(path, count, NODES))
    first, second = jax.device_get([keep(each, path, count) for each in (cache, filled_cache)])
    for row, length in enumerate(first.length):
        for keys, others in zip(first.keys, second.keys, strict=True):
            np.testing.assert_allclose(keys[row, :, :length], others[row, :, :length], atol=1e-5)


def lowered_for_a_gpu(
    drafter: Drafter, tree: DraftTree, padded_width: int, probe: Probe | None = None
) -> str:
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target(VOCAB)[1])
    traced = _verified.trace(Proposal(tree, probe), start(), half, drafter, padded_width)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def kept_apart(program: str) -> str:
    """The program between two barriers, its values numbered in order."""
    lines = program.splitlines()
    first, last = (at for at, line in enumerate(lines) if "optimization_barrier" in line)
    numbers: dict[str, str] = {}
    between = re.sub(r"(@\w+?)_\d+\b", r"\1", "\n".join(lines[first:last]))
    return re.sub(r"%\w+", lambda name: numbers.setdefault(name[0], f"%{len(numbers)}"), between)


def products_in(program: str) -> list[str]:
    return sorted(re.findall(r"stablehlo.dot_general .* : (.*)", program))


def test_on_a_gpu_a_filled_pass_is_the_same_program_and_taps_change_no_product():
    tree = on_device(random_tree(3))
    plain = Autoregressive(), tree.first(1)
    drafted = PromptLookup(num_tokens=NODES - 1), tree
    filled = kept_apart(lowered_for_a_gpu(*plain, FILLED))
    assert filled == kept_apart(lowered_for_a_gpu(*drafted, FILLED))
    assert filled.count("dot_general") > 10 and "f64" in filled
    assert "f64" not in lowered_for_a_gpu(*drafted, 0)
    reading = lowered_for_a_gpu(Reader(()), tree, FILLED, random_probe(3, NODES))
    assert products_in(kept_apart(reading)) == products_in(filled)


@pytest.mark.parametrize("nodes, widths", [(1, [1]), (2, [1, 2]), (15, [1, 15]), (64, [8, 64])])
def test_16_bit_passes_have_at_most_two_widths(nodes, widths, monkeypatch):
    monkeypatch.setattr(Reader, "num_nodes", nodes)
    model, params = target()
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert compiled_widths(Reader(), model, halves) == widths


def test_passes_that_compute_no_padding_have_few_widths(monkeypatch):
    monkeypatch.setattr("specjax.decoding.widths.has_native_layers", lambda *_: True)
    assert compiled_widths(Reader(), *target()) == [1, 8, NODES], "a probe is behind the padding"
    monkeypatch.setattr(Reader, "num_probes", 0)
    for own, nodes, widths in ((None, 16, [1, 16]), (None, 71, [1, 8, 71]), ((1, 5), 9, [1, 9])):
        monkeypatch.setattr(Reader, "num_nodes", nodes)
        assert compiled_widths(Reader(own), *target()) == widths


def test_a_pass_reaches_to_the_last_valid_node():
    valid = jnp.array([[True, False, True, False], [True, True, False, False]])
    nodes = jnp.zeros_like(valid, jnp.int32)
    tree = DraftTree(nodes, parents=nodes.at[:, 0].set(-1), depth=nodes, valid=valid)
    assert query_rows(tree, None, jnp.zeros(2, jnp.int32), max_depth=1).count == 3


@pytest.mark.parametrize("most, width", [(1, 1), (2, 8), (8, 8), (9, NODES)])
def test_a_narrow_pass_equals_a_wide_one(most, width):
    assert compiled_widths(Reader(), *target()) == [1, 8, NODES]
    assert compiled_widths(Reader(()), *target()) == [NODES]
    counts = np.array([most, max(1, most // 2), 1])
    tree = random_tree(1)
    tree = replace(on_device(tree), valid=jnp.asarray(np.arange(NODES) < counts[:, None]))
    probe = random_probe(1, num_nodes=1)  # at the root, which every width holds
    proposal = Proposal(tree, probe)
    narrow, found, narrow_cache = verified(proposal, Reader())
    wide, expected, wide_cache = verified(proposal, Reader(pass_widths=()))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    if most >= 8:
        assert found.num_accepted[0] == DEPTH, "the true path is among the first 8 nodes"
    shortest = int(start().length.min())
    for name in ("logits", "hidden", "attention"):
        some, every = getattr(narrow, name), getattr(wide, name)
        if name == "attention":
            some, every = np.moveaxis(some, 2, 1), np.moveaxis(every, 2, 1)
        assert some.shape == every.shape
        assert not some[:, width:NODES].any(), "rows beyond the width hold zeros"
        if name == "attention":  # over slots: the probe's lie behind fewer nodes
            some, every = some[..., :shortest], every[..., :shortest]
        assert_close(some[:, NODES:], every[:, NODES:])
        for row, count in enumerate(counts):
            assert_close(some[row, :count], every[row, :count])
    np.testing.assert_array_equal(narrow_cache.length, wide_cache.length)
    for row, count in enumerate(counts):
        slots = slice(0, int(start().length[row]) + count)
        for some, every in zip(narrow_cache.keys, wide_cache.keys, strict=True):
            assert_close(some[row, :, slots], every[row, :, slots])


def test_a_tree_may_be_smaller_than_its_drafter_says():
    class Smaller(Reader):
        num_nodes = NODES - 4

    proposal = Proposal(on_device(random_tree(4, NODES - 4)), random_probe(4, NODES - 4))
    found, expected = (verified(proposal, kind(()))[:2] for kind in (Reader, Smaller))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# ---- Branches ---------------------------------------------------------------------------------

MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def loops_around(program: str, operation: str) -> list[int]:
    """Within how many loops the operation stands, at each of its places in a compiled program."""
    parts = re.findall(r"^(ENTRY )?%([\w.-]+) \((.*?)^\}", program, re.MULTILINE | re.DOTALL)
    bodies = {name: body for _, name, body in parts}
    [entry] = [name for is_entry, name, _ in parts if is_entry]

    def within(name: str, depth: int) -> list[int]:
        found = [depth] * bodies[name].count(f" {operation}(")
        for role, called in re.findall(r"(body|calls|to_apply)=%([\w.-]+)", bodies[name]):
            found += within(called, depth + (role == "body"))
        return found

    return within(entry, 0)


def one_of_two(condition, branch, given, carry):
    carry = if_in_place(~condition, lambda given, carry: carry, given, carry)
    return if_in_place(condition, branch, given, carry)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere XLA has branches for this")
@pytest.mark.parametrize("in_place", [if_in_place, one_of_two])
def test_no_product_is_moved_in_front_of_its_branch(in_place):
    weights = jnp.ones(MATRIX.shape)

    def branch(given, carry):
        kept, sums = carry  # the second product is of what the branch leaves as it was
        return kept, sums + jnp.dot(given, weights) + jnp.dot(kept, weights)

    def rounds(conditions, given, carry):
        def one(carry, condition):
            return in_place(condition, branch, given, carry), None

        return lax.scan(one, carry, conditions)[0]

    conditions = jax.ShapeDtypeStruct((9,), bool)
    program = jax.jit(rounds).lower(conditions, MATRIX, (MATRIX, MATRIX)).compile().as_text()
    assert program is not None
    assert loops_around(program, "dot") == [2, 2], "that of the rounds, and that of the branch"
