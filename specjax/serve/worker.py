"""The thread that owns the device: it continues the prompts that wait, in order."""

import asyncio
import json
import threading
import traceback
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.errors import SpecjaxError
from specjax.core.text import EndingText, num_equal
from specjax.decoding.automaton import Automaton
from specjax.decoding.continuous import Batch
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.generate import ROUNDS_PER_CALL
from specjax.decoding.prompt import doubled_length, from_ids
from specjax.decoding.state import Prefix
from specjax.loading.grammar import load_grammar
from specjax.loading.targets import LoadedTarget
from specjax.run.engines import make_engine
from specjax.run.text import Completion, completion
from specjax.serve.requests import COMPLETION_TOKENS, TextRequest

SHORTEST_PREFIX = 32  # tokens of an earlier text that are worth reusing
MAX_GRAMMARS = 32  # kept
MAX_PROGRAMS = 32  # settings whose programs are kept; then all are dropped


class Busy(Exception):
    """The queue is full."""


@dataclass(eq=False)
class Job:
    """One prompt that waits or is continued; `cancel` may come at any time."""

    request: TextRequest
    ids: tuple[int, ...]
    max_tokens: int
    ending: EndingText
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    # Snapshots of the growing text, or the exception that ended the job.
    parts: asyncio.Queue = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False

    @cached_property
    def program(self) -> Any:
        """Jobs for which this is equal can share a batch."""
        schema = json.dumps(self.request.json_schema)
        return self.request.sampling, schema, doubled_length(self.ids)

    def cancel(self) -> None:
        self.is_cancelled = True

    def put(self, part: Completion | Exception) -> None:
        """Adds the text so far, or what ended the job; called in the worker's thread."""
        self.loop.call_soon_threadsafe(self.parts.put_nowait, part)

    async def next_part(self) -> Completion:
        """Waits for more of the text; raises what ended the job."""
        part = await self.parts.get()
        if isinstance(part, Exception):
            raise part
        return part


class Worker:
    """Continues prompts in a thread that it starts; `stop` ends it.

    Up to `batch` prompts with the same settings run together. The last `prefixes` texts are kept,
    so that prompts which begin like one of them need not be read again.
    """

    def __init__(
        self,
        target: LoadedTarget,
        drafter: tuple[Drafter, Any],
        max_new_tokens: int = 256,
        max_waiting: int = 64,
        batch: int = 1,
        prefixes: int = 1,
    ):
        self.target, self.max_new_tokens = target, max_new_tokens
        self._drafter, self._max_waiting, self._batch_size = drafter, max_waiting, batch
        self._is_stopped = False
        self._waiting: list[Job] = []
        self._has_changed = threading.Condition()  # guards the list
        self._prefixes: deque[tuple[tuple[int, ...], Prefix]] = deque(maxlen=prefixes)
        self._programs: set[Any] = set()
        self._grammar = lru_cache(MAX_GRAMMARS)(self._load_grammar)
        self._thread = threading.Thread(target=self._work, name="specjax", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest) -> list[Job]:
        """Queues the prompts of a request; raises SpecjaxError if one is invalid, or Busy."""
        jobs, tokenizer = [], self.target.require_tokenizer()
        if len(request.prompts) > self._max_waiting:
            raise SpecjaxError(
                f"prompt holds {len(request.prompts)} prompts, above this server's limit, "
                f"{self._max_waiting}"
            )
        for ids in request.prompts:
            longest = self.target.config.longest_from(len(ids))
            room = min(longest - len(ids), self.max_new_tokens)
            default = max(room if request.is_chat else min(room, COMPLETION_TOKENS), 1)
            max_tokens = default if request.max_tokens is None else request.max_tokens
            if max_tokens > self.max_new_tokens:
                raise SpecjaxError(
                    f"max_tokens {max_tokens} is above this server's limit, {self.max_new_tokens}"
                )
            engine, params = self._engine(request)
            prompt = from_ids([ids], doubled_length(ids))
            # Memory is checked when the job begins, and the one before has freed its own.
            engine.check(params, prompt, max_tokens, with_memory=False)
            ending = EndingText(tokenizer, request.stop, () if request.is_chat else ids)
            jobs.append(Job(request, ids, max_tokens, ending))
        with self._has_changed:
            waiting = [job for job in self._waiting if not job.is_cancelled]
            if len(waiting) + len(jobs) > self._max_waiting:
                raise Busy
            self._waiting = waiting + jobs
            self._has_changed.notify()
        return jobs

    def stop(self) -> None:
        """Ends the thread after the current rounds; jobs that wait are dropped."""
        with self._has_changed:
            self._is_stopped = True
            self._has_changed.notify()
        self._thread.join()

    # ---- In the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_stopped:
            with self._has_changed:
                self._has_changed.wait_for(lambda: self._is_stopped or self._waiting)
            if job := self._next_job():
                self._run(job)

    def _next_job(self, program: Any = None, is_first: bool = False) -> Job | None:
        """Removes a job from those that wait: the first one, or the first one with `program`.

        With `is_first` both must hold, so that no job waits for ever.
        """
        with self._has_changed:
            self._waiting = [job for job in self._waiting if not job.is_cancelled]
            for job in self._waiting[: 1 if is_first else None]:
                if program in (None, job.program):
                    self._waiting.remove(job)
                    return job
        return None

    def _run(self, job: Job) -> None:
        """Continues a job, beside others with the same program that wait or come later."""
        running: dict[int, Job] = {}  # by place in the batch
        with _reporting([job]):
            batch = self._batch(job)
            with _reporting(running.values()):
                self._run_batch(batch, running, job)

    def _run_batch(self, batch: Batch, running: dict[int, Job], first: Job) -> None:
        job: Job | None = first
        while (job or running) and not self._is_stopped:
            while job is not None:
                place = min({*range(batch.size)} - {*running})
                with _reporting([job]):
                    if batch.state is None:
                        self._make_room(batch, job)
                    self._begin(batch, place, job)
                    running[place] = job
                job = self._next_job(first.program) if len(running) < batch.size else None
            if running:
                self._advance(batch, running)
            if len(running) < batch.size:
                job = self._next_job(first.program, is_first=True)

    def _batch(self, job: Job) -> Batch:
        automaton = self._grammar(json.dumps(job.request.json_schema))
        engine, params = self._engine(job.request, automaton)
        prompts = from_ids([job.ids] * self._batch_size, doubled_length(job.ids))
        shapes = [leaf.shape for leaf in jax.tree.leaves((prompts, automaton))]
        self._limit_programs((engine, *shapes))
        return Batch(engine, params, self._batch_size)

    def _make_room(self, batch: Batch, job: Job) -> None:
        """Drops the kept texts if a batch does not fit in memory beside them."""
        prompts = from_ids([job.ids] * self._batch_size, doubled_length(job.ids))
        try:
            batch.engine.check(batch.params, prompts, job.max_tokens)
        except SpecjaxError:
            if not self._prefixes:
                raise
            self._prefixes.clear()
            batch.engine.check(batch.params, prompts, job.max_tokens)

    def _begin(self, batch: Batch, place: int, job: Job) -> None:
        shared = [(num_equal(job.ids, text), prefix) for text, prefix in self._prefixes]
        num_shared, prefix = max(shared, key=itemgetter(0), default=(0, None))
        prefix = None if num_shared < SHORTEST_PREFIX else prefix
        prompt = from_ids([job.ids], doubled_length(job.ids))
        key = jax.random.key(job.request.seed)
        batch.put(place, batch.engine.resume(batch.params, prefix, prompt, key))

    def _advance(self, batch: Batch, running: dict[int, Job]) -> None:
        """Runs some rounds, and frees the places of jobs that end."""
        generation, is_done = batch.run(ROUNDS_PER_CALL)
        jobs = map(running.get, range(len(is_done)))
        limits = jnp.asarray([job.max_tokens if job else 0 for job in jobs])
        generation = replace(generation, length=jnp.minimum(generation.length, limits))
        generation = jax.device_get(generation)
        for place, job in list(running.items()):
            one = jax.tree.map(lambda leaf: leaf[place : place + 1], generation)  # noqa: B023
            part = None
            with _reporting([job]):
                one.check()
                is_over = bool(is_done[place]) or int(one.length[0]) >= job.max_tokens
                part = completion(job.ending, one, 0, batch.engine.eos, is_over)
                job.put(part)
            if part is None or part.finish_reason or job.is_cancelled:
                del running[place]
                prefix = batch.end(place)
                if part is not None:
                    self._keep(job, part, prefix)

    def _keep(self, job: Job, part: Completion, prefix: Prefix) -> None:
        """Keeps a text in the place of those that it continues, or of the oldest."""
        text = (*job.ids, *part.tokens)
        others = [kept for kept in self._prefixes if num_equal(text, kept[0]) < len(kept[0])]
        self._prefixes.clear()
        self._prefixes.extend([*others, (text, prefix)])

    def _engine(
        self, request: TextRequest, automaton: Automaton | None = None
    ) -> tuple[Engine, Params]:
        method = self.target, self._drafter, self.max_new_tokens
        return make_engine(*method, request.sampling, automaton)

    def _load_grammar(self, schema: str) -> Automaton | None:
        return load_grammar(self.target, json_schema=json.loads(schema))

    def _limit_programs(self, program: Any) -> None:
        """Drops all compiled programs once there are many, since each takes memory."""
        if program not in self._programs and len(self._programs) >= MAX_PROGRAMS:
            jax.clear_caches()
            self._programs.clear()
        self._programs.add(program)


@contextmanager
def _reporting(jobs: Collection[Job]) -> Iterator[None]:
    """Ends jobs with an exception of the block; the texts of others go on."""
    try:
        yield
    except SpecjaxError as error:
        for job in jobs:
            job.put(error)
    except Exception as error:
        traceback.print_exc()
        for job in jobs:
            job.put(RuntimeError(f"{type(error).__name__} while generating; see the log"))
