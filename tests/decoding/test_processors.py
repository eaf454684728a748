"""Processors: with any of them switched on, every method generates plain decoding's tokens."""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core.errors import SpecjaxError
from specjax.decoding import processors, reference
from specjax.decoding.drafter import Params
from specjax.decoding.drafters.prompt_lookup import PromptLookup
from specjax.decoding.engine import Engine
from specjax.decoding.generate import speculative_generate
from specjax.decoding.processors import Controls, Nodes, Processor, advanced
from specjax.decoding.prompt import Prompt
from specjax.decoding.reference import reference_generate
from specjax.decoding.sampling import Draw, Sampling, sequence_keys
from specjax.decoding.tree import chain
from specjax.decoding.verify import verify
from specjax.loading.methods import METHODS
from specjax.models.families import read_config
from specjax.models.io.huggingface import load_transformer
from specjax.models.transformer import Transformer
from tests.decoding import contract
from tests.decoding.contract import KEY, assert_rejects_values_out_of_bounds
from tests.decoding.test_contract import of_method
from tests.decoding.tiny import (
    Oracle,
    OracleTree,
    from_choices,
    plain_pass,
    prompt,
    slow_except,
    target,
)
from tests.models import checkpoints

VOCAB, NEW_TOKENS, EOS = 40, 60, (17,)
STATES = 3


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
PAIRS = tuple((a, b) for a, b in product(range(VOCAB), range(VOCAB)) if (a + b) % 5 == 0)
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
    model, params = target()
    sampling = sampling_of(controls, temperature)
    return jax.device_get(
        reference_generate(
            *(params, prompt(), KEY),
            target=model,
            sampling=sampling,
            max_new_tokens=NEW_TOKENS,
            eos=EOS,
            processor_params=arrays_of(sampling),
        )
    )


def whole_texts(controls: str, temperature: float) -> jax.Array:
    """Prompts and true continuations: what an oracle knows."""
    return contract.continued(*truth(controls, temperature))


def generated(name: str, controls: str, temperature: float, drafter=None):
    """Asserts that a method generates the tokens of the reference; returns the generation.

    With all controls the log-probabilities, too, must be those of the text without a draft.
    """
    expected, lengths = truth(controls, temperature)
    if name in ORACLES:
        drafter, known = drafter or ORACLES[name], whole_texts(controls, temperature)
    else:
        drafter, known = of_method(name)
    model, params = target()
    sampling = sampling_of(controls, temperature)
    out = speculative_generate(
        *(Params(params, known, arrays_of(sampling)), prompt(), KEY),
        target=model,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
        eos=EOS,
    )
    out = jax.device_get(out)
    np.testing.assert_array_equal(out.length, lengths)
    np.testing.assert_array_equal(out.tokens, expected)
    if sampling.logprobs:
        assert_logprobs(out, whole_texts(controls, temperature))
    return out


def assert_logprobs(out, texts: jax.Array) -> None:
    """Asserts that the log-probabilities are those of one plain pass over the texts."""
    model, params = target()
    logits = plain_pass(params, jnp.maximum(texts, 0), model)[0].logits
    law = np.asarray(jax.nn.log_softmax(logits))
    raw, processed = out.logprobs.raw, out.logprobs.processed
    for row, (start, length) in enumerate(zip(prompt().length, out.length, strict=True)):
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


# Below the root the truth has the ranks 0, 1, 2 at positions divisible by 4.
DEEP = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 1), (1, 2), (0, 1, 1), (0, 1, 2), (0, 1, 2, 0))
ORACLES = {"tree": OracleTree(DEEP), "chain": Oracle(max_depth=6)}
METHOD_CASES = [*product(METHODS, (0.0, 0.8))]
QUICK = ("eagle2", 0.8), ("lookahead", 0.8), ("pld-plus", 0.0)


@pytest.mark.parametrize(("name", "temperature"), slow_except(METHOD_CASES, *QUICK))
def test_every_method_generates_the_tokens_and_log_probabilities_of_plain_decoding(
    name, temperature
):
    generated(name, "all", temperature)


@pytest.mark.parametrize(
    ("name", "controls"),
    slow_except(
        [*product(("tree",), (*CONTROLS, "all")), ("chain", "all")],
        *product(("tree", "chain"), ("all",)),
    ),
)
def test_every_control_is_exact_deep_in_a_draft(name, controls):
    out = generated(name, controls, 0.8)
    assert out.stats.accepted_lengths[:, 4:].sum() > 0, "no path was deep"


@pytest.mark.slow
def test_every_control_is_exact_for_one_sequence():
    """The first of a batch, whose key is folded."""
    model, params = target()
    known = Params(params, whole_texts("all", 0.8)[:1], arrays_of(sampling_of("all", 0.8)))
    out = speculative_generate(
        *(known, prompt(1), jax.random.fold_in(KEY, 0)),
        target=model,
        drafter=ORACLES["chain"],
        sampling=sampling_of("all", 0.8),
        max_new_tokens=NEW_TOKENS,
        eos=EOS,
    )
    np.testing.assert_array_equal(out.tokens[0], truth("all", 0.8)[0][0])
    assert out.from_draft.any()


@pytest.mark.slow
@pytest.mark.parametrize("controls", CONTROLS)
def test_every_control_changes_the_text(controls):
    assert (truth("none", 0.8)[0] != truth(controls, 0.8)[0]).any()


# ---- Node logits against the whole text of every path -------------------------------------------


def test_the_logits_of_a_node_are_those_of_the_text_that_leads_to_it():
    """Repeated ancestors, negative logits and words that end in a draft included."""
    numbers, batch = np.random.default_rng(8), 2
    sampling = sampling_of("all", 0.0)
    tree = from_choices(
        jnp.asarray([12, 3]), jnp.asarray([[[12, 3], [12, 3], [12, 3]]] * batch, jnp.int32), PATHS
    )
    tokens = jnp.asarray(numbers.integers(0, VOCAB, (batch, 24)), jnp.int32)
    tokens = tokens.at[0, 8].set(12).at[1, 11].set(3)
    length, given = jnp.asarray([9, 12]), prompt(batch).tokens[:, :8]
    given = Prompt(given, jnp.asarray([5, 8]))
    logits = jnp.asarray(numbers.normal(0, 4, (batch, tree.num_nodes, VOCAB)), jnp.float32)
    found = processed(sampling, given, tokens, length, logits, tree, 3)
    paths = [(), *PATHS]
    for node, path in enumerate(paths):
        texts = tokens
        for depth, _ in enumerate(path, 1):
            above = paths.index(path[:depth])
            texts = texts.at[jnp.arange(batch), length + depth - 1].set(tree.tokens[:, above])
        ends = length + len(path)
        last = jnp.take_along_axis(texts, ends[:, None] - 1, axis=1)[:, 0]
        root = chain(last, jnp.zeros((batch, 0), jnp.int32), jnp.zeros_like(ends))
        alone = processed(sampling, given, texts, ends, logits[:, node : node + 1], root, 0)
        np.testing.assert_allclose(found[:, node], alone[:, 0], rtol=1e-6)


PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 1), (1, 0, 1))


def controls_of(sampling, given, tokens, length) -> Controls:
    """Returns the processors with their states after texts."""
    arrays = [TABLE if isinstance(p, Automaton) else None for p in sampling.all_processors]
    states = []
    width = tokens.shape[1]
    for processor, params in zip(sampling.all_processors, arrays, strict=True):
        state = processor.init(params, given, VOCAB)
        place = given.length[:, None] + jnp.arange(width)[None, :]
        new = jnp.take_along_axis(tokens, place, axis=1, mode="clip")
        states.append(processor.commit(params, state, new, length - given.length))
    text = tokens, length, given.length
    return Controls(*text, tuple(states), tuple(arrays), sampling.all_processors, EOS)


@partial(jax.jit, static_argnums=(0, 6))
def processed(sampling, given, tokens, length, logits, tree, max_depth):
    """Returns the logits of a tree below texts, with the controls applied."""
    return controls_of(sampling, given, tokens, length).apply(logits, tree, max_depth)


def forget(nodes: Nodes) -> jax.Array:
    """Takes the place of `Nodes.above`: no node has ancestors."""
    return jnp.zeros((*nodes.tree.tokens.shape, nodes.tree.num_nodes), bool)


@pytest.mark.parametrize("fault", ["above", "states", "last"])
def test_a_processor_that_forgets_ancestors_is_caught(monkeypatch, fault):
    drafter = OracleTree((*DEEP, (1, 1, 1)))  # elsewhere not used: compiled afresh
    forgetful = {
        "above": property(forget),
        "states": lambda nodes, step, state: jnp.broadcast_to(
            state[:, None], nodes.tree.tokens.shape
        ),
        "last": lambda nodes, count: jnp.full((*nodes.tree.tokens.shape, count), -1),
    }
    monkeypatch.setattr(Nodes, fault, forgetful[fault])
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        generated("tree", "all", 0.8, drafter=drafter)


def test_a_state_that_is_not_committed_is_caught(monkeypatch):
    monkeypatch.setattr(processors.Penalties, "commit", lambda self, params, state, *_: state)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        generated("chain", "all", 0.8, drafter=Oracle(max_depth=5))


# ---- The rules of verification ------------------------------------------------------------------


def test_typical_acceptance_reads_the_processed_logits():
    """The texts under `coupled` and the distribution under `rejection` show it for these."""
    numbers, length = np.random.default_rng(2), jnp.asarray([9, 12])
    given = Prompt(prompt(2).tokens[:, :8], jnp.asarray([5, 8]))
    sampling = replace(sampling_of("all", 1.0), verification="typical", logprobs=None)
    tokens = jnp.asarray(numbers.integers(0, VOCAB, (2, 24)), jnp.int32)
    candidates = jnp.asarray(numbers.permuted(np.tile(np.arange(8), (2, 3, 1)), axis=-1)[..., :2])
    tree = from_choices(tokens[:, 0], candidates, PATHS)
    logits = jnp.asarray(numbers.normal(0, 1, (2, tree.num_nodes, VOCAB)), jnp.float32)
    draw = Draw(sequence_keys(KEY, 2), length, sampling)

    @jax.jit
    def both(given, tokens, logits):
        controls = controls_of(sampling, given, tokens, length)
        found = verify(tree, logits, replace(draw, controls=controls), length - 1, 3)
        own = controls.apply(logits, tree, 3)
        return found, own, verify(tree, own, draw, length - 1, 3)

    found, own, expected = both(given, tokens, logits)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), found, expected))
    assert not jnp.allclose(jax.nn.log_softmax(logits), jax.nn.log_softmax(own))


STRONG = {"temperature": 0.9, "repetition_penalty": 2.0, "frequency_penalty": 2.0}


def exact_probabilities(sampling: Sampling) -> np.ndarray:
    """The probability of each continuation of the contract's TEXT by three tokens."""
    model, params = target(contract.VOCAB, layers=1, scale=4.0)
    size, length = contract.VOCAB, len(contract.TEXT)
    pairs = np.stack(np.meshgrid(*[np.arange(size)] * 2, indexing="ij"), -1).reshape(-1, 2)
    texts = np.concatenate([np.tile(contract.TEXT, (len(pairs), 1)), pairs], axis=1)
    texts = jnp.asarray(texts, jnp.int32)
    logits = plain_pass(params, texts, model)[0].logits[:, -3:]
    given = Prompt(texts[:, :length], jnp.full((len(pairs),), length))
    steps = []
    for step in range(3):
        ends = given.length + step
        step_logits = reference._processed(logits[:, step], texts, ends, given, sampling, (), ())
        steps.append(np.exp(np.asarray(sampling.filtered(step_logits), np.float64)))
    first, second, third = (values.reshape(size, size, size) for values in steps)
    joint = first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
    return (joint / joint.sum()).reshape(-1)


def p_value(monkeypatch, sampling: Sampling) -> float:
    monkeypatch.setattr(contract, "exact_probabilities", lambda: exact_probabilities(sampling))
    return contract.p_value(PromptLookup(num_tokens=2), sampling=sampling)


def test_rejection_keeps_the_distribution_of_the_processed_logits(monkeypatch):
    sampling = Sampling(**STRONG, verification="rejection")
    assert p_value(monkeypatch, sampling) > 1e-3
    monkeypatch.setattr(Nodes, "above", property(forget))
    assert p_value(monkeypatch, replace(sampling, top_k=contract.VOCAB)) < 1e-6


# ---- Definitions --------------------------------------------------------------------------------

CASES_AGAINST_TRANSFORMERS = 1000


@pytest.mark.parametrize("name", ["min_p", "repetition", "bias", "bad words", "min new tokens"])
def test_the_definitions_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    numbers, count = np.random.default_rng(len(name)), CASES_AGAINST_TRANSFORMERS
    logits = numbers.normal(0, 3, (count, VOCAB)).astype(np.float32)
    tokens = numbers.integers(0, 6, (count, 12))
    prompt_length, length = 4, 12
    sampling = Sampling(1.0, **CASES[name])
    if name == "bad words":
        words = ((5,), (17,), (1, 2), (4, 0), (0, 1, 2), (3,) * 13)
        sampling = Sampling(1.0, bad_words=words)
    if name == "min new tokens":
        sampling = Sampling(1.0, min_new_tokens=9 if numbers.integers(2) else 8)
    processor = {
        "min_p": lambda: theirs.MinPLogitsWarper(sampling.min_p),
        "repetition": lambda: theirs.RepetitionPenaltyLogitsProcessor(1.8),
        "bias": lambda: theirs.SequenceBiasLogitsProcessor(
            {(token,): float(bias) for token, bias in sampling.logit_bias}
        ),
        "bad words": lambda: theirs.NoBadWordsLogitsProcessor(
            [list(word) for word in sampling.bad_words], eos_token_id=list(EOS)
        ),
        "min new tokens": lambda: theirs.MinNewTokensLengthLogitsProcessor(
            prompt_length, sampling.min_new_tokens, list(EOS)
        ),
    }[name]()
    expected = processor(torch.tensor(tokens), torch.tensor(logits)).numpy()
    ends = jnp.full((count,), length)
    given = Prompt(jnp.asarray(tokens[:, :prompt_length], jnp.int32), ends * 0 + 4)
    text = jnp.asarray(tokens, jnp.int32)
    root = chain(text[:, -1], text[:, :0], ends * 0)
    if name == "min_p":
        found = np.asarray(sampling.filtered(jnp.asarray(logits)))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
        return
    controls = controls_of(sampling, given, text, ends)
    found = controls.apply(jnp.asarray(logits)[:, None], root, 0)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


# ---- Log-probabilities --------------------------------------------------------------------------


@pytest.mark.slow
def test_log_probabilities_are_those_of_transformers(tmp_path):
    pytest.importorskip("torch")
    theirs = checkpoints.build(vocab_size=VOCAB, max_position_embeddings=128, eos_token_id=None)
    folder = checkpoints.save(tmp_path, theirs)
    config = read_config(folder)
    params, one = load_transformer(folder, config, jnp.float32), prompt(1)
    start, known = int(one.length[0]), None
    for name in ("plain", "pld-plus", "recycling", "tree"):
        drafter, arrays = (ORACLES[name], known) if name in ORACLES else of_method(name)
        out = speculative_generate(
            *(Params(params, arrays), one, KEY),
            target=Transformer(config),
            drafter=drafter,
            sampling=Sampling(logprobs=3),
            max_new_tokens=NEW_TOKENS,
        )
        text = jnp.concatenate([one.tokens[:, :start], out.tokens], axis=1)
        known = text if known is None else known
        np.testing.assert_array_equal(text, known)
        assert out.from_draft.any() == (name != "plain")
        logits = checkpoints.forward(theirs, np.asarray(text)).logits[0, start - 1 : -1]
        expected = jax.nn.log_softmax(np.asarray(logits))
        best, raw = jax.lax.top_k(expected, 3), jax.tree.map(lambda leaf: leaf[0], out.logprobs.raw)
        at_tokens = jnp.take_along_axis(expected, out.tokens[0][:, None], axis=1)[:, 0]
        np.testing.assert_allclose(raw.token, at_tokens, atol=1e-4)
        np.testing.assert_allclose(raw.top, best[0], atol=1e-4)
        np.testing.assert_array_equal(raw.top_tokens, best[1])
    assert out.stats.accepted_lengths[:, 4:].sum() > 0, "no path was deep"


# ---- Settings -----------------------------------------------------------------------------------


def test_prefill_does_not_depend_on_the_values_of_processors_without_a_state():
    one = Sampling(0.5, logit_bias={1: 1.0}, bad_words=((1,),), min_new_tokens=1)
    other = Sampling(0.7, logit_bias={2: 3.0}, bad_words=((2, 3),), min_new_tokens=5)
    assert one.for_prefill == other.for_prefill
    penalties = [Sampling(repetition_penalty=value).for_prefill for value in (1.1, 1.2)]
    assert penalties[0] != penalties[1]


def test_settings_out_of_bounds_are_rejected():
    assert_rejects_values_out_of_bounds(Sampling())
    with pytest.raises(SpecjaxError, match="`bad_words` holds an empty sequence"):
        Sampling(bad_words=((),))


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
