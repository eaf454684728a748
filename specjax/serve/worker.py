"""The thread that owns the device: it continues one prompt after the other, in order."""

import asyncio
import json
import queue
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.errors import SpecjaxError
from specjax.core.text import EndingText
from specjax.decoding.automaton import Automaton
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.engine import Engine
from specjax.decoding.generate import stream_states
from specjax.decoding.prompt import Prompt, from_ids
from specjax.loading.grammar import load_grammar, with_grammar
from specjax.loading.targets import LoadedTarget
from specjax.run.text import Completion, completion
from specjax.serve.requests import TextRequest

SHORTEST = 256  # prompts are padded to this times a power of two, to compile few programs
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
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    # Of the text so far, again and again, or of the exception that ended the job.
    parts: asyncio.Queue = field(default_factory=asyncio.Queue)
    is_cancelled: bool = False
    has_begun: bool = False

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
    """Continues prompts in a thread that it starts; `stop` ends it."""

    def __init__(
        self,
        target: LoadedTarget,
        drafter: tuple[Drafter, Any],
        max_new_tokens: int = 256,
        max_waiting: int = 64,
    ):
        self.target, self.max_new_tokens = target, max_new_tokens
        self._drafter, self._max_waiting = drafter, max_waiting
        self._is_stopped = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: list[Job] = []  # some of which have begun since
        self._programs: set[Any] = set()
        self._grammar = lru_cache(MAX_GRAMMARS)(self._load_grammar)
        self._thread = threading.Thread(target=self._work, name="specjax", daemon=True)
        self._thread.start()

    def submit(self, request: TextRequest) -> list[Job]:
        """Queues the prompts of a request; raises SpecjaxError if one is invalid, or Busy."""
        jobs = []
        for ids in request.prompts:
            room = min(self.target.config.longest_text - len(ids), self.max_new_tokens)
            max_tokens = max(room, 1) if request.max_tokens is None else request.max_tokens
            if max_tokens > self.max_new_tokens:
                raise SpecjaxError(
                    f"max_tokens {max_tokens} is above this server's limit, {self.max_new_tokens}"
                )
            jobs.append(Job(request, ids, max_tokens))
            engine, params = self._request(request)
            # Memory is checked when the job begins, and the one before has freed its own.
            engine.check(params, _padded(ids), max_tokens, with_memory=False)
        waiting = [job for job in self._waiting if not (job.is_cancelled or job.has_begun)]
        if len(waiting) + len(jobs) > self._max_waiting:
            raise Busy
        self._waiting = waiting + jobs
        for job in jobs:
            self._jobs.put(job)
        return jobs

    def stop(self) -> None:
        """Ends the thread after the current round; jobs that wait are dropped."""
        self._is_stopped = True
        self._jobs.put(None)
        self._thread.join()

    # ---- In the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._is_stopped and (job := self._jobs.get()) is not None:
            job.has_begun = True
            if job.is_cancelled:
                continue
            try:
                self._run(job)
            except SpecjaxError as error:
                job.put(error)
            except Exception as error:  # the others' texts go on
                traceback.print_exc()
                job.put(RuntimeError(f"{type(error).__name__} while generating; see the log"))

    def _run(self, job: Job) -> None:
        request, tokenizer = job.request, self.target.require_tokenizer()
        schema = request.json_schema
        automaton = None if schema is None else self._grammar(json.dumps(schema))
        engine, params = self._request(request, automaton)
        prompt = _padded(job.ids)
        engine.check(params, prompt, job.max_tokens)
        shapes = [leaf.shape for leaf in jax.tree.leaves((prompt, automaton))]
        self._limit_programs((engine, *shapes))
        state = engine.prefill(params, prompt, jax.random.key(request.seed))
        ending = EndingText(tokenizer, request.stop)
        for generation, after in stream_states(engine, params, state):
            if job.is_cancelled or self._is_stopped:
                return
            is_done = bool(after.is_done[0]) or int(generation.length[0]) >= job.max_tokens
            length = jnp.minimum(generation.length, job.max_tokens)
            generation = jax.device_get(replace(generation, length=length))
            part = completion(ending, generation, 0, engine.eos, is_done)
            job.put(part)
            if part.finish_reason:
                return

    def _request(
        self, request: TextRequest, automaton: Automaton | None = None
    ) -> tuple[Engine, Params]:
        sampling, automata = with_grammar(request.sampling, automaton)
        target, (drafter, params) = self.target, self._drafter
        engine = Engine(target.model, drafter, sampling, self.max_new_tokens, target.eos)
        return engine, Params(target.params, params, automata)

    def _load_grammar(self, schema: str) -> Automaton | None:
        values: Mapping[str, Any] = json.loads(schema)
        return load_grammar(self.target, json_schema=values)

    def _limit_programs(self, program: Any) -> None:
        """Drops all compiled programs once there are many, since each takes memory."""
        if program not in self._programs and len(self._programs) >= MAX_PROGRAMS:
            jax.clear_caches()
            self._programs.clear()
        self._programs.add(program)


def _padded(ids: tuple[int, ...]) -> Prompt:
    return from_ids([ids], max(SHORTEST, 1 << max(len(ids) - 1, 0).bit_length()))
