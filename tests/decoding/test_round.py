"""One round's target pass: who sees whom, what probes get, and that its width changes nothing."""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import round as round_module
from specjax.decoding.drafter import Context, Params, Probe, Proposal
from specjax.decoding.reference import reference_generate
from specjax.decoding.round import judge, query_rows
from specjax.decoding.sampling import Draw, Sampling, row_keys
from specjax.decoding.tree import DraftTree, merge_paths
from specjax.models.cache import KVCache
from specjax.models.prefill import prefill
from specjax.models.target import Taps, causal_rows
from tests.decoding.tiny import Stateless, prompt, target

BATCH, VOCAB, DEPTH, NODES = 3, 6, 5, 16  # a pass of 1, 8 or 16 nodes
PROBES = 5  # two runs of text: 3 rows and 2 rows
RUNS = np.array([0, 0, 0, 1, 1])


@dataclass(frozen=True)
class Reader(Stateless):
    """Taps everything; `judge` gets its proposal from the test."""

    max_depth: int = DEPTH
    num_nodes = NODES
    num_probes = PROBES
    taps = Taps(hidden_layers=(1, 2), attention_heads=((0, 1), (1, 3)))

    def propose(self, params: Params, state, context: Context, draw: Draw):
        return params.drafter, state


def random_tree(seed: int, num_nodes: int = NODES) -> DraftTree:
    """Trees of random paths; the second is what the target will say, greedily."""
    numbers = np.random.default_rng(seed)
    paths = numbers.integers(0, VOCAB, (BATCH, 12, DEPTH))
    paths[:, 1] = truth()
    lengths = numbers.integers(2, DEPTH + 1, (BATCH, 12))
    lengths[:, :2] = 2, DEPTH
    tree = merge_paths(roots(), jnp.asarray(paths), jnp.asarray(lengths), num_nodes)
    assert tree.valid.all()
    return tree


@cache
def truth() -> np.ndarray:
    model, params = target(VOCAB)
    settings = {"target": model, "max_new_tokens": DEPTH}
    tokens, _ = reference_generate(params, prompt(BATCH, VOCAB), jax.random.key(0), **settings)
    return np.asarray(tokens)


def random_probe(seed: int, num_nodes: int) -> Probe:
    numbers = np.random.default_rng(seed)
    return Probe(
        tokens=jnp.asarray(numbers.integers(0, VOCAB, (BATCH, PROBES))),
        offset=jnp.asarray(numbers.integers(1, 9, (BATCH, PROBES))),
        anchor=jnp.asarray(numbers.integers(0, num_nodes, (BATCH, PROBES))),
        visible=jnp.asarray(numbers.random((BATCH, PROBES, PROBES)) < 0.5),
    )


def path_of(tree: DraftTree, row: int, node: int) -> list[int]:
    """The nodes from the root to `node`."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(tree.parents[row, path[0]]))
    return path


# ---- query_rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("has_probe", [True, False])
def test_nodes_see_their_path_and_probes_see_their_anchors_path_and_what_they_ask_for(
    seed, has_probe
):
    tree, root_slot = random_tree(seed, num_nodes=12), np.array([4, 0, 30])
    probe = random_probe(seed, 12) if has_probe else None
    rows = query_rows(tree, probe, jnp.asarray(root_slot), DEPTH)
    count = 12 + PROBES * has_probe
    visible = np.zeros((BATCH, count, count), bool)
    positions = np.zeros((BATCH, count), int)
    tokens = np.zeros((BATCH, count), int)
    for row in range(BATCH):
        for node in range(12):
            path = path_of(tree, row, node)
            visible[row, node, path] = True
            positions[row, node] = root_slot[row] + len(path) - 1
            tokens[row, node] = tree.tokens[row, node]
        for at in range(count - 12):
            visible[row, 12 + at, path_of(tree, row, int(probe.anchor[row, at]))] = True
            visible[row, 12 + at, 12:] = probe.visible[row, at]
            positions[row, 12 + at] = root_slot[row] + probe.offset[row, at]
            tokens[row, 12 + at] = probe.tokens[row, at]
    np.testing.assert_array_equal(rows.visible, visible)
    np.testing.assert_array_equal(rows.positions, positions)
    np.testing.assert_array_equal(rows.tokens, tokens)


# ---- judge -------------------------------------------------------------------------------------


@cache
def start() -> KVCache:
    """A cache that holds the ragged prompts without their roots, with room for one round."""
    model, params = target(VOCAB)
    given = prompt(BATCH, VOCAB)
    cache = KVCache.create(model.config, BATCH, 32 + NODES + PROBES)
    _, cache = jax.jit(prefill, static_argnums=(4, 5))(
        params, given.tokens, given.length - 1, cache, model, Taps()
    )
    return replace(cache, length=given.length - 1)


def roots() -> jax.Array:
    given = prompt(BATCH, VOCAB)
    return jnp.take_along_axis(given.tokens, given.length[:, None] - 1, axis=1)[:, 0]


def judged(proposal: Proposal):
    """What `judge` says, in a program of its own for each setting of its widths."""
    model, params = target(VOCAB)
    draw = Draw(row_keys(jax.random.key(3), BATCH), start().length + 1, Sampling())
    return program(round_module.ROW_WIDTHS)(params, start(), proposal, draw, model, Reader())


@cache
def program(widths: tuple[int, ...]):
    del widths  # `judge` reads them from its module
    return jax.jit(lambda *given: judge(*given), static_argnums=(4, 5))


def text_logits(texts: list[list[int]]) -> np.ndarray:
    """The target's logits after each text, from one plain pass over all of them."""
    model, params = target(VOCAB)
    longest = max(len(text) for text in texts)
    tokens = jnp.asarray([text + [0] * (longest - len(text)) for text in texts])
    rows = causal_rows(tokens, jnp.zeros((len(texts),), jnp.int32))
    cache = KVCache.create(model.config, *tokens.shape)
    output, _ = jax.jit(model.apply)({"params": params}, rows, cache)
    return np.stack([output.logits[at, len(text) - 1] for at, text in enumerate(texts)])


def test_nodes_and_probes_get_the_logits_of_their_text_alone():
    """Probes here are two runs of text, each going on from some node."""
    tree, numbers = random_tree(0), np.random.default_rng(0)
    anchor = numbers.integers(1, NODES, (BATCH, 2))[:, RUNS]
    step = np.array([1, 2, 3, 1, 2])
    depth = np.take_along_axis(np.asarray(tree.depth), anchor, axis=1)
    probe = replace(
        random_probe(0, NODES),
        anchor=jnp.asarray(anchor),
        offset=jnp.asarray(depth + step),
        visible=jnp.broadcast_to(
            jnp.asarray((RUNS[:, None] == RUNS) & (step[:, None] >= step)), (BATCH, PROBES, PROBES)
        ),
    )
    output, _, _ = judged(Proposal(tree, probe))
    given = prompt(BATCH, VOCAB)
    texts = []
    tree = jax.tree.map(np.asarray, tree)
    for row in range(BATCH):
        before = given.tokens[row, : given.length[row] - 1].tolist()

        def along(node, row=row, before=before):
            return before + tree.tokens[row, path_of(tree, row, node)].tolist()

        texts += [along(node) for node in range(NODES)]
        for at in range(PROBES):
            run = np.flatnonzero((RUNS[at] == RUNS) & (step <= step[at]))
            texts.append(along(int(anchor[row, at])) + probe.tokens[row, run].tolist())
    expected = text_logits(texts).reshape(BATCH, NODES + PROBES, VOCAB)
    np.testing.assert_allclose(output.logits, expected, atol=1e-4)


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, NODES])
def test_a_narrow_pass_judges_as_a_wide_one(most, monkeypatch):
    counts = np.array([most, max(1, most // 2), 1])
    tree = random_tree(1)
    tree = replace(tree, valid=jnp.arange(NODES)[None, :] < counts[:, None])
    probe = random_probe(1, num_nodes=1)  # at the root, which every width holds
    proposal = Proposal(tree, probe)
    narrow, found, narrow_cache = judged(proposal)
    monkeypatch.setattr(round_module, "ROW_WIDTHS", ())
    wide, expected, wide_cache = judged(proposal)

    jax.tree.map(np.testing.assert_array_equal, found, expected)
    if most >= 8:
        assert found.num_accepted[0] == DEPTH, "the true path is among the first 8 nodes"
    width = next(width for width in (1, 8, NODES) if width >= most)
    outputs = [
        (narrow.logits, wide.logits),
        (narrow.hidden, wide.hidden),
        (jnp.moveaxis(narrow.attention, 2, 1), jnp.moveaxis(wide.attention, 2, 1)),
    ]
    for name, (some, every) in zip(("logits", "hidden", "attention"), outputs, strict=True):
        assert some.shape == every.shape
        assert not some[:, width:NODES].any(), "rows beyond the width hold zeros"
        if name == "attention":  # over slots: the probe's lie behind fewer nodes
            some, every = some[..., : start().length.min()], every[..., : start().length.min()]
        np.testing.assert_allclose(some[:, NODES:], every[:, NODES:], atol=1e-4)
        for row, count in enumerate(counts):
            np.testing.assert_allclose(some[row, :count], every[row, :count], atol=1e-4)
    np.testing.assert_array_equal(narrow_cache.length, wide_cache.length)
    for row, count in enumerate(counts):
        slots = slice(0, int(start().length[row]) + count)
        for some, every in zip(narrow_cache.keys, wide_cache.keys, strict=True):
            np.testing.assert_allclose(some[row, :, slots], every[row, :, slots], atol=1e-4)
