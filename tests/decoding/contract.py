"""The two promises of every drafter, as helpers.

`assert_lossless`: under `coupled` verification the tokens are those of plain decoding, one for one.
`p_value`: under `rejection` their distribution is.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from specjax.core.errors import SpecjaxError
from specjax.core.settings import SettingError
from specjax.decoding import Drafter, Engine, Generation, Params, Prompt, Sampling, reference
from specjax.decoding.generate import speculative_generate, stream
from specjax.decoding.reference import reference_generate
from tests.decoding.tiny import BATCH, plain_pass, prompt, target
from tests.rejected import rejected_values

NEW_TOKENS = 256
KEY = jax.random.key(1)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.9)}
# Sampling, batch, and whether EOS ends the sequences: each is one program to compile.
SAMPLED, ALONE = ("sampled", 3, True), ("greedy", 1, False)
CASES = (SAMPLED, ALONE)


def generate(
    drafter: Drafter,
    known: Any = None,
    given: Prompt | None = None,
    key: jax.Array = KEY,
    *,
    arrays: tuple[Any, ...] = (),
    values: Any = None,
    layers: int = 2,
    run: Callable[..., Generation] = speculative_generate,
    **settings: Any,
) -> Generation:
    """Generates with a tiny target, by default for the ragged batch; returns NumPy arrays.

    `known` are the drafter's params, `arrays` those of processors, `values` those per sequence.
    """
    model, weights = target(layers=layers)
    params = Params(weights, known, arrays, values)
    out = run(params, given or prompt(), key, target=model, drafter=drafter, **settings)
    return jax.device_get(out)


# ---- The same tokens ---------------------------------------------------------------------------


@cache
def truth(sampling: str, batch: int) -> np.ndarray:
    """The tokens of plain decoding without cache, tree or drafter, `[batch, NEW_TOKENS]`."""
    if sampling == "greedy" and batch < BATCH:  # the first prompts of the whole batch
        return truth(sampling, BATCH)[:batch]
    model, params = target()
    settings = {"sampling": SAMPLINGS[sampling], "max_new_tokens": NEW_TOKENS}
    generate = partial(reference_generate, target=model, **settings)
    # It runs much longer than it compiles, so unlike other programs of tests it is optimised.
    optimised = jax.jit(generate, compiler_options={"xla_backend_optimization_level": 1})
    return np.asarray(optimised(params, prompt(batch), KEY)[0])


def cut_at(tokens: np.ndarray, eos: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Cuts every row after its first end token: the tokens, zero beyond, and their number."""
    is_end = np.isin(tokens, eos)
    num_tokens = tokens.shape[1]
    length = np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, num_tokens)
    return np.where(np.arange(num_tokens) < length[:, None], tokens, 0), length


def end_token(tokens: np.ndarray) -> int:
    """The token that ends the rows at the most different lengths, and late."""
    lengths = {token: cut_at(tokens, (token,))[1] for token in np.unique(tokens).tolist()}
    return max(lengths, key=lambda token: (len(set(lengths[token])), lengths[token].min()))


@cache
def whole_texts(sampling: str, batch: int) -> jax.Array:
    """The prompt and the true continuation of each row, -1 beyond: what an oracle knows."""
    return continued(truth(sampling, batch), [NEW_TOKENS] * batch)


def continued(tokens: np.ndarray, lengths: Sequence[int], given: Prompt | None = None) -> jax.Array:
    """The prompts, that many of the tokens behind each, and then -1."""
    batch, new_tokens = tokens.shape
    given = given or prompt(batch)
    texts = np.full((batch, int(given.length.max()) + new_tokens), -1, np.int32)
    for row, (start, length) in enumerate(zip(given.length.tolist(), lengths, strict=True)):
        texts[row, :start] = given.tokens[row, :start]
        texts[row, start : start + length] = tokens[row, :length]
    return jnp.asarray(texts)


def assert_lossless(
    drafter: Drafter,
    known: Any | Callable[[str, int], Any] = None,
    *,
    new_tokens: int = NEW_TOKENS,
    case: tuple[str, int, bool] = SAMPLED,
) -> Generation:
    """Asserts that the tiny target generates the same tokens with this drafter as without.

    One sequence is generated in one call, a batch is streamed, and the counts must add up. Params
    that depend on the text are a function of sampling and batch. Returns what was generated.
    """
    sampling, batch, ends = case
    expected = truth(sampling, batch)[:, :new_tokens]
    eos = (end_token(expected),) if ends else ()
    tokens, length = cut_at(expected, eos)
    known = known(sampling, batch) if callable(known) else known
    settings = {"sampling": SAMPLINGS[sampling], "max_new_tokens": new_tokens, "eos": eos}
    run = speculative_generate if batch == 1 else _streamed
    out = generate(drafter, known, prompt(batch), run=run, **settings)
    np.testing.assert_array_equal(out.tokens, tokens)
    np.testing.assert_array_equal(out.length, length)
    assert_counts_add_up(out)
    return out


def _streamed(*given: Any, **settings: Any) -> Generation:
    """The last part of a stream; those before must be beginnings of it."""
    parts = [*stream(*given, **settings, rounds_per_call=40)]
    parts = [jax.device_get(part) for part in parts]  # earlier parts stay readable to the end
    whole = parts[-1]
    for part in parts:
        is_new = np.arange(part.tokens.shape[1]) < part.length[:, None]
        np.testing.assert_array_equal(part.tokens, np.where(is_new, whole.tokens, 0))
        np.testing.assert_array_equal(part.from_draft, is_new & whole.from_draft)
    return whole


def assert_counts_add_up(out: Generation):
    """Asserts that every round and every token is counted once."""
    stats, rows = out.stats, np.arange(len(out.length))
    lengths = np.arange(stats.accepted_lengths.shape[1])
    np.testing.assert_array_equal(stats.accepted_lengths @ lengths, out.length)
    np.testing.assert_array_equal(stats.accepted_lengths.sum(axis=1), stats.rounds)
    # Every round adds one token of the target's own, unless the last one was cut before it.
    was_cut = out.from_draft[rows, out.length - 1]
    own_tokens = out.length - out.from_draft.sum(axis=1)
    np.testing.assert_array_equal(own_tokens, stats.rounds - was_cut)
    assert (stats.drafted >= out.length - stats.rounds).all()


def assert_params_rejected(drafter: Drafter, drafter_params: Any, message: str):
    """Asserts that a request with these params raises one line that matches `message`."""
    model, params = target()
    with pytest.raises(SpecjaxError, match=message) as error:
        Engine(model, drafter, max_new_tokens=4).check(Params(params, drafter_params), prompt(1))
    assert "\n" not in str(error.value)


def assert_rejects_values_out_of_bounds(settings: Any):
    """Asserts that every field of a dataclass rejects the values that its metadata forbids."""
    for name, value in rejected_values(type(settings)):
        changed = copy(settings)
        object.__setattr__(changed, name, value)  # past the type checks of test runs
        with pytest.raises(SettingError) as error:
            changed.__post_init__()
        assert error.value.field == name


# ---- The same distribution ---------------------------------------------------------------------

VOCAB = 6
ROWS = 4096
TEXT = (1, 4, 2, 4, 2)
REJECTION = Sampling(temperature=0.9, top_p=0.95, verification="rejection")


@cache
def exact_probabilities(sampling: Sampling) -> np.ndarray:
    """The probability of each continuation of TEXT by three tokens, `[VOCAB**3]`."""
    model, params = target(VOCAB, layers=1, scale=4.0)
    pairs = np.stack(np.meshgrid(*[np.arange(VOCAB)] * 2, indexing="ij"), -1).reshape(-1, 2)
    texts = jnp.asarray(np.concatenate([np.tile(TEXT, (len(pairs), 1)), pairs], axis=1), jnp.int32)
    logits = plain_pass(params, texts, model)[0].logits[:, -3:]
    given = Prompt(texts[:, : len(TEXT)], jnp.full((len(pairs),), len(TEXT)))

    @partial(jax.jit, static_argnums=1)
    def probabilities(logits, step):
        end = given.length + step
        processed = reference._processed(logits, texts, end, given, sampling, (), ())
        return jnp.exp(sampling.filtered(processed))

    steps = [np.asarray(probabilities(logits[:, step], step), np.float64) for step in range(3)]
    first, second, third = (values.reshape((VOCAB,) * 3) for values in steps)
    joint = first[0, 0][:, None, None] * second[:, 0][:, :, None] * third
    return (joint / joint.sum()).reshape(-1)


def p_value(drafter: Drafter, drafter_params: Any = None, sampling: Sampling = REJECTION) -> float:
    """Returns the p-value of a chi-square test against plain decoding's distribution.

    The target is that of VOCAB tokens and one layer; a right drafter stays above 1e-3 here, and a
    wrong one falls below 1e-6.
    """
    model, params = target(VOCAB, layers=1, scale=4.0)
    out = speculative_generate(
        Params(params, drafter_params),
        Prompt(jnp.tile(jnp.array([TEXT]), (ROWS, 1)), jnp.full((ROWS,), len(TEXT))),
        jax.random.key(0),
        target=model,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=3,
    )
    code = np.asarray(out.tokens) @ np.array([VOCAB**2, VOCAB, 1])
    counts = np.bincount(code, minlength=VOCAB**3).astype(float)
    expected = exact_probabilities(sampling) * ROWS
    assert counts[expected == 0].sum() == 0, "a token outside the filters came out"
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    return chisquare(counts, expected).pvalue
