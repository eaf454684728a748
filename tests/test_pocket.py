"""Pocket as it ships: it copies, answers, and its heads draft."""

import json
from functools import cache

import jax
import pytest

import specjax
from specjax.core.chat import chat_ids
from specjax.data.task_files import TASKS
from specjax.loading.hub import pocket_folder
from specjax.loading.methods import METHODS
from specjax.models.fingerprint import fingerprint
from specjax.models.io.head_files import read_about

NEW_TOKENS = 256


@cache
def pocket() -> specjax.LoadedTarget:
    return specjax.load("pocket", dtype="float32", padded_width=16)  # compiles faster


@cache
def tasks() -> list[dict]:
    """Two of each kind of edit, with the right answers."""
    lines = map(json.loads, (TASKS / "test.jsonl").read_text().splitlines())
    edits = [line for line in lines if "answer" in line]
    return [edits[number] for number in range(len(edits)) if number % (len(edits) // 5) < 2]


@cache
def prompts() -> specjax.Prompt:
    tokenizer = pocket().tokenizer
    return specjax.from_ids([chat_ids(tokenizer, task["turns"][0]) for task in tasks()])


@cache
def generation(method: str) -> specjax.Generation:
    target = pocket()
    drafter, drafter_params = specjax.load_drafter(method, target, num_tokens=7)
    out = specjax.speculative_generate(
        specjax.Params(target.params, drafter_params),
        prompts(),
        jax.random.key(0),
        target=target.model,
        drafter=drafter,
        max_new_tokens=NEW_TOKENS,
        eos=target.eos,
    )
    return jax.device_get(out)


@pytest.mark.slow
def test_prompt_lookup_pays_on_held_out_edits():
    """Pocket was trained to copy."""
    mean = {name: generation(name).stats for name in ("pld", "pld-plus")}
    mean = {name: float(stats.mean_accepted_length) for name, stats in mean.items()}
    assert mean["pld"] >= 4.0
    assert mean["pld-plus"] >= mean["pld"]


def test_answers_end_and_are_often_right():
    out = generation("pld")
    texts = [
        pocket().tokenizer.decode(tokens[:length])
        for tokens, length in zip(out.tokens, out.length, strict=True)
    ]
    ended = sum(text.endswith("<|end|>") for text in texts)
    answers = [task["answer"] + "<|end|>" for task in tasks()]
    right = sum(map(str.__eq__, texts, answers))
    assert ended >= 9
    assert right >= 2


@cache
def pocket_fingerprint() -> str:
    return fingerprint(pocket().config, pocket().params)


HEADS = [name for name, row in METHODS.items() if row.head]


@pytest.mark.parametrize("method", HEADS)
def test_heads_ship_that_were_measured_to_draft(method):
    drafter, params = specjax.load_drafter(method, pocket())
    drafter.check(pocket().model, params)
    about = read_about(pocket_folder().parent / METHODS[method].part)
    assert about["score"] > 1.4
    assert about["target"] == pocket_fingerprint()
