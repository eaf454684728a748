"""Pocket as it ships: loads, copies, and says what transformers makes the same weights say."""

import json
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.core.chat import chat_ids
from specjax.loading.hub import pocket_folder
from specjax.loading.methods import METHODS
from specjax.models.fingerprint import fingerprint
from specjax.models.io.head_files import read_about
from specjax.pocket import TASKS

NEW_TOKENS = 256
NUM_COMPARED, NEW_TOKENS_COMPARED = 6, 128


@cache
def pocket() -> specjax.LoadedTarget:
    return specjax.load("pocket", dtype="float32")


@cache
def tasks() -> list[dict]:
    """Four of each kind of edit, with the right answers."""
    lines = map(json.loads, (TASKS / "test.jsonl").read_text().splitlines())
    edits = [line for line in lines if "answer" in line]
    return [edits[number] for number in range(len(edits)) if number % (len(edits) // 5) < 4]


@cache
def prompts() -> specjax.Prompt:
    tokenizer = pocket().tokenizer
    return specjax.from_ids([chat_ids(tokenizer, task["turns"][0]) for task in tasks()])


@cache
def generation(method: str) -> specjax.Generation:
    target = pocket()
    drafter, drafter_params = specjax.load_drafter(method, target)
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


@cache
def transformers_tokens(folder: Path) -> np.ndarray:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    rows = np.asarray(prompts().tokens)[:NUM_COMPARED]
    lengths = np.asarray(prompts().length)[:NUM_COMPARED]
    longest = lengths.max()
    ids, mask = np.zeros((2, len(rows), longest), np.int64)
    for row, length in enumerate(lengths):  # transformers pads on the left
        ids[row, longest - length :] = rows[row, :length]
        mask[row, longest - length :] = 1
    with torch.no_grad():
        out = model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=NEW_TOKENS_COMPARED,
            pad_token_id=0,
        )
    return out[:, longest:].numpy()


@pytest.fixture(scope="session")
def exported(tmp_path_factory) -> Path:
    from specjax.cli import main

    folder = tmp_path_factory.mktemp("pocket") / "exported"
    assert main(["convert", "pocket", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("method", ["plain", "pld", "pld-plus"])
def test_greedy_tokens_equal_those_of_transformers(method, exported):
    found, compared = generation(method), []
    for row, expected in enumerate(transformers_tokens(exported)):
        length = min(found.length[row], NEW_TOKENS_COMPARED)
        np.testing.assert_array_equal(found.tokens[row, :length], expected[:length])
        compared.append(length)
    assert min(compared) > 5 and np.mean(compared) > 20


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
    assert ended >= 18
    assert right >= 4


HEADS = [name for name, row in METHODS.items() if row.head]


@pytest.mark.parametrize("method", HEADS)
def test_heads_ship_that_were_measured_to_draft(method):
    drafter, params = specjax.load_drafter(method, pocket())
    drafter.check(pocket().model, params)
    about = read_about(pocket_folder().parent / METHODS[method].part)
    assert about["score"] > 1.4
    assert about["target"] == fingerprint(pocket().config, pocket().params)
