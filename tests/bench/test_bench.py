"""The benchmark: its arithmetic, its tasks, and that it notices what would make it worthless.

Nothing here asserts how long anything took.
"""

import json
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from specjax.bench import bandwidth
from specjax.bench import run as run_module
from specjax.bench.bandwidth import bytes_per_pass
from specjax.bench.checks import problems
from specjax.bench.measure import batches_of, measure_trials, warm_up
from specjax.bench.options import BenchOptions, default_methods, variants_for
from specjax.bench.report.terminal import table
from specjax.bench.results import Condition, read_results, read_samples
from specjax.bench.run import make_contestants, run_bench
from specjax.bench.summary import ALL, TextMatch, TextPair, summarise
from specjax.bench.ties import NearTies, near_tie_in
from specjax.core import memory
from specjax.core.errors import SpecjaxError
from specjax.core.folder import RunFolder
from specjax.data import datastore
from specjax.decoding.drafter import Params
from specjax.decoding.engine import Engine
from specjax.decoding.sampling import Sampling
from specjax.loading.methods import METHODS
from specjax.loading.targets import LoadedTarget
from specjax.models.config import TransformerConfig
from specjax.models.sharding import make_mesh
from specjax.models.transformer import Transformer
from specjax.run.runner import GeneratedText, Program, Runner
from specjax.run.tasks import Task, TaskPrompt, task_prompts

WINDOW = 70  # less than the longest prompt and all new tokens
CONFIG = TransformerConfig(
    320, 32, 48, 1, 4, 2, 8, max_position_embeddings=WINDOW, eos_token_id=(1,)
)
OPTIONS = BenchOptions(methods="pld,pld-plus", max_new_tokens=24, runs=2)


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """The bandwidth is measured, but of little memory; benchmarks share what is compiled."""
    monkeypatch.setattr(bandwidth, "NUM_BYTES", 2**20)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)


@pytest.fixture(scope="module")
def target(tiny_tokenizer):
    """A random model whose weights are large enough for its context to matter."""
    model = Transformer(CONFIG, padded_width=16)  # one width of a pass compiles faster
    params = model.initialise(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)
    return LoadedTarget(model, params, tiny_tokenizer, CONFIG, "tiny")


@pytest.fixture(scope="module")
def requests():
    """Two kinds, of prompts whose lengths differ within one bucket."""
    numbers = np.random.default_rng(0)
    lengths = {"short": (9, 17), "long": (40, 33, 51)}
    return [
        TaskPrompt(kind, tuple(numbers.integers(2, 320, length).tolist()))
        for kind in lengths
        for length in lengths[kind]
    ]


@dataclass(frozen=True, eq=False)
class Liar(Runner):
    """A contestant that changes the last token of all but the first answer."""

    answers: list = field(default_factory=list)

    def read(self, result):
        self.answers.append(result)
        is_lie = len(self.answers) > 2  # one run to warm up, and one
        return tuple(
            text._replace(tokens=(*text.tokens[:-1], text.tokens[-1] + is_lie))
            for text in super().read(result)
        )


def contestants_of(target, requests, temperature=0.0, batch_size=1, **changes):
    return make_contestants(
        target, replace(OPTIONS, **changes), requests, Condition(temperature, batch_size)
    )


def measure(contestants, batches, num_runs):
    return [run for trial in measure_trials(contestants, batches, num_runs) for run in trial]


def compared(contestants, requests, num_runs, batch_size=1):
    batches = batches_of(requests, batch_size)
    programs = {each.name: warm_up(each, batches[0]) for each in contestants}
    return summarise(measure(contestants, batches, num_runs), programs)


# ---- Measuring ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_batch_generates_the_same_and_nothing_compiles_again(target, requests):
    contestants = contestants_of(target, requests, 0.8, 2, methods="pld")
    rows = compared(contestants, requests, OPTIONS.runs, batch_size=2)
    assert [(row.task, row.method, row.num_prompts) for row in rows] == [
        (task, name, num_prompts)
        for task, num_prompts in (("short", 2), ("long", 4), (ALL, 6))
        for name in ("plain", "pld")
    ]
    assert all(row.identical and row.num_recompiled == 0 and row.batch == 2 for row in rows)
    longest = next(row for row in rows if row.task == "long")
    room = [min(24, WINDOW - length) for length in (40, 33, 51, 40)]
    assert longest.num_new_tokens == sum(room), "texts end with the window"


def test_every_prompt_and_every_run_is_drawn_with_noise_of_its_own(target, requests):
    both = contestants_of(target, requests, 0.8, 2, methods="pld")
    samples = measure(both, [(requests[0],) * 2] * 2, num_runs=2)
    plain, pld = (
        {each.trial: each.texts for each in samples if each.method == name}
        for name in ("plain", "pld")
    )
    assert len({text.tokens for texts in plain.values() for text in texts}) == 8
    for turn, texts in plain.items():
        assert [text.tokens for text in texts] == [text.tokens for text in pld[turn]]


def test_batches_hold_one_kind_and_are_filled_up(requests):
    assert [len(batch) for batch in batches_of(requests, 4)] == [4, 4]
    short, long = batches_of(requests, 4)
    assert short == (*requests[:2], *requests[:2])
    assert long == (*requests[2:], requests[2])


class Echo:
    """A contestant that returns its prompts at once."""

    dtype = "float32"
    has_prefill = True

    def __init__(self, name):
        self.name = name

    def compile(self, prepared):
        return Program()

    def prepare(self, rows, trial=(0, 0)):
        return rows

    def prefill(self, prepared):
        return prepared

    def decode(self, state):
        return state

    def read(self, result):
        return tuple(GeneratedText(tuple(row), 1) for row in result)


def test_methods_take_shuffled_turns_and_known_ones_are_left_out():
    contestants = [Echo(name) for name in "abc"]
    batches = batches_of([TaskPrompt("", (1,)), TaskPrompt("", (2,))])
    turns = list(measure_trials(contestants, batches, num_runs=3))
    order = ["".join(sample.method for sample in turn) for turn in turns]
    assert {"".join(sorted(turn)) for turn in order} == {"abc"}
    assert len(set(order)) > 2
    places = [{sample.trial for sample in turn} for turn in turns]
    assert places == [{(number, repeat)} for repeat in range(3) for number in range(2)]
    started = []
    known = {(0, 0), (1, 0), (0, 1)}
    rest = list(measure_trials(contestants, batches, 3, known, lambda: started.append(1)))
    assert ["".join(sample.method for sample in turn) for turn in rest] == order[3:]
    assert len(started) == 2  # nothing of the first repeat is left


def test_different_tokens_are_reported(target, requests):
    plain, *_ = contestants_of(target, requests)
    liar = Liar("liar", plain.engine, plain.params, plain.padded_length)
    rows = compared([plain, liar], requests[:2], 1)
    assert [row.num_different for row in rows] == [0, 1]
    assert not rows[1].identical
    [line] = problems(rows)
    assert line.startswith("DIFFERENT TOKENS: liar")
    assert line.endswith("1 of 2 short prompts")
    console = Console(width=130)
    with console.capture() as capture:
        console.print(table(rows))
    assert capture.get().split()[-1] == "NO"


def test_compiling_in_a_measured_run_is_reported(target, requests):
    plain = replace(contestants_of(target, requests)[0], padded_length=8)
    batches = batches_of(requests[:2])
    programs = {plain.name: warm_up(plain, batches[0])}
    samples = measure([plain], batches, num_runs=2)  # 16 slots, then 24: a new program
    assert [sample.num_compiled > 0 for sample in samples] == [False, True, False, False]
    [line] = problems(summarise(samples, programs))
    assert line.startswith("RECOMPILED: 1 measured runs of plain")


def test_memory_that_a_backend_does_not_tell_is_unknown(target, requests, monkeypatch):
    plain, *_ = contestants_of(target, requests)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda _: None)
    assert plain.compile(plain.prepare([requests[0].ids])).peak_bytes is None


@pytest.mark.parametrize(
    "temperature, excused", [(0.0, TextMatch.NEAR_TIE), (0.8, TextMatch.DIFFERENT)]
)
def test_16_bits_excuse_a_near_tie_but_not_in_native_layers_and_nothing_else(
    target, requests, temperature, excused, monkeypatch
):
    """Token 9 gets the logits of plain decoding's first token; noise distinguishes the two."""
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), target.params)
    plain = contestants_of(replace(target, params=half), requests, temperature)[0]
    [sample] = measure([plain], batches_of(requests[:1]), num_runs=1)
    plain = sample.texts[0].tokens
    table = half["lm_head"]["weight"]
    twins = half | {"lm_head": {"weight": table.at[9].set(table[plain[0]])}}
    sampling = Sampling(temperature)
    filled = replace(target, model=target.model.clone(padded_width=24), params=twins)
    compare = NearTies(filled, sampling, OPTIONS.seed)

    def match(token, dtypes=("bfloat16", "bfloat16"), rest=plain[1:]):
        return compare(TextPair("pld", dtypes, requests[0].ids, (token, *rest), plain))

    assert plain[0] != 9
    assert match(plain[0]) == TextMatch.SAME
    assert match(9) == excused
    with monkeypatch.context() as patch:
        patch.setattr(type(target), "has_native_layers", True)
        assert match(9) == TextMatch.DIFFERENT
    texts = TextPair("pld", ("float32",) * 2, requests[0].ids, (9, *plain[1:]), plain)
    at, gap = compare.divergence(texts)
    assert at == 0 and (gap <= near_tie_in("bfloat16")) == (excused == TextMatch.NEAR_TIE)
    assert match(9, ("float32", "float32")) == TextMatch.DIFFERENT
    assert TextMatch.NEAR_TIE not in [match(token) for token in range(20, 60)]
    assert match(plain[0], rest=plain[1:-1]) == TextMatch.DIFFERENT
    assert match(plain[0], ("float32", "bfloat16")) == TextMatch.NOT_COMPARED


# ---- Running ------------------------------------------------------------------------------------


def check_kept(out, rows, target, printed):
    """Rows are kept with what they were computed from, and printed."""
    found = read_results(out)
    assert found.rows == rows
    first = json.loads((out / "rows.jsonl").read_text().splitlines()[0])
    assert first["published"]["tau"] == rows[0].published.tau, "figures are named"
    assert [row.num_prompts for row in rows] == [1, 1, 2, 2, 3, 3]  # a chat of two turns
    assert problems(rows) == []
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(target.params))
    for row in rows:
        assert row.identical and row.dtype == "float32" and row.num_recompiled == 0
        assert row.peak_bytes > weights
        total = sum(n * count for n, count in enumerate(row.accepted_lengths))
        assert (total, sum(row.accepted_lengths)) == (row.num_new_tokens, row.rounds)
    plain = rows[0]
    assert (plain.mean_accepted_length, plain.round_overhead) == (1.0, 1.0)
    must_read = bytes_per_pass(target, plain.mean_length) * plain.passes / plain.decode_seconds
    lines = (out / "bandwidth.jsonl").read_text().splitlines()
    reads = [json.loads(line)["bytes_per_second"] for line in lines]  # one per repeat
    assert plain.bandwidth_share == pytest.approx(must_read / np.median(reads))
    assert found.about["bandwidth"] == np.median(reads)
    assert found.about["target"] == "tiny"
    assert "GB/s that this device reads" in printed
    assert "DIFFERENT" not in printed


def test_a_stopped_run_resumes_and_ends_with_the_same_rows(target, tmp_path, capsys, monkeypatch):
    out, whole, tasks = (tmp_path / name for name in ("out", "whole", "copies.jsonl"))
    tasks.write_text('{"prompt": "total(values)"}\n{"turns": ["sum", "again"], "category": "chat"}')
    options = replace(OPTIONS, methods="pld", tasks=str(tasks), out=out, runs=2)
    bench = partial(run_bench, lambda: target)
    whole_run = bench(replace(options, out=whole))
    check_kept(whole, whole_run, target, capsys.readouterr().out)

    def interrupted(*arguments):
        for count, turn in enumerate(measure_trials(*arguments)):
            if count == 2:
                raise KeyboardInterrupt
            yield turn

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run_module, "measure_trials", interrupted)
        bench(options)
    shown = [row.task for row in read_results(out).rows]
    assert shown == ["copies", "copies", "chat", "chat", ALL, ALL]
    assert "INCOMPLETE: 4 trials (one batch run by every method)" in capsys.readouterr().out
    samples = out / "samples.jsonl"
    before = samples.read_text()
    samples.write_text(before + '{"temperature": 0.0, "batch_s')  # as a killed process leaves it
    rows = bench(options)
    assert samples.read_text().startswith(before)
    assert samples.read_text().count("\n") == 6  # turns
    [(condition, found)] = read_samples(out).items()
    assert (condition, len(found)) == (Condition(0.0, 1), 12)
    assert {each.batch[0].kind for each in found} == {"copies", "chat"}
    assert (out / "programs.jsonl").read_text().count("\n") == 2
    bandwidth = read_results(out).about["bandwidth"]
    assert (out / "bandwidth.jsonl").read_text().count("\n") == 3  # once per repeat of each start
    bench(options)  # nothing is left to do
    assert read_results(out).rows == rows
    assert read_results(out).about["bandwidth"] == bandwidth

    def figures(row):
        names = "method task num_new_tokens rounds accepted_lengths identical".split()
        return [getattr(row, name) for name in names]

    assert list(map(figures, rows)) == list(map(figures, whole_run))
    with pytest.raises(SpecjaxError, match=r"holds another run .*runs was 2, now 3"):
        bench(replace(options, runs=3))
    split = replace(target, model=target.model.clone(mesh=make_mesh("data=1")))
    with pytest.raises(SpecjaxError, match=r"holds another run \(mesh was None, now .'data': 1"):
        run_bench(lambda: split, options)


def test_another_datastore_is_another_drafter(target):
    def settings(*documents):
        built = datastore.build(documents, vocab_size=320)
        drafter = METHODS.make("rest", target.config, {})
        engine = Engine(target.model, drafter, max_new_tokens=8)
        return Runner("rest", engine, Params(target.params, datastore.params(built)), 32).settings

    long = list(range(2, 302))
    assert settings(long) == settings(long)
    assert len({settings(long), settings([*long[:-1], 5]), settings(long, [7])}) == 3


def test_every_temperature_and_batch_size_has_a_table(target, tmp_path, capsys):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "total(values)"}\n{"prompt": "sum(values)"}\n')
    options = replace(OPTIONS, tasks=str(tasks), runs=1, temperature="0,0.8", batch="1,2")
    options = replace(options, methods="long=pld")
    rows = run_bench(lambda: target, options, lambda *_: [Echo("plain"), Echo("long")])
    conditions = [(temperature, size) for temperature in (0.0, 0.8) for size in (1, 2)]
    assert [(row.temperature, row.batch) for row in rows[::2]] == conditions
    assert [row.variant_of for row in rows[:2]] == ["", "pld"]
    assert "T=0.8" in capsys.readouterr().out


def test_prompts_and_turns_that_do_not_fit_are_left_out_and_named(target, capsys):
    tasks = [
        Task("chat", ("sum " * WINDOW,), is_chat=True),
        Task("chat", ("sum", "more", "again"), is_chat=True),
        Task("text", ("total(values)",)),
    ]
    wide = ["total " * count for count in (1, WINDOW)]

    def answer(prompts):
        return [tuple(target.tokenizer(wide.pop(0))["input_ids"]) for _ in prompts]

    found = task_prompts(tasks, target, WINDOW, answer)
    warnings = capsys.readouterr().err.splitlines()
    assert [(each.kind, each.turn) for each in found] == [("chat", 0), ("chat", 1), ("text", 0)]
    assert warnings[0].startswith("specjax: turn 1 of chat prompt 0 has ")
    assert warnings[0].endswith(f"tokens, and the target {WINDOW} positions; it is left out")
    assert warnings[1].startswith("specjax: turn 3 of chat prompt 1 has ")
    assert warnings[2].startswith(f"specjax: 3 of 3 answers end at the target's {WINDOW} positions")
    with pytest.raises(SpecjaxError, match="no prompt leaves room for an answer: turn 1 of chat"):
        task_prompts(tasks[:1], target, 1, answer)


def test_what_a_pass_reads(target):
    """320 x 32 numbers of the LM head; of the layer 2 x 32 x 32, 2 x 16 x 32 and 3 x 32 x 48."""
    weights = 320 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 3 * 32
    per_token = 2 * 2 * 8
    assert bytes_per_pass(target, 100.0) == 4 * (weights + 100 * per_token)
    tied = replace(target, config=replace(CONFIG, tie_word_embeddings=True))
    assert bytes_per_pass(tied, 0.0) == 4 * (weights + 320 * 32)
    assert bytes_per_pass(target, 100.0, 4) == 4 * (weights + 400 * per_token)


def test_settings_are_given_per_method_and_variant_and_name_methods(target, requests):
    defaults = default_methods(target.model)
    assert {"plain", "pld", "pld-plus"} <= set(defaults) and "grammar" not in defaults
    assert list(variants_for("all", (), (), target)) == defaults
    assert "eagle" in variants_for("all", (), (), replace(target, name="pocket"))
    given = ("K 5.num_tokens=5", "K 5.max_ngram=2", "K 9.num_tokens=9", "pld-plus.layer=1")
    made = contestants_of(target, requests, methods="K 5=pld, K 9=pld,pld", set=given)
    assert [each.name for each in made] == ["plain", "K 5", "K 9", "pld", "pld-plus"]
    _, five, nine, pld, plus = (each.engine.drafter for each in made)
    default = METHODS.make("pld", CONFIG, {}).num_tokens
    assert [each.num_tokens for each in (five, nine, pld)] == [5, 9, default]
    assert (five.max_ngram, plus.layer) == (2, 1)
    assert plus.num_tokens == METHODS.make("pld-plus", CONFIG, {}).num_tokens


def test_chats_take_a_system_message_and_another_template(target, tmp_path):
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}: {{ m.content }}; {% endfor %}")
    tasks = tmp_path / "chat.jsonl"
    tasks.write_text('{"turns": ["sum values"]}')
    options = replace(OPTIONS, methods="plain", tasks=str(tasks), runs=1)
    options = replace(options, system="Be kind.", chat_template=str(template))

    def make(target, options, prompts, condition):
        assert target.tokenizer.decode(prompts[0].ids) == "s: Be kind.; u: sum values; "
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(lambda: target, options, make)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": "pld,nonsense"}, "method 'nonsense' is unknown"),
        ({"methods": "rest=pld"}, "'rest' is already taken or invalid"),
        ({"methods": "a=pld,a=pld"}, "names a twice"),
        ({"runs": 0}, "`runs` must be at least 1, got 0"),
        ({"temperature": "0,hot"}, "'0,hot' must list different numbers"),
        ({"batch": "1,two"}, "must list different whole numbers"),
        ({"drafter": ("all=folder",)}, "method 'all' is unknown"),
        ({"set": ("pld.num_tokens",)}, "is not NAME=VALUE"),
        ({"set": ("num_tokens=3",)}, "'num_tokens=3' is not METHOD.NAME=VALUE"),
        ({"set": ("pld.num_tokens=3", "pld.colour=1")}, "no setting 'colour'; its settings"),
        ({"tasks": "no/such/file"}, "does not exist"),
        ({"chat_template": "latin"}, "latin is not UTF-8 text"),
        ({"chat_template": "{{ messages }}" * 30}, "is neither a file nor one of vicuna"),
        ({"peers": "transformers,transformers"}, "must list different libraries"),
        ({"peers": "vllm"}, "peer 'vllm' is unknown"),
        ({"peers": "transformers", "temperature": "1"}, "use temperature 0 with peers"),
        ({"out": Path()}, "holds no benchmark"),
    ],
)
def test_options_that_cannot_be_served_need_no_target(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"prompt": "total(values)"}')
    Path("latin").write_bytes("größer".encode("latin-1"))
    options = replace(OPTIONS, **({"tasks": "tasks.jsonl"} | changes))
    with pytest.raises(SpecjaxError, match=message):
        run_bench(lambda: pytest.fail("loaded"), options)


def test_a_batch_beyond_the_memory_is_refused_before_anything_runs(target, requests, monkeypatch):
    monkeypatch.setattr(memory, "_host_bytes", lambda: 20_000_000)
    about = partial(run_module.about, target, prompts=requests, num_turns=5)
    assert about(replace(OPTIONS, batch="1,4"))["batch"] == "1,4"
    with pytest.raises(SpecjaxError, match="plain: a pass of 16 tokens for 500 seq"):
        about(replace(OPTIONS, batch="1,500"))


def test_a_folder_takes_one_benchmark_at_a_time(tmp_path):
    with RunFolder(tmp_path).lock(), pytest.raises(SpecjaxError, match="in use by another run"):
        run_bench(lambda: pytest.fail("loaded"), replace(OPTIONS, out=tmp_path))
