"""The benchmark: its arithmetic, its tasks, and that it notices what would make it worthless.

Nothing here asserts how long anything took.
"""

import json
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from rich.console import Console

from specjax.bench import run as run_module
from specjax.bench.bandwidth import bytes_per_round
from specjax.bench.measure import (
    PREFILL,
    Answer,
    Request,
    Sample,
    Verdict,
    measure,
    summarise,
    warm_up,
)
from specjax.bench.memory import held, main
from specjax.bench.options import methods_in
from specjax.bench.report import ALL, complaints, near_ties, show, table
from specjax.bench.run import BenchOptions, check_prompts, compare, make_contestants, run_bench
from specjax.bench.tasks import Task, read_tasks, token_ids
from specjax.bench.ties import NearTies
from specjax.decoding.prompt import VICUNA
from specjax.decoding.sampling import Sampling
from specjax.errors import SpecjaxError
from specjax.hub import Target
from specjax.models.config import LlamaConfig
from specjax.models.llama import Llama
from specjax.pocket import corpus, edits
from specjax.pocket.tokenizer import train_tokenizer

CONFIG = LlamaConfig(320, 32, 48, 1, 4, 2, 8, max_position_embeddings=512, eos_token_id=(1,))
OPTIONS = BenchOptions(methods="pld,pld-plus", max_new_tokens=24, runs=2)


@pytest.fixture(scope="module")
def target():
    """A random model whose weights are large enough for its context to matter."""
    model = Llama(CONFIG)
    params = model.initialise(jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 2 else leaf, params)
    return Target(model, params, None, CONFIG, "tiny")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["def total(values):\n    return sum(values)\n"], 320, folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def requests():
    """Two kinds, of prompts whose lengths differ within one bucket."""
    numbers = np.random.default_rng(0)
    lengths = {"short": (9, 17), "long": (40, 33, 51)}
    return [
        Request(kind, tuple(numbers.integers(2, 320, length).tolist()))
        for kind in lengths
        for length in lengths[kind]
    ]


@dataclass
class Liar:
    """A contestant that changes the last token of all but the first answer."""

    own: object
    num_answers: int = 0
    name = "liar"

    def __getattr__(self, name):
        return getattr(self.own, name)

    def read(self, result):
        answer = self.own.read(result)
        self.num_answers += 1
        last = answer.tokens[-1] + (self.num_answers > 3)  # two runs to warm up, and one
        return answer._replace(tokens=(*answer.tokens[:-1], last))


# ---- Measuring ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature, methods", [(0.0, "pld,pld-plus"), (0.8, "pld")])
def test_every_method_says_the_same_and_nothing_compiles_again(
    target, requests, temperature, methods
):
    options = replace(OPTIONS, temperature=temperature, methods=methods)
    rows = list(compare(make_contestants(target, options, requests), requests, options.runs))
    names = ["plain", *methods.split(",")]
    assert [(row.task, row.method, row.num_prompts) for row in rows] == [
        (task, name, num_prompts)
        for task, num_prompts in (("short", 2), ("long", 3), (ALL, 5))
        for name in names
    ]
    assert all(row.identical for row in rows)
    assert {row.num_recompiled for row in rows} == {0}
    assert complaints(rows) == []
    assert {row.mean_accepted_length for row in rows if row.method == "plain"} == {1.0}


def test_a_row_pools_prompts_and_forms_ratios_in_pairs():
    def sample(method, number, repeat, num_tokens, rounds, seconds):
        answer, request = Answer((7,) * num_tokens, rounds), Request("edits", (3,) * 5)
        return Sample(method, "float32", request, number, repeat, answer, seconds, 0)

    samples = [
        sample("plain", 0, 0, 10, 10, 1.0),
        sample("plain", 0, 1, 10, 10, 2.0),
        sample("plain", 1, 0, 30, 30, 3.0),
        sample("plain", 1, 1, 30, 30, 5.0),
        sample("fast", 0, 0, 10, 4, 0.5),  # x 2
        sample("fast", 0, 1, 10, 4, 0.5),  # x 4
        sample("fast", 1, 0, 30, 6, 1.0),  # x 3
        sample("fast", 1, 1, 30, 6, 5.0),  # x 1
        sample(PREFILL, 0, 0, 1, 1, 0.1),
        sample(PREFILL, 0, 1, 1, 1, 0.3),
        sample(PREFILL, 1, 0, 1, 1, 0.5),
        sample(PREFILL, 1, 1, 1, 1, 0.5),
    ]
    plain, fast = summarise("edits", samples, {"plain": 3.0, PREFILL: 1.0, "fast": 4.0})
    assert (plain.method, plain.ratio, plain.compile_seconds) == ("plain", 1.0, 3.0)
    assert (fast.num_new_tokens, fast.rounds, fast.mean_accepted_length) == (40, 10, 4.0)
    assert plain.seconds == 1.5 + 4.0
    assert fast.seconds == 0.5 + 3.0
    assert fast.tokens_per_second == 40 / 3.5
    assert fast.ratio == 2.5
    assert fast.ratio_quartiles == (1.75, 3.25)
    assert fast.spread == pytest.approx((0 + 2 / 3) / 2)
    assert fast.prefill_seconds == pytest.approx(0.2 + 0.5)
    assert fast.mean_length == pytest.approx((4 * (5 + 5) + 6 * (5 + 15)) / 10)


def test_methods_take_turns():
    class Counter:
        dtype = "float32"

        def __init__(self, name):
            self.name = name

        def prepare(self, ids):
            return ids

        def run(self, request):
            return request

        def read(self, result):
            return Answer(tuple(result), 1)

    contestants = [Counter(name) for name in "abc"]
    samples = list(measure(contestants, [Request("", (1,)), Request("", (2,))], num_runs=3))
    assert "".join(sample.method for sample in samples) == "abcbcacab" + "bcacababc"


def test_different_tokens_are_reported(target, requests):
    plain, *_ = make_contestants(target, OPTIONS, requests)
    rows = list(compare([plain, Liar(plain)], requests[:2], num_runs=1))
    assert [row.num_different for row in rows] == [0, 1]
    assert not rows[1].identical
    [line] = complaints(rows)
    assert line.startswith("DIFFERENT TOKENS: liar")
    assert line.endswith("1 of 2 short prompts")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table(rows))
    assert capture.get().split()[-1] == "NO"


def test_compiling_in_a_measured_run_is_reported(target, requests):
    plain = replace(make_contestants(target, OPTIONS, requests)[0], padded_length=8)
    compile_seconds = warm_up([plain], requests[0].ids)
    samples = list(measure([plain], requests[:2], num_runs=2))  # 16 slots, then 24: a new program
    assert [sample.num_compiled > 0 for sample in samples] == [False, False, True, False]
    [line] = complaints(summarise("short", samples, compile_seconds))
    assert line.startswith("RECOMPILED: 1 measured runs of plain")


def test_transformers_says_the_same(target, requests):
    pytest.importorskip("torch")
    options = replace(OPTIONS, methods="plain", peers="transformers", max_new_tokens=12, runs=1)
    contestants = make_contestants(target, options, requests)
    rows = list(compare(contestants, requests[:2], options.runs))
    assert [row.method for row in rows] == ["plain", "transformers"]
    assert all(row.identical for row in rows)
    assert rows[1].mean_accepted_length == 1


@pytest.mark.parametrize(
    "temperature, excused", [(0.0, Verdict.NEAR_TIE), (0.8, Verdict.DIFFERENT)]
)
def test_16_bits_excuse_a_near_tie_and_nothing_else(target, requests, temperature, excused):
    """Token 9 gets the logits of what plain decoding says first; noise tells the two apart."""
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), target.params)
    options = replace(OPTIONS, temperature=temperature)
    plain = make_contestants(replace(target, params=half), options, requests)[0]
    [sample] = measure([plain], requests[:1], num_runs=1)
    said = sample.answer.tokens
    table = half["lm_head"]["weight"]
    twins = half | {"lm_head": {"weight": table.at[9].set(table[said[0]])}}
    judge = NearTies(
        replace(target, params=twins), Sampling(temperature), options.seed, options.max_new_tokens
    )

    def verdict(token, dtype="bfloat16", rest=said[1:]):
        own = sample._replace(dtype=dtype, answer=Answer((token, *rest), 1))
        return judge(own, sample._replace(dtype=dtype))

    assert said[0] != 9
    assert verdict(said[0]) == Verdict.SAME
    assert verdict(9) == excused
    assert verdict(9, "float32") == Verdict.DIFFERENT
    assert Verdict.NEAR_TIE not in [verdict(token) for token in range(20, 60)]
    assert verdict(said[0], rest=said[1:-1]) == Verdict.DIFFERENT
    assert judge(sample._replace(dtype="float32"), sample) == Verdict.NOT_COMPARED


def test_near_ties_and_other_dtypes_are_told_apart_from_errors(target, requests):
    @dataclass
    class OtherDtype(Liar):
        name = "peer"
        dtype = "float16"

    plain, *_ = make_contestants(target, OPTIONS, requests)
    forgiving = compare(
        [plain, Liar(plain), OtherDtype(plain)],
        requests[:2],
        1,
        lambda own, plain: (
            Verdict.NOT_COMPARED
            if own.dtype != plain.dtype
            else Verdict(1 + (own.answer.tokens != plain.answer.tokens))
        ),
    )
    same, tied, other = forgiving
    assert [row.identical for row in (same, tied, other)] == [True, False, None]
    assert complaints([same, tied, other]) == []
    [line] = near_ties([same, replace(tied, dtype="bfloat16"), other])
    assert line.startswith("near ties: liar left plain decoding's text on 1 of 2 short prompts")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table([same, tied, other]))
    ends = [line.rstrip() for line in capture.get().splitlines()[2:]]
    assert ends[0].endswith("yes")
    assert ends[1].endswith("near ties: 1")
    assert ends[2].endswith("float16")


@pytest.mark.parametrize(
    "verification, told, is_lossy", [("rejection", "in law", False), ("typical", "LOSSY", True)]
)
def test_other_draws_are_not_compared_and_lossy_ones_are_told(
    target, requests, capsys, verification, told, is_lossy
):
    def sample(method, token):
        answer = Answer((3, 4, token), 2)
        return Sample(method, "float32", requests[0], 0, 0, answer, 1.0, 0)

    samples = [sample("plain", 5), sample("pld", 6)]
    sampling = Sampling(0.8, verification=verification)
    judge = NearTies(target, sampling, 0, OPTIONS.max_new_tokens)
    rows = summarise("short", samples, {"plain": 0.0, "pld": 0.0}, judge)
    assert [row.identical for row in rows] == [True, None]
    show(rows, 1, 1e9, sampling)
    printed = capsys.readouterr().out
    [line] = [line for line in printed.splitlines() if line.startswith("  pld")]
    assert line.rstrip().endswith(told)
    assert ("LOSSY: " in printed) == is_lossy
    assert "DIFFERENT" not in printed


def test_run_bench_prints_a_table_and_writes_rows(target, tokenizer, tmp_path, capsys):
    tasks, out = tmp_path / "copies.jsonl", tmp_path / "out.jsonl"
    tasks.write_text('{"prompt": "total(values)"}\n{"turns": ["sum"], "category": "chat"}\n\n')
    options = replace(OPTIONS, methods="pld", tasks=str(tasks), out=out, runs=1)
    rows = run_bench(lambda: replace(target, tokenizer=tokenizer), options)
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["task"], row["method"]) for row in written] == [
        (kind, method) for kind in ("copies", "chat", ALL) for method in ("plain", "pld")
    ]
    assert [row["rounds"] for row in written] == [row.rounds for row in rows]
    assert all(row["identical"] and row["target"] == "tiny" for row in written)
    assert {row["dtype"] for row in written} == {"float32"}
    assert all(row["bandwidth_share"] > 0 for row in written)
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "GB/s that this device reads" in printed
    assert "DIFFERENT" not in printed


def test_an_interrupt_loses_no_finished_kind(target, tokenizer, tmp_path, capsys, monkeypatch):
    tasks, out = tmp_path / "two.jsonl", tmp_path / "out.jsonl"
    tasks.write_text('{"prompt": "total(values)"}\n{"prompt": "sum(values)", "category": "sums"}\n')

    def interrupted(contestants, requests, num_runs):
        if requests[0].kind == "sums":
            raise KeyboardInterrupt
        return measure(contestants, requests, num_runs)

    monkeypatch.setattr(run_module, "measure", interrupted)
    options = replace(OPTIONS, methods="plain", tasks=str(tasks), out=out, runs=1)
    with pytest.raises(KeyboardInterrupt):
        run_bench(lambda: replace(target, tokenizer=tokenizer), options)
    assert [json.loads(line)["task"] for line in out.read_text().splitlines()] == ["two"]
    assert "\ntwo" in capsys.readouterr().out


def test_what_a_round_reads(target):
    """320 x 32 numbers of the LM head; of the layer 2 x 32 x 32, 2 x 16 x 32 and 3 x 32 x 48."""
    weights = 320 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 3 * 32
    per_token = 2 * 2 * 8
    assert bytes_per_round(target, 100.0) == 4 * (weights + 100 * per_token)
    tied = replace(target, config=replace(CONFIG, tie_word_embeddings=True))
    assert bytes_per_round(tied, 0.0) == 4 * (weights + 320 * 32)


def test_by_default_all_methods_without_params_are_measured():
    assert {"plain", "pld", "pld-plus"} <= set(methods_in("", CONFIG))
    assert methods_in(" pld,, plain ", CONFIG) == ["pld", "plain"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"methods": "pld,nonsense"}, "method 'nonsense' is unknown"),
        ({"runs": 0}, "runs 0 must be at least 1"),
        ({"limit": 0}, "limit 0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"temperature": -1.0}, "temperature -1.0 is not a finite number"),
        ({"tasks": "no/such/file"}, "cannot be read"),
        ({"peers": "vllm"}, "peer 'vllm' is unknown"),
        ({"peers": "transformers", "temperature": 1.0}, "use temperature 0 with peers"),
        ({"out": "no/such/folder/x"}, "cannot be written"),
    ],
)
def test_options_that_cannot_be_served_need_no_target(tmp_path, changes, message):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "total(values)"}')
    if "out" in changes:
        changes = {"out": tmp_path / changes["out"]}
    options = replace(OPTIONS, **({"tasks": str(tasks)} | changes))
    with pytest.raises(SpecjaxError, match=message):
        run_bench(lambda: pytest.fail("loaded"), options)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ((5,), r"^writing prompt 1 has 1 token\(s\)"),
        ((), "^writing prompt 1 is empty"),
        ((5, 320), "^writing prompt 1 holds token id 320"),
        (
            (5,) * 500,
            "^writing prompt 1: 500 prompt tokens .* shorten the prompt, or leave it out$",
        ),
    ],
)
def test_a_prompt_that_cannot_be_served_is_named(wrong, message):
    with pytest.raises(SpecjaxError, match=message):
        check_prompts("writing", [(5, 6, 7), wrong], CONFIG, max_new_tokens=24)


# ---- Tasks --------------------------------------------------------------------------------------


def test_pocket_tasks_are_held_out_edits_and_read_as_pocket_was_trained(tokenizer, monkeypatch):
    made = [
        edits.EditTask(kind, "Rename `a` to `b`.", f"a = {number}\n", f"b = {number}\n")
        for number in range(2)
        for kind in edits.KINDS
    ]
    monkeypatch.setattr(edits, "held_out_tasks", lambda count, seed, **_: made[:count])
    monkeypatch.setattr(corpus, "held_out_openings", lambda count, *_: ("import os\n",) * count)
    tasks = read_tasks("pocket", limit=2)
    kinds = [*edits.KINDS, "complete"]
    assert [task.kind for task in tasks] == [kind for kind in kinds for _ in range(2)]
    opening = tokenizer("<|begin|>import os\n")["input_ids"]
    assert token_ids(tasks[-1], tokenizer) == tuple(opening)
    assert token_ids(Task("x", "<|begin|>import os\n", is_opening=True), tokenizer) == tuple(
        opening
    )
    expected = tokenizer(edits.prompt_text(made[0]))["input_ids"]
    assert token_ids(tasks[0], tokenizer) == tuple(expected)


def test_a_message_without_a_template_is_asked_as_vicuna_is(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    asked = tokenizer(VICUNA.format(message="sum"))["input_ids"]
    assert token_ids(Task("chat", "sum", is_chat=True), tokenizer) == tuple(asked)
    assert token_ids(Task("text", "sum"), tokenizer) == tuple(tokenizer("sum")["input_ids"])


def test_a_file_gives_the_first_of_each_kind(tmp_path):
    path = tmp_path / "mixed.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["one", "ignored"]},
        {"prompt": "two"},
        {"category": "writing", "turns": ["three"]},
        {"category": "writing", "turns": ["four"]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert read_tasks(str(path), limit=2) == (
        Task("writing", "one", is_chat=True),
        Task("writing", "three", is_chat=True),
        Task("mixed", "two"),
    )


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"prompt": "cut', "is not JSON"),
        ('["a list"]', "is no JSON object"),
        ('{"text": "wrong name"}', "has no text"),
        ('{"prompt": ""}', "has no text"),
        ('{"prompt": 3}', "has no text"),
        ('{"turns": []}', "has no text"),
        ('{"turns": "not a list"}', "has no text"),
        ('{"prompt": "fine", "category": 3}', "is no name"),
    ],
)
def test_a_malformed_line_is_named_and_the_rest_still_runs(tmp_path, capsys, line, problem):
    path = tmp_path / "tasks.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "too"}}')
    assert [task.text for task in read_tasks(str(path), limit=2)] == ["fine", "too"]
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"specjax: {path}:3")
    assert problem in complaint
    assert complaint.endswith("this line is left out\n")
    path.write_text(line)
    with pytest.raises(SpecjaxError, match="holds no tasks"):
        read_tasks(str(path), limit=2)


@pytest.mark.parametrize(
    "content, problem",
    [(None, "cannot be read"), (b"\xff\xfe", "not UTF-8"), (b"\n\n", "holds no tasks")],
)
def test_a_file_without_tasks(tmp_path, content, problem):
    path = tmp_path / "tasks.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecjaxError, match=problem):
        read_tasks(str(path), limit=1)


# ---- Memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["plain", "pld"])
def test_a_request_holds_one_cache(method):
    config = replace(CONFIG, num_hidden_layers=2, head_dim=64, max_position_embeddings=4096)
    found, _ = held(method, config, prompt_length=64, max_new_tokens=2000)
    assert found.cache_copies == 0
    scores = (
        2 * found.scores
    )  # as they are, and as weights: more than the cache of so small a model
    assert found.temporary - scores < 1.1 * found.cache


@pytest.mark.parametrize(
    "option, value, message",
    [("--methods", "foo", "method 'foo' is unknown"), ("--width", "9", "width 9 must be at least")],
)
def test_what_cannot_be_measured_is_one_line(monkeypatch, capsys, option, value, message):
    monkeypatch.setattr("sys.argv", ["memory", option, value])
    assert main() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"specjax: {message}")
    assert captured.err.count("\n") == 1
