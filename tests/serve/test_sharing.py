"""Texts that share a batch, or the cache of an earlier text, are those of their prompts alone."""

import asyncio
import threading
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
from tokenizers import decoders

import specjax
from specjax.cli.prompts import SOURCE
from specjax.decoding.continuous import Batch
from specjax.decoding.engine import Engine
from specjax.decoding.prompt import chat_ids
from specjax.decoding.sampling import Sampling
from specjax.serve.requests import TextRequest
from specjax.serve.worker import Worker

LIMIT = 32
REQUEST = TextRequest((), Sampling(1.5), LIMIT, (), 5, None, True, False, False)
FIRST = [{"role": "user", "content": f"Rename `count`:\n{SOURCE}"}]


@pytest.fixture(scope="module")
def target(tiny):
    return specjax.load(tiny)


@contextmanager
def working(target, **options):
    worker = Worker(target, specjax.load_drafter("pld", target), LIMIT, **options)
    yield worker
    worker.stop()


def asked(target, messages, **changes):
    return replace(REQUEST, prompts=(chat_ids(target.tokenizer, messages),), **changes)


async def answer(job):
    parts = [await job.next_part()]
    while parts[-1].finish_reason is None:
        parts.append(await job.next_part())
    return parts


def answers(worker, *requests):
    """Returns the parts of each text; all requests wait before the first begins."""

    async def gather():
        with worker._has_changed:
            jobs = [job for request in requests for job in worker.submit(request)]
        return await asyncio.gather(*map(answer, jobs))

    return asyncio.run(gather())


def alone(target, request):
    with working(target, prefixes=0) as worker:
        return answers(worker, request)[0][-1]


def test_a_second_turn_continues_the_first_and_equals_a_fresh_start(target, monkeypatch):
    resumed, resume = [], Engine.resume

    def noted(self, params, state, prompt, key):
        resumed.append(0 if state is None else int(state.length[0]))
        return resume(self, params, state, prompt, key)

    monkeypatch.setattr(Engine, "resume", noted)
    with working(target) as worker:
        reply = answers(worker, asked(target, FIRST))[0][-1]
        second = [*FIRST, {"role": "assistant", "content": reply.text}]
        second = asked(target, [*second, {"role": "user", "content": "And `index`?"}], seed=6)
        part = answers(worker, second)[0][-1]
        changed = (*second.prompts[0][:40], *range(100, 160))
        changed = replace(REQUEST, prompts=(changed,), seed=7)
        third = answers(worker, changed)[0][-1]
        answers(worker, asked(target, [{"role": "user", "content": "import os"}]))
        answers(worker, second)
    assert resumed[0] == 0 < resumed[1] < resumed[2]
    assert resumed[3:] == [0, 0]  # the prompt between them begins otherwise, and only one is kept
    assert part == alone(target, second)
    assert third == alone(target, changed)
    assert len({part.text, third.text}) == 2


def test_texts_of_a_batch_stream_separately_and_equal_those_alone(target, monkeypatch):
    sizes, run = [], Batch.run

    def noted(self, max_rounds):
        sizes.append(len(self.state.length))
        return run(self, max_rounds)

    monkeypatch.setattr(Batch, "run", noted)
    names = "count", "values", "index", "longest", "x"
    requests = [
        asked(target, [{"role": "user", "content": f"Rename `{name}`:\n{SOURCE}"}], seed=seed)
        for seed, name in enumerate(names)
    ]
    requests[1] = replace(requests[1], max_tokens=3)
    whole = alone(target, requests[2]).text
    requests[2] = replace(requests[2], stop=(whole[len(whole) // 2 :][:2],))
    sizes.clear()
    with working(target, batch=2) as worker:
        found = answers(worker, *requests)
    assert sizes[0] == 2
    for request, parts in zip(requests, found, strict=True):
        last = alone(target, request)
        assert (parts[-1].text, parts[-1].tokens) == (last.text, last.tokens)
        assert parts[-1].finish_reason == last.finish_reason
    assert len(found[0]) > 1
    assert len({parts[-1].text for parts in found}) == 5


def test_a_cancelled_text_leaves_its_place_to_another(target):
    requests = [asked(target, FIRST, seed=seed) for seed in range(3)]

    async def gather(worker):
        with worker._has_changed:
            jobs = [job for request in requests for job in worker.submit(request)]
        await jobs[0].next_part()
        jobs[0].cancel()
        return [(await answer(job))[-1] for job in jobs[1:]]

    with working(target, batch=2) as worker:
        found = asyncio.run(gather(worker))
    assert [part.text for part in found] == [alone(target, r).text for r in requests[1:]]


def test_a_prompt_with_other_settings_is_not_passed_over_for_ever(target, monkeypatch):
    may_end, has_begun = threading.Event(), threading.Event()

    def wait(self, job):
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr(Worker, "_run", wait)
    same, other = asked(target, FIRST), asked(target, FIRST, sampling=Sampling())

    async def submit(worker):
        worker.submit(same)
        assert await asyncio.to_thread(has_begun.wait, 60)
        return [job for request in (other, same) for job in worker.submit(request)]

    with working(target, batch=2) as worker:
        first, second = asyncio.run(submit(worker))
        assert worker._next_job(second.program, is_first=True) is None
        assert worker._next_job(second.program) is second
        assert worker._next_job(second.program) is None
        assert worker._next_job() is first
        may_end.set()


def test_a_completion_keeps_a_space_that_the_decoder_drops_at_the_start_of_a_text(target):
    tokenizer = deepcopy(target.tokenizer)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), strip])
    [space] = tokenizer(" ", add_special_tokens=False)["input_ids"]
    prompts = (tuple(tokenizer("import os")["input_ids"]),)
    sampling = Sampling(logit_bias={space: 1e4})
    request = replace(REQUEST, prompts=prompts, sampling=sampling, max_tokens=2)
    other = replace(target, tokenizer=tokenizer)
    texts = [alone(other, replace(request, is_chat=is_chat)).text for is_chat in (False, True)]
    assert texts == ["  ", " "]
