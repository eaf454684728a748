"""The peers: they generate our texts, and their rounds count what ours count."""

from contextlib import contextmanager
from dataclasses import replace
from functools import wraps

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from benchmarks import peers as peers_module
from benchmarks.peers import PEERS, check_peer, peers
from benchmarks.peers.gguf_writer import save_gguf
from benchmarks.peers.peer import Work, replayed, until_eos
from specjax.bench.measure import Contestant, GeneratedText, Program
from specjax.core.errors import SpecjaxError
from specjax.decoding.drafter import Params
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import from_ids
from specjax.loading.methods import METHODS
from specjax.models.native import unpack_params
from specjax.models.quantize import quantize_params
from tests.loading.tiny import tiny

SHAPE = {"vocab_size": 96, "layers": 1}
NUM_TOKENS = 24
NAMES = {
    "transformers": ["transformers", "transformers pld", "transformers assisted"],
    "llama.cpp": ["llama.cpp", "llama.cpp pld", "llama.cpp draft-model"],
}
NUMBERS = np.random.default_rng(0)
# The second repeats itself.
ROWS = [tuple(NUMBERS.integers(2, 96, 9).tolist()), (5, 61, 60, 50, 27, 27) * 4, (7, 8) * 20]
EOS = 83  # the first text ends with it


@pytest.fixture(scope="module", params=NAMES)
def library(request):
    """Runs on one core: tests run side by side, and its threads would wait for each other."""
    for package in PEERS[request.param].packages:
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch:
        for module in (peers_module.transformers, peers_module.llamacpp):
            patch.setattr(module, "num_cores", lambda: 1)
        yield request.param


@pytest.fixture(scope="module")
def target():
    return tiny(**SHAPE)


@pytest.fixture(scope="module")
def ours(target):
    return plain_texts(target, ROWS)


def plain_texts(target, rows):
    """Tokens and rounds of our plain decoding of each row."""
    found = speculative_generate(
        Params(target.params, None),
        from_ids(rows),
        jax.random.key(0),
        target=target.model,
        drafter=METHODS.make("plain", target.config, {}),
        max_new_tokens=NUM_TOKENS,
    )
    rounds = np.asarray(found.stats.rounds).tolist()
    return list(zip(map(tuple, np.asarray(found.tokens).tolist()), rounds, strict=True))


def made(library, target, draft=None):
    longest = max(map(len, ROWS))
    return peers([library], Work(target, draft, longest, NUM_TOKENS), num_rows=1)


@pytest.fixture(scope="module")
def contestants(library, target):
    """The last drafts with another model."""
    return made(library, target, tiny(**SHAPE, seed=1))


def generate(contestant, *rows):
    """Generates by the steps of a measurement."""
    prepared = contestant.prepare(rows)
    assert contestant.compile(prepared) == Program()
    return contestant.read(contestant.decode(contestant.prefill(prepared)))


@contextmanager
def passes_of(model):
    """Yields a list of how many tokens each pass of the model is fed."""
    name = "forward" if hasattr(model, "forward") else "eval"
    run, fed = getattr(model, name), []

    @wraps(run)
    def counted(*args, **inputs):
        fed.append(len(args[0]) if args else inputs["input_ids"].shape[1])
        return run(*args, **inputs)

    setattr(model, name, counted)
    try:
        yield fed
    finally:
        setattr(model, name, run)


def test_texts_equal_ours_and_rounds_are_passes_of_the_target(library, contestants, ours):
    assert [contestant.name for contestant in contestants] == NAMES[library]
    rounds = {}
    for contestant in contestants:
        assert isinstance(contestant, Contestant)
        assert not contestant.has_prefill
        for row, (tokens, _) in zip(ROWS, ours, strict=True):
            for _ in range(2):  # the second time nothing is left over from the first
                with passes_of(contestant.model) as fed:
                    [text] = generate(contestant, row)
                assert fed[0] >= len(row)
                assert text.tokens == tokens
                assert text.rounds == len(fed) == sum(text.accepted_lengths)
            rounds.setdefault(contestant.name, []).append(text.rounds)
    plain, lookup, _ = NAMES[library]
    assert rounds[plain] == [rounds for _, rounds in ours]
    assert rounds[lookup][1] < NUM_TOKENS / 2


def test_batches_are_ragged_or_of_one_row(library, contestants, ours):
    max_rows = PEERS[library].max_rows
    assert [contestant.max_rows for contestant in contestants] == [max_rows, 1, 1]
    if max_rows is None:
        texts = generate(contestants[0], *ROWS)
        assert [(text.tokens, text.rounds) for text in texts] == ours


def test_texts_end_with_eos(library, target, ours):
    ending = replace(target, config=replace(target.config, eos_token_id=(EOS, 0)))
    expected = [tuple(until_eos(tokens, (EOS, 0))) for tokens, _ in ours]
    assert expected[0][-1] == EOS
    assert len(expected[0]) < NUM_TOKENS == max(map(len, expected))
    for contestant in made(library, ending, ending):
        for row, tokens in zip(ROWS, expected, strict=True):
            [text] = generate(contestant, row)
            assert text.tokens == tokens
            assert len(text.from_draft) == len(tokens)
            if contestant.name == library:
                assert text.rounds == len(tokens)


def test_a_perfect_draft_is_always_accepted(library, target, ours):
    *_, assisted = made(library, target, target)
    [text] = generate(assisted, ROWS[0])
    assert text.tokens == ours[0][0]
    assert text.rounds <= NUM_TOKENS / 2
    # The token after each draft; of llama.cpp's rounds of 1, 6, 6, 6 and 6 the limit cuts the last.
    is_cut = library == "llama.cpp"
    assert text.from_draft.count(False) == text.rounds - is_cut


@pytest.mark.slow
def test_pocket_generates_the_same(library):
    """Its weights are trained, so that its texts tell a wrong rotation or norm."""
    pocket = specjax.load("pocket", dtype="float32")
    text = "def total(values):\n    result = 0\n    for value in values:\n        result"
    row = tuple(pocket.tokenizer(text)["input_ids"])
    [(tokens, _)] = plain_texts(pocket, [row])
    for contestant in made(library, pocket):
        [found] = generate(contestant, row)
        assert found.tokens == tuple(until_eos(tokens, pocket.eos))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_llama_cpp_has_the_dtype_of_the_target(target, dtype):
    llama_cpp = pytest.importorskip("llama_cpp")
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), target.params)
    plain, lookup = made("llama.cpp", replace(target, params=params))
    computes = "float32" if dtype == "float32" else f"{dtype} (float32)"
    assert (plain.dtype, lookup.dtype) == (computes, computes)
    leaves = jax.tree.leaves(params)
    sizes = [leaf.size * (4 if leaf.ndim == 1 else leaf.itemsize) for leaf in leaves]
    assert llama_cpp.llama_model_size(plain.model.model) == sum(sizes)
    assert len(generate(lookup, ROWS[2])[0].tokens) == NUM_TOKENS


def test_llama_cpp_also_runs_a_file_as_it_is_and_in_8_bits(target, ours, tmp_path):
    pytest.importorskip("llama_cpp")
    save_gguf(tmp_path / "m.gguf", target.config, target.params, "float32")
    *_, stored, quantised = made("llama.cpp", replace(target, name=str(tmp_path / "m.gguf")))
    assert [each.name for each in (stored, quantised)] == ["llama.cpp stored", "llama.cpp Q8_0"]
    assert generate(stored, ROWS[0])[0].tokens == ours[0][0]
    assert len(generate(quantised, ROWS[0])[0].tokens) == NUM_TOKENS


def test_packages_and_batches_are_checked_first(monkeypatch):
    monkeypatch.setattr(peers_module, "find_spec", lambda name: None)
    for name, package in (("transformers", "torch"), ("llama.cpp", "llama-cpp-python")):
        with pytest.raises(SpecjaxError, match=f"{name}.* needs .*`pip install {package}`$"):
            check_peer(name)
    monkeypatch.setattr(peers_module, "find_spec", lambda name: name != "gguf" or None)
    with pytest.raises(SpecjaxError, match=r"needs gguf; run `pip install gguf`$"):
        check_peer("llama.cpp")
    check_peer("transformers", [4])
    monkeypatch.setattr(peers_module, "find_spec", lambda name: True)
    check_peer("llama.cpp", [4, 1])
    with pytest.raises(SpecjaxError, match=r"serves a batch of 1 at most; .* add 1 to --batch"):
        check_peer("llama.cpp", [4, 2])


def test_peers_reject_what_they_cannot_run(target):
    PEERS["llama.cpp"].check(target)
    PEERS["transformers"].check(target)
    with pytest.raises(SpecjaxError, match="leave out --quantize"):
        quantised = quantize_params(unpack_params(target.params), "int8")
        PEERS["transformers"].check(replace(target, params=quantised))
    with pytest.raises(SpecjaxError, match="cannot run tiny: only Llama models"):
        PEERS["llama.cpp"].check(replace(target, config=replace(target.config, model_type="qwen2")))


def test_rounds_are_replayed_from_their_drafts():
    drafts = [(3, 4, 9), (), (7, 8, 9)]
    assert replayed((3, 4, 5, 6, 7, 8), drafts) == GeneratedText(
        (3, 4, 5, 6, 7, 8), 3, (0, 1, 1, 1), (True, True, False, False, True, True), 4
    )
    assert replayed((), []) == GeneratedText((), 0, (0,), (), 0)
    with pytest.raises(SpecjaxError, match="2 rounds account for 4 of 6 tokens"):
        replayed((3, 4, 5, 6, 7, 8), drafts[:2])
