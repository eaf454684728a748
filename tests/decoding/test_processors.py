"""Processors: with any of them switched on, every method generates plain decoding's tokens."""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import Engine, Params, Prompt, Sampling, chain, processors, reference_generate
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.per_sequence import per_sequence
from specjax.decoding.processors import Controls, Nodes, Processor, advanced
from specjax.decoding.sampling import sequence_keys
from specjax.loading.methods import METHODS
from tests.decoding import contract
from tests.decoding.contract import KEY, assert_rejects_values_out_of_bounds, generate
from tests.decoding.test_contract import of_method
from tests.decoding.tiny import (
    BATCH,
    Oracle,
    OracleTree,
    from_choices,
    plain_pass,
    prompt,
    slow_except,
    target,
)

VOCAB, STATES, EOS = 40, 3, (17,)
LIMITS = {"max_new_tokens": 60, "eos": EOS}


@dataclass(frozen=True)
class Automaton(Processor):
    """Moves from state to state by a table, `params [STATES, V]`; each state bans some tokens."""

    def init(self, params, prompt, vocab_size):
        start = jnp.zeros_like(prompt.length)
        steps = jnp.arange(prompt.tokens.shape[1])[None, :]
        tokens = jnp.where(steps < prompt.length[:, None], prompt.tokens, 0)
        return advanced(lambda state, token: params[state, token], start, tokens, prompt.length)

    def apply(self, params, logits, state, nodes):
        states = nodes.states(lambda state, token: params[state, token], state)
        is_banned = jnp.arange(logits.shape[-1])[None, None] % STATES == states[..., None]
        return jnp.where(is_banned, -jnp.inf, logits)

    def commit(self, params, state, tokens, count):
        return advanced(lambda state, token: params[state, token], state, tokens, count)


TABLE = jnp.asarray(np.random.default_rng(4).integers(0, STATES, (STATES, VOCAB)), jnp.int32)
PAIRS = tuple((a, b) for a, b in product(range(VOCAB), range(VOCAB)) if (a + b) % 20 == 0)
CONTROLS = {
    "min_p": {"min_p": 0.2},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {3: 4.0, 7: -5.0, 12: 2.5}},
    "bad words": {"bad_words": ((5,), (12, 3, 3), (1, 2, 4, 8), *PAIRS)},
    "min new tokens": {"min_new_tokens": 30},
    "automaton": {"processors": (Automaton(),)},
}
ALL = {name: value for settings in CONTROLS.values() for name, value in settings.items()}
CASES = CONTROLS | {"all": ALL | {"logprobs": 3}, "none": {}}


def sampling_of(controls: str, temperature: float) -> Sampling:
    return Sampling(temperature, top_p=0.95 if temperature else 1.0, **CASES[controls])


def arrays_of(sampling: Sampling) -> tuple:
    return (TABLE,) if sampling.processors else ()


@cache
def truth(controls: str, temperature: float):
    """Tokens and lengths of plain decoding by the definitions, without cache, tree or drafter."""
    (model, params), sampling = target(), sampling_of(controls, temperature)
    settings = {"sampling": sampling, "processor_params": arrays_of(sampling)} | LIMITS
    return jax.device_get(reference_generate(params, prompt(), KEY, target=model, **settings))


def controlled(drafter, known, sampling: Sampling, *given, **values):
    settings = {"arrays": arrays_of(sampling), "sampling": sampling, **values}
    return generate(drafter, known, *given, **settings, **LIMITS)


def generated(name: str, controls: str, temperature: float, drafter=None):
    """Asserts that an oracle generates the tokens of the reference; returns the generation."""
    expected, sampling = truth(controls, temperature), sampling_of(controls, temperature)
    texts = contract.continued(*expected)
    out = controlled(drafter or ORACLES[name], texts, sampling)
    np.testing.assert_array_equal(out.tokens, expected[0])
    np.testing.assert_array_equal(out.length, expected[1])
    if sampling.logprobs:
        assert_logprobs(out, np.asarray(texts), np.asarray(prompt().length))
    return out


def assert_logprobs(out, texts: np.ndarray, starts: np.ndarray) -> None:
    """Asserts that the log-probabilities are those of one plain pass over the texts."""
    model, params = target()
    logits = plain_pass(params, jnp.asarray(np.maximum(texts, 0)), model)[0].logits
    law = np.asarray(jax.nn.log_softmax(logits))
    raw, processed = out.logprobs.raw, out.logprobs.processed
    for row, (start, length) in enumerate(zip(starts, out.length, strict=True)):
        expected = law[row, start - 1 : start - 1 + length]
        at_tokens = np.take_along_axis(expected, out.tokens[row, :length, None], axis=1)[:, 0]
        best = np.argsort(-expected, axis=1, kind="stable")[:, :3]
        top = np.take_along_axis(expected, best, axis=1)
        np.testing.assert_allclose(raw.token[row, :length], at_tokens, atol=1e-4)
        np.testing.assert_allclose(raw.top[row, :length], top, atol=1e-4)
        np.testing.assert_array_equal(raw.top_tokens[row, :length], best)
        assert not raw.top[row, length:].any()
    assert np.isfinite(processed.token).all()
    assert (processed.top[..., 0] >= processed.token - 1e-6).all()


@pytest.mark.parametrize("name", slow_except(METHODS, "eagle2"))
def test_every_method_generates_the_tokens_and_log_probabilities_of_plain_decoding(name):
    """Both temperatures in one program: the batch is there twice, with values per sequence."""
    drafter, known = of_method(name)
    truths = [truth("all", temperature) for temperature in (0.0, 0.8)]
    settings = [sampling_of("all", 0.0)] * BATCH + [sampling_of("all", 0.8)] * BATCH
    sampling, values = per_sequence(settings, VOCAB)
    given = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * 2), prompt())
    keys = jnp.concatenate([sequence_keys(KEY, BATCH)] * 2)
    out = controlled(drafter, known, sampling, given, keys, values=values)
    np.testing.assert_array_equal(out.tokens, np.concatenate([tokens for tokens, _ in truths]))
    np.testing.assert_array_equal(out.length, np.concatenate([lengths for _, lengths in truths]))
    texts = np.concatenate([contract.continued(*each) for each in truths])
    assert_logprobs(out, texts, np.asarray(given.length))


# Below the root the truth has the ranks 0, 1, 2 at positions divisible by 4.
DEEP = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 1), (1, 2), (0, 1, 1), (0, 1, 2), (0, 1, 2, 0))
ORACLES = {"tree": OracleTree(DEEP), "chain": Oracle(max_depth=6)}


@pytest.mark.parametrize(
    ("name", "controls", "temperature"),
    slow_except(
        [("chain", "all", 0.0), *product(("tree",), (*CONTROLS, "all"), (0.8,))],
        *(("chain", "all", 0.0), ("tree", "all", 0.8)),
    ),
)
def test_every_control_changes_the_text_and_is_exact_deep_in_a_draft(name, controls, temperature):
    out = generated(name, controls, temperature)
    assert out.stats.accepted_lengths[:, 4:].sum() > 0, "no path was deep"
    without = truth("none", 0.8)[0] if temperature else out.logprobs.raw.top_tokens[..., 0]
    assert (out.tokens != without).any()


@pytest.mark.slow
def test_every_control_is_exact_for_one_sequence():
    """The first of a batch, whose key is folded."""
    known, key = contract.continued(*truth("all", 0.8))[:1], jax.random.fold_in(KEY, 0)
    out = controlled(ORACLES["chain"], known, sampling_of("all", 0.8), prompt(1), key)
    np.testing.assert_array_equal(out.tokens[0], truth("all", 0.8)[0][0])
    assert out.from_draft.any()


def test_the_logits_of_a_node_are_those_of_the_text_that_leads_to_it():
    """Repeated ancestors, negative logits and words that end in a draft included."""
    numbers, batch = np.random.default_rng(8), 2
    sampling = sampling_of("all", 0.0)
    tree = from_choices(jnp.asarray([12, 3]), jnp.asarray([[[12, 3]] * 3] * batch), PATHS)
    tokens = numbers.integers(0, VOCAB, (batch, 24)).astype(np.int32)
    tokens[0, 8], tokens[1, 11] = 12, 3
    length, given = np.asarray([9, 12]), Prompt(prompt(batch).tokens[:, :8], jnp.asarray([5, 8]))
    logits = numbers.normal(0, 4, (batch, tree.num_nodes, VOCAB)).astype(np.float32)
    found = processed(sampling, given, tokens, length, logits, tree, 3)
    paths = [(), *PATHS]
    for node, path in enumerate(paths):
        texts = tokens.copy()
        for depth, _ in enumerate(path, 1):
            above = paths.index(path[:depth])
            texts[np.arange(batch), length + depth - 1] = tree.tokens[:, above]
        ends = length + len(path)
        last = np.take_along_axis(texts, ends[:, None] - 1, axis=1)
        root = chain(jnp.asarray(last[:, 0]), jnp.asarray(last[:, :0]), jnp.zeros(batch, int))
        alone = processed(sampling, given, texts, ends, logits[:, node : node + 1], root, 0)
        np.testing.assert_allclose(found[:, node], alone[:, 0], rtol=1e-6)


PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1), (1, 0, 1))


@partial(jax.jit, static_argnums=(0, 6))
def processed(sampling, given, tokens, length, logits, tree, max_depth):
    """Returns the logits of a tree below texts, with the controls applied."""
    arrays = [TABLE if isinstance(p, Automaton) else None for p in sampling.all_processors]
    place = given.length[:, None] + jnp.arange(tokens.shape[1])[None, :]
    new = jnp.take_along_axis(tokens, place, axis=1, mode="clip"), length - given.length
    states = [
        processor.commit(params, processor.init(params, given, VOCAB), *new)
        for processor, params in zip(sampling.all_processors, arrays, strict=True)
    ]
    text = tokens, length, given.length
    controls = Controls(*text, tuple(states), tuple(arrays), sampling.all_processors, EOS)
    return controls.apply(logits, tree, max_depth)


def forget(nodes: Nodes) -> jax.Array:
    """Takes the place of `Nodes.above`: no node has ancestors."""
    return jnp.zeros((*nodes.tree.tokens.shape, nodes.tree.num_nodes), bool)


def stay(nodes: Nodes, step, state) -> jax.Array:
    return jnp.broadcast_to(state[:, None], nodes.tree.tokens.shape)


FAULTS = {  # each with a choice that is used nowhere else, so that it is compiled afresh
    "above": (Nodes, property(forget), (2, 0)),
    "states": (Nodes, stay, (2, 1)),
    "last": (Nodes, lambda nodes, count: jnp.full((*nodes.tree.tokens.shape, count), -1), (2, 2)),
    "commit": (processors.Penalties, lambda self, params, state, *_: state, (1, 0)),
}


@pytest.mark.parametrize("fault", slow_except(FAULTS, "above"))
def test_a_processor_that_forgets_ancestors_or_committed_tokens_is_caught(monkeypatch, fault):
    owner, wrong, choice = FAULTS[fault]
    monkeypatch.setattr(owner, fault, wrong)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        generated("tree", "all", 0.8, drafter=OracleTree((*DEEP, choice)))


STRONG = {"temperature": 0.9, "repetition_penalty": 2.0, "frequency_penalty": 2.0}


@pytest.mark.slow
def test_rejection_keeps_the_distribution_of_the_processed_logits():
    sampling = Sampling(**STRONG, verification="rejection")
    assert contract.p_value(PromptLookup(num_tokens=2), sampling=sampling) > 1e-3


@pytest.mark.slow
def test_rejection_that_forgets_ancestors_is_caught(monkeypatch):
    monkeypatch.setattr(Nodes, "above", property(forget))
    compiled_afresh = Sampling(**STRONG, verification="rejection", top_k=contract.VOCAB)
    assert contract.p_value(PromptLookup(num_tokens=2), sampling=compiled_afresh) < 1e-6


@pytest.mark.parametrize("name", ["min_p", "repetition", "bias", "bad words", "min new tokens"])
def test_the_definitions_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    numbers, count = np.random.default_rng(len(name)), 1000
    logits = numbers.normal(0, 3, (count, VOCAB)).astype(np.float32)
    tokens = numbers.integers(0, 6, (count, 12))
    words = ((5,), (17,), (1, 2), (4, 0), (0, 1, 2), (3,) * 13)
    special = {"bad words": {"bad_words": words}, "min new tokens": {"min_new_tokens": 9}}
    sampling = Sampling(1.0, **special.get(name, CASES[name]))
    biases = {(token,): float(bias) for token, bias in sampling.logit_bias}
    make = {
        "min_p": lambda: theirs.MinPLogitsWarper(sampling.min_p),
        "repetition": lambda: theirs.RepetitionPenaltyLogitsProcessor(1.8),
        "bias": lambda: theirs.SequenceBiasLogitsProcessor(biases),
        "bad words": lambda: theirs.NoBadWordsLogitsProcessor([*map(list, words)], list(EOS)),
        "min new tokens": lambda: theirs.MinNewTokensLengthLogitsProcessor(4, 9, list(EOS)),
    }
    expected = make[name]()(torch.tensor(tokens), torch.tensor(logits)).numpy()
    if name == "min_p":
        found = np.asarray(sampling.filtered(jnp.asarray(logits)))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        return
    ends = jnp.full((count,), 12)
    given = Prompt(jnp.asarray(tokens[:, :4], jnp.int32), ends * 0 + 4)
    text = jnp.asarray(tokens, jnp.int32)
    root = chain(text[:, -1], text[:, :0], ends * 0)
    found = processed(sampling, given, text, ends, logits[:, None], root, 0)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_prefill_does_not_depend_on_the_values_of_processors_without_a_state():
    one = Sampling(0.5, logit_bias={1: 1.0}, bad_words=((1,),), min_new_tokens=1)
    other = Sampling(0.7, logit_bias={2: 3.0}, bad_words=((2, 3),), min_new_tokens=5)
    assert one.for_prefill == other.for_prefill
    penalties = [Sampling(repetition_penalty=value).for_prefill for value in (1.1, 1.2)]
    assert penalties[0] != penalties[1]


def test_equal_biases_are_equal_settings_in_any_order():
    assert Sampling(logit_bias={3: 1.0, 9: 2.0}) == Sampling(logit_bias={9: 2.0, 3: 1.0})


def test_settings_out_of_bounds_are_rejected():
    assert_rejects_values_out_of_bounds(Sampling())
    with pytest.raises(SpecjaxError, match="`bad_words` holds an empty sequence"):
        Sampling(bad_words=((),))
    for bias in (jnp.nan, jnp.inf, 1e39):
        with pytest.raises(SpecjaxError, match="`logit_bias` must hold numbers from -1e\\+30"):
            Sampling(logit_bias={3: bias})


@pytest.mark.parametrize(
    ("settings", "arrays", "message"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, (), "logit_bias holds token id 40, outside"),
        ({"bad_words": ((1, -3),)}, (), "bad_words holds token id -3, outside"),
        ({"processors": (Automaton(),)}, (1, 2), "2 entries for 1 processors"),
    ],
)
def test_settings_that_do_not_fit_the_request_are_rejected(settings, arrays, message):
    model, params = target()
    engine = Engine(model, ORACLES["chain"], Sampling(**settings), max_new_tokens=4)
    with pytest.raises(SpecjaxError, match=message):
        engine.check(Params(params, None, arrays), prompt(1))
