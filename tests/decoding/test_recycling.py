"""Token recycling: its table against a dictionary, its tree against the table, and its seed."""

from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.decoding import Context, DraftTree, Draw, Outcome, Params, Prompt, Sampling
from specjax.decoding.drafters._trees import levels_of
from specjax.decoding.drafters.recycling import (
    EMPTY,
    Recycling,
    Successors,
    successors_of,
    with_prompt,
)
from specjax.decoding.sampling import sequence_keys
from specjax.decoding.tree import Verification, sorted_choices
from specjax.loading import parts
from specjax.models.target import ModelOutput
from tests.decoding.contract import assert_params_rejected, generate
from tests.decoding.test_head_trees import found_paths
from tests.decoding.tiny import plain_pass, target

BATCH, TOKENS, NODES, RANKS = 2, 11, 9, Recycling.num_successors
DRAFTER = Recycling(num_tokens=16)


def empty(batch: int = BATCH) -> Successors:
    shape = (batch, TOKENS, RANKS)
    return Successors(jnp.full(shape, EMPTY), jnp.full(shape, -jnp.inf))


def permuted(numbers: np.random.Generator) -> np.ndarray:
    """Different successors of each token, `[BATCH, TOKENS, RANKS]`."""
    tokens = np.tile(np.arange(TOKENS), (BATCH, TOKENS, 1))
    return numbers.permuted(tokens, axis=-1)[..., :RANKS]


def random_outcome(numbers: np.random.Generator) -> Outcome:
    """A chain, of which some nodes repeat a token, some are on the path, and some are invalid."""
    shape = (BATCH, NODES)
    steps = np.broadcast_to(np.arange(NODES), shape)
    num_valid = numbers.integers(1, NODES + 1, (BATCH, 1))
    # Nodes of the path are anywhere among the valid ones, the root first.
    path, accepted = np.zeros((BATCH, 5), int), np.zeros(BATCH, int)
    for row in range(BATCH):
        chosen = numbers.permutation(np.arange(1, num_valid[row, 0]))[:4]
        accepted[row] = len(chosen)
        path[row, 1 : 1 + len(chosen)] = np.sort(chosen)
    tree = DraftTree(
        *map(jnp.asarray, (numbers.integers(0, TOKENS, shape), steps - 1, steps)),
        jnp.asarray(steps < num_valid),
    )
    logits = jnp.asarray(numbers.normal(size=(BATCH, NODES + 3, TOKENS)), jnp.float32)
    verification = Verification(*map(jnp.asarray, (path, accepted, accepted)))
    context = Context(tree.tokens, jnp.full((BATCH,), NODES))
    return Outcome(tree, ModelOutput(logits), verification, context, jnp.zeros((BATCH,), int))


def test_the_table_is_a_dictionary_that_prefers_the_path_then_the_first():
    numbers, update = np.random.default_rng(0), jax.jit(DRAFTER.update, static_argnums=0)
    state, expected = empty(), [{}, {}]
    num_repeated = num_preferred = 0
    for _ in range(30):
        outcome = random_outcome(numbers)
        state = update(target(TOKENS)[0], Params(None), state, outcome)
        outcome, learnt = jax.device_get((outcome, state))
        tree, verification = outcome.tree, outcome.verification
        for row in range(BATCH):
            path = verification.path[row, : int(verification.num_accepted[row]) + 1].tolist()
            others = [node for node in range(tree.valid[row].sum()) if node not in path]
            kept: dict[int, int] = {}
            for node in (*path, *others):
                token = int(tree.tokens[row, node])
                num_repeated += token in kept
                num_preferred += token in kept and node < kept[token]
                kept.setdefault(token, node)
            for token, node in kept.items():
                logits = outcome.output.logits[row, node]
                expected[row][token] = np.argsort(-logits, kind="stable")[:RANKS].tolist()
            table, is_known = learnt.tokens[row], learnt.tokens[row, :, 0] != EMPTY
            assert {t: table[t].tolist() for t in np.flatnonzero(is_known)} == expected[row]
            np.testing.assert_array_equal(np.isfinite(learnt.logits[row, :, 0]), is_known)
    assert num_repeated > 30 and num_preferred > 10


def test_what_follows_a_token_in_the_prompt_comes_first():
    """Row 0 of the table knows half of the tokens, and the prompts end at different places."""
    numbers = np.random.default_rng(2)
    given = Prompt(jnp.asarray(numbers.integers(0, TOKENS, (BATCH, 60))), jnp.array([60, 31]))
    tokens = permuted(numbers)
    tokens[0, ::2] = EMPTY
    logits = np.where(tokens == EMPTY, -np.inf, -np.arange(RANKS)).astype(np.float32)
    table = jax.jit(with_prompt)(Successors(jnp.asarray(tokens), jnp.asarray(logits)), given)
    expected = tokens.tolist()
    for row in range(BATCH):
        text = np.asarray(given.tokens)[row, : given.length[row]].tolist()
        for token, after in pairwise(text):
            others = [other for other in expected[row][token] if other != after]
            expected[row][token] = [after, *others][:RANKS]
    np.testing.assert_array_equal(table.tokens, expected)
    assert (table.logits[..., 1:] <= table.logits[..., :-1]).all()
    np.testing.assert_array_equal(np.isinf(table.logits), table.tokens == EMPTY)


propose = jax.jit(Recycling.propose, static_argnums=(0, 1))


def drafted(state: Successors, sampling: Sampling = Sampling()):
    context = Context(jnp.full((BATCH, 4), 3), jnp.array([4, 2]))
    draw = Draw(sequence_keys(jax.random.key(3), BATCH), context.length, sampling)
    (tree, _), _ = propose(DRAFTER, target(TOKENS)[0], Params(None), state, context, draw)
    return jax.device_get(tree), context, draw


def test_children_are_the_successors_of_their_parents_token_ranked_with_known_noise():
    """Row 0 knows half of the tokens. Golden traces show the ranks at temperature 0."""
    numbers, sampling = np.random.default_rng(1), Sampling(temperature=0.7)
    logits = -np.sort(-numbers.normal(size=(BATCH, TOKENS, TOKENS)), axis=-1)[..., :RANKS]
    tokens = permuted(numbers)
    is_known = (np.arange(TOKENS) % 2 > 0) | (np.arange(BATCH) > 0)[:, None]
    tokens = np.where(is_known[..., None], tokens, EMPTY)
    logits = np.where(is_known[..., None], logits, -np.inf).astype(np.float32)
    tree, context, draw = drafted(Successors(jnp.asarray(tokens), jnp.asarray(logits)), sampling)
    positions = context.length[:, None] + jnp.arange(DRAFTER.max_depth)[None, :]
    noise = sampling.temperature * np.asarray(draw.noise(positions, TOKENS))
    for row in range(BATCH):
        expected = {(): 3}
        for choice in sorted_choices(DRAFTER.choices)[0]:
            parent = expected.get(choice[:-1])
            if parent is None or not is_known[row, parent]:
                continue
            successors = tokens[row, parent]
            scores = logits[row, parent] + noise[row, len(choice) - 1][successors]
            expected[choice] = successors[np.argsort(-scores)[choice[-1]]]
        paths = {
            tuple(int(expected[choice[:end]]) for end in range(1, len(choice) + 1))
            for choice in expected
        } - {()}
        assert sorted(found_paths(tree, row)) == sorted(paths) and paths
        assert (len(paths) < 15) == (row == 0)


def test_an_unknown_root_drafts_nothing_and_a_learnt_cycle_everything():
    assert drafted(empty())[0].valid.sum(axis=1).tolist() == [1, 1]
    after = (np.arange(TOKENS)[:, None] + 1 + np.arange(RANKS)) % TOKENS
    state = Successors(*(jnp.asarray([table] * BATCH) for table in (after, -1.0 * after)))
    assert (4, 5, 6) in found_paths(drafted(state)[0], 0)


def test_every_size_is_a_tree_whose_scores_fall_from_parent_to_child():
    for size in range(2, 65):
        choices = Recycling(size).choices
        assert len(set(choices)) == size - 1 and len(levels_of(choices)) >= 1
        assert set(choices) == set(Recycling(64).choices[: size - 1])
    after = np.tile(np.arange(RANKS), (BATCH, TOKENS, 1))
    tree = drafted(Successors(jnp.asarray(after), -1.0 * jnp.asarray(after)))[0]
    below = tree.depth > 0
    parents = np.take_along_axis(tree.scores, np.maximum(tree.parents, 0), axis=1)
    assert (tree.scores < parents)[below].all()


def test_the_seed_holds_the_targets_successors_of_each_token():
    model, params = target()
    seed = successors_of(model, params, RANKS)
    logits = plain_pass(params, jnp.arange(40)[:, None], model)[0].logits[:, 0]
    np.testing.assert_array_equal(seed.tokens, jax.lax.top_k(logits, RANKS)[1])
    np.testing.assert_allclose(seed.logits, jax.lax.top_k(logits, RANKS)[0], rtol=1e-5)
    first = type(model)(replace(model.config, bos_token_id=7))
    begun = successors_of(first, params, RANKS)
    pairs = jnp.stack([jnp.full((40,), 7), jnp.arange(40)], axis=1)
    logits = plain_pass(params, pairs, model)[0].logits[:, 1]
    np.testing.assert_array_equal(begun.tokens, jax.lax.top_k(logits, RANKS)[1])
    drafter = Recycling(12, seeded=True)
    out = generate(drafter, seed, max_new_tokens=8)
    np.testing.assert_array_equal(out.stats.drafted, 11 * out.stats.rounds)  # from the first round
    assert_params_rejected(drafter, None, "seeded Recycling needs the successors of this target")
    assert_params_rejected(Recycling(12), seed, "Recycling has no params but was given some")


def test_a_seed_is_computed_once_per_target(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded, computed = specjax.load("pocket"), []

    def compute(model, params, count):
        computed.append(model)
        zeros = jnp.zeros((loaded.config.vocab_size, count))
        return Successors(zeros.astype(jnp.int32), zeros)

    monkeypatch.setattr(parts, "successors_of", compute)
    load = lambda: specjax.load_drafter("recycling", loaded, seeded=True)[1]  # noqa: E731
    first, second = load(), load()
    assert len(computed) == 1
    jax.tree.map(np.testing.assert_array_equal, first, second)
    [file] = tmp_path.rglob("*.safetensors")
    file.write_bytes(b"damaged")
    load()
    assert len(computed) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # where no folder can be made
    load()
    assert len(computed) == 3
    assert "the successors of tokens cannot be kept" in capsys.readouterr().err
