"""One battery for every drafter: whatever it drafts, the text is that of plain decoding."""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.datastore import build
from specjax.datastore import params as datastore_params
from specjax.decoding import round as round_module
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.auto import Gated
from specjax.decoding.drafters.autoregressive import Autoregressive
from specjax.decoding.drafters.draft_model import DraftModel
from specjax.decoding.drafters.eagle import Eagle, EagleSettings
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.drafters.prompt_lookup_plus import PromptLookupPlus
from specjax.decoding.drafters.retrieval import Retrieval
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.prompt import from_ids
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import Sampling
from specjax.methods import METHODS, make_drafter
from specjax.models.config import Rope
from specjax.models.transformer import Transformer
from tests.decoding.heads import EAGLE2, head
from tests.decoding.hydra_heads import HYDRA, HYDRA_PREFIX, hydra_head
from tests.decoding.medusa_heads import MEDUSA, MEDUSA_DYNAMIC, medusa_head
from tests.decoding.parallel_heads import (
    PARALLEL_DYNAMIC,
    PARALLEL_EAGLE,
    PARALLEL_MEDUSA,
    parallel_head,
)
from tests.decoding.tiny import Oracle, OracleTree, prompt, target

NEW_TOKENS = 256
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.9)}
SMALLER = {"pld-plus-attention": {"num_tokens": 20}, "rest": {"max_drafted": 12}}  # to compile
SMALL_CHOICES = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
DRAFTERS = {
    **{
        name: make_drafter(name, target()[0].config, SMALLER.get(name, {}))
        for name in METHODS
        if name not in ("draft-model", "auto") and not METHODS[name].head
    },
    "auto": Gated(PromptLookup(), (1, 4, 11), (1.0, 1.5, 1.8), expected=2.0),
    "auto-eagle2": Gated(EAGLE2, (1, EAGLE2.num_nodes), (1.0, 1.3), expected=2.0),  # it shuts
    "draft-model": DraftModel(draft=target(layers=1)[0], max_length=6),
    "eagle": Eagle(head()[0], target()[0], EagleSettings(SMALL_CHOICES)),
    "eagle2": EAGLE2,
    "medusa": MEDUSA,
    "medusa-dynamic": MEDUSA_DYNAMIC,
    "hydra": HYDRA,
    "hydra-prefix": HYDRA_PREFIX,
    "parallel-medusa": PARALLEL_MEDUSA,
    "parallel-eagle": PARALLEL_EAGLE,
    "parallel-eagle-dynamic": PARALLEL_DYNAMIC,
    "pld-shorter": PromptLookup(allow_shorter=True, num_tokens=5, max_ngram=2),
    "pld-plus-strict": PromptLookupPlus(layer=2, num_tokens=9, min_similarity=0.5),
    "never": Oracle(wrong_every=1),
    "sometimes": Oracle(wrong_every=3, vary_length=True),
    "always": Oracle(max_depth=6),
    "tree": OracleTree(),
}

OF_HEADS = dict(
    [
        *(head(), medusa_head(), hydra_head(), hydra_head(has_prefix=True)),
        *(parallel_head(), parallel_head(False)),
    ]
)


@cache
def truth(sampling: str, batch: int, eos: tuple[int, ...] = (), new_tokens: int = NEW_TOKENS):
    """Plain decoding without cache, tree or drafter."""
    model, params = target()
    tokens, length = reference_generate(
        params,
        prompt(batch),
        jax.random.key(1),
        target=model,
        sampling=SAMPLINGS[sampling],
        max_new_tokens=new_tokens,
        eos=eos,
    )
    return np.asarray(tokens), np.asarray(length)


def whole_texts(sampling: str, batch: int) -> jax.Array:
    """Prompt and true continuation of each row: what the oracles know."""
    given, (tokens, _) = prompt(batch), truth(sampling, batch)
    rows = [
        np.concatenate([np.asarray(given.tokens)[row, : given.length[row]], tokens[row]])
        for row in range(batch)
    ]
    longest = max(len(row) for row in rows)
    return jnp.asarray([np.pad(row, (0, longest - len(row))) for row in rows])


@cache
def datastore():
    """Documents that share some of their text with what the target will say, not all."""
    documents = [tokens[40:200].tolist() for tokens in truth("greedy", 3)[0]]
    documents += [tokens[:90].tolist() for tokens in truth("sampled", 3)[0]]
    return datastore_params(build(documents, vocab_size=40))


@cache
def generate(name: str, sampling: str, batch: int, eos=(), new_tokens: int = NEW_TOKENS):
    model, params = target()
    drafter = DRAFTERS[name]
    known, inner = None, getattr(drafter, "inner", drafter)
    if isinstance(drafter, Oracle | OracleTree):
        known = whole_texts(sampling, batch)
    elif isinstance(drafter, Retrieval):
        known = datastore()
    elif isinstance(drafter, DraftModel):
        known = {"draft": target(layers=1)[1], "rule": None}
    elif hasattr(inner, "head"):
        known = OF_HEADS[inner.head]
    return speculative_generate(
        Params(params, known),
        prompt(batch),
        jax.random.key(1),
        target=model,
        drafter=drafter,
        sampling=SAMPLINGS[sampling],
        max_new_tokens=new_tokens,
        eos=eos,
    )


@pytest.mark.parametrize("sampling, batch", [("greedy", 3), ("sampled", 3), ("sampled", 1)])
@pytest.mark.parametrize("name", DRAFTERS)
def test_says_what_plain_decoding_says(name, sampling, batch):
    tokens, length = truth(sampling, batch)
    out = generate(name, sampling, batch)
    np.testing.assert_array_equal(out.tokens, tokens)
    np.testing.assert_array_equal(out.length, length)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "pld-plus", "lookahead", "rest", "always", "tree"),
        *("eagle2", "medusa", "hydra-prefix", "parallel-eagle", "auto-eagle2"),
    ],
)
def test_ends_after_the_first_eos(name, sampling):
    tokens, _ = truth(sampling, 3)
    eos = (int(tokens[0, 37]), int(tokens[1, 60]))
    expected, length = truth(sampling, 3, eos)
    assert len(set(length.tolist())) > 1, "rows should end at different lengths"
    out = generate(name, sampling, 3, eos)
    np.testing.assert_array_equal(out.length, length)
    np.testing.assert_array_equal(out.tokens, expected)


@pytest.mark.parametrize(
    "name, new_tokens", [*product(("plain", "always", "tree"), (1, 10, 15)), ("auto", 10)]
)
def test_ends_at_max_new_tokens_in_the_middle_of_a_path(name, new_tokens):
    tokens, _ = truth("greedy", 3)
    out = generate(name, "greedy", 3, new_tokens=new_tokens)
    np.testing.assert_array_equal(out.tokens, tokens[:, :new_tokens])
    np.testing.assert_array_equal(out.length, [new_tokens] * 3)


def test_accepted_length_follows_how_often_the_target_agrees():
    never, always = generate("never", "greedy", 3), generate("always", "greedy", 3)
    assert never.stats.mean_accepted_length == 1
    assert not never.from_draft.any()
    # 256 = 36 rounds of 7 and a last one cut to 4.
    np.testing.assert_array_equal(always.stats.rounds, [37] * 3)
    assert (always.stats.accepted_lengths[:, 7] == 36).all()
    assert (always.stats.accepted_lengths[:, 4] == 1).all()
    sometimes = generate("sometimes", "greedy", 3).stats.mean_accepted_length
    assert 1 < sometimes < always.stats.mean_accepted_length


@pytest.mark.parametrize(
    "name",
    [
        *("pld-plus", "pld-plus-attention", "lookahead", "rest", "sometimes", "tree"),
        *("eagle", "eagle2", "medusa", "hydra", "parallel-medusa", "parallel-eagle-dynamic"),
        *("auto", "auto-eagle2"),
    ],
)
def test_stats_add_up(name):
    out = generate(name, "greedy", 3)
    lengths = jnp.arange(out.stats.accepted_lengths.shape[1])
    tokens = jnp.sum(out.stats.accepted_lengths * lengths[None, :], axis=1)
    np.testing.assert_array_equal(tokens, out.length)
    np.testing.assert_array_equal(jnp.sum(out.stats.accepted_lengths, axis=1), out.stats.rounds)
    # Every round adds one token of the target's own, unless the last one was cut before it.
    was_cut = out.from_draft[:, NEW_TOKENS - 1].astype(int)
    own_tokens = out.length - jnp.sum(out.from_draft, axis=1)
    np.testing.assert_array_equal(own_tokens, out.stats.rounds - was_cut)
    assert (out.stats.drafted >= out.length - out.stats.rounds).all()


def test_gates_let_some_rounds_draft_and_others_not():
    shut, gated, free = (
        generate(name, "greedy", 3).stats for name in ("auto-eagle2", "auto", "pld")
    )
    nodes = EAGLE2.num_nodes - 1
    assert (shut.drafted > 0).all()
    assert (shut.drafted <= 11 * nodes).all(), "each round loses 0.3 steps, 3 are too many"
    assert (shut.rounds == NEW_TOKENS).all()
    length = PromptLookup().num_tokens
    assert (gated.drafted % length == 0).all(), "it drafts so much or nothing"
    num_drafting = gated.drafted // length
    assert (num_drafting > 10).all()
    assert (num_drafting < gated.rounds // 2).all()
    assert (num_drafting < free.drafted // length // 2).all()


@pytest.mark.parametrize("name, rope", [("plain", "dynamic"), ("pld-plus", "default")])
def test_a_row_of_a_batch_equals_its_prompt_alone(name, rope):
    """Also with a dynamic RoPE, which depends on how long a text may become: 45 to 70 tokens."""
    model, params = target()
    config = replace(model.config, max_position_embeddings=48, rope=Rope(rope, factor=2.0))
    model = Transformer(config) if rope == "dynamic" else model
    batch = prompt(3)
    run = partial(
        speculative_generate,
        target=model,
        drafter=DRAFTERS[name],
        sampling=SAMPLINGS["sampled"],
        max_new_tokens=40,
    )
    together = run(Params(params), batch, jax.random.key(1))
    for row in range(3):
        bucket = 1 if rope == "dynamic" else 32
        alone = from_ids([batch.tokens[row, : batch.length[row]].tolist()], bucket)
        out = run(Params(params), alone, jax.random.fold_in(jax.random.key(1), row))
        np.testing.assert_array_equal(out.tokens[0], together.tokens[row])


@pytest.mark.parametrize(
    ("name", "rounds_per_call"),
    [("pld-plus", 1), ("pld-plus", 5), ("parallel-medusa", 5), ("auto", 5)],
)
def test_streaming_says_the_same(name, rounds_per_call):
    model, params = target()
    drafter = DRAFTERS[name]
    seen = []
    for part in stream(
        Params(params, OF_HEADS[drafter.head] if hasattr(drafter, "head") else None),
        prompt(3),
        jax.random.key(1),
        target=model,
        drafter=drafter,
        max_new_tokens=NEW_TOKENS,
        rounds_per_call=rounds_per_call,
    ):
        seen.append(part)
    seen = [jax.device_get(part) for part in seen]  # earlier parts stay readable to the end
    whole = generate(name, "greedy", 3)
    np.testing.assert_array_equal(seen[-1].tokens, whole.tokens)
    np.testing.assert_array_equal(seen[-1].from_draft, whole.from_draft)
    assert (seen[-1].stats.rounds == whole.stats.rounds).all()
    whole = jax.device_get(whole)
    for part in seen:  # and are beginnings of the whole
        for row in range(3):
            count = int(part.length[row])
            np.testing.assert_array_equal(part.tokens[row, :count], whole.tokens[row, :count])
            assert part.stats.accepted_lengths[row].sum() == part.stats.rounds[row]


@pytest.mark.parametrize("donate", [False, True])
def test_runs_under_an_outer_jit(donate):
    model, params = target()
    run = partial(speculative_generate, target=model, drafter=PromptLookup(), max_new_tokens=40)
    outer = jax.jit(lambda *given: run(*given).tokens, donate_argnums=(0,) if donate else ())
    copy = jax.tree.map(jnp.copy, params)
    tokens = outer(Params(copy), prompt(3), jax.random.key(1))
    np.testing.assert_array_equal(tokens, truth("greedy", 3)[0][:, :40])


def test_fifty_prompts_of_one_bucket_trace_once():
    model, params = target()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(params, prompt, key):
        settings = {"target": model, "drafter": PromptLookup(), "max_new_tokens": 20}
        return speculative_generate(params, prompt, key, **settings)

    numbers = np.random.default_rng(0)
    for _ in range(50):
        ids = numbers.integers(0, 40, numbers.integers(2, 33)).tolist()
        out = run(Params(params), from_ids([ids], bucket=32), jax.random.key(0))
        assert out.length == 20
    with pytest.raises(AssertionError, match="traced"):
        run(Params(params), from_ids([[1] * 40], bucket=32), jax.random.key(0))


def test_a_batch_that_advances_by_its_minimum_is_caught(monkeypatch):
    right = round_module.verify

    def wrong(*given):
        verification = right(*given)
        least = jnp.min(verification.num_accepted)
        return type(verification)(
            verification.path, jnp.full_like(verification.num_accepted, least), verification.bonus
        )

    monkeypatch.setattr(round_module, "verify", wrong)
    model, params = target()
    out = speculative_generate(
        Params(params, whole_texts("greedy", 3)),
        prompt(3),
        jax.random.key(1),
        target=model,
        drafter=Oracle(wrong_every=5, max_depth=3),  # not among DRAFTERS: compiled afresh
        max_new_tokens=64,
    )
    assert (np.asarray(out.tokens) != truth("greedy", 3)[0][:, :64]).any()


def test_bfloat16_differs_only_where_plain_decoding_nearly_ties():
    epsilon = 0.125  # between logits of size 8 to 16, neighbours in bfloat16 are 0.0625 apart
    model, params = target()
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    run = partial(speculative_generate, target=model, max_new_tokens=128)
    plain = run(Params(params), prompt(3), jax.random.key(1), drafter=Autoregressive())
    fast = run(Params(params), prompt(3), jax.random.key(1), drafter=DRAFTERS["pld-plus"])
    mismatches = 0
    for row in range(3):
        differs = np.flatnonzero(np.asarray(plain.tokens[row] != fast.tokens[row]))
        if len(differs):
            mismatches += 1
            assert top_two_gap(model, params, row, plain.tokens[row], differs[0]) < epsilon
    print(f"bfloat16: {mismatches} of 3 rows differ, each at a near tie")


def top_two_gap(model, params, row, new_tokens, at) -> float:
    from specjax.models.cache import KVCache
    from specjax.models.target import causal_rows

    given = prompt(3)
    text = jnp.concatenate([given.tokens[row, : given.length[row]], new_tokens[:at]])[None]
    cache = KVCache.create(model.config, 1, text.shape[1], jnp.bfloat16)
    output, _ = model.run(params, causal_rows(text, jnp.zeros(1, int)), cache)
    best, second = jax.lax.top_k(output.logits[0, -1], 2)[0]
    return float(best - second)
