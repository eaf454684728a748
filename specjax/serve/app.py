"""The HTTP endpoint: routes, limits, and the shapes of OpenAI's answers."""

import asyncio
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from specjax.core.errors import SpecjaxError
from specjax.core.text import UNFINISHED
from specjax.loading.vocabularies import token_bytes
from specjax.run.text import Completion
from specjax.serve.chats import ChatFormatter
from specjax.serve.requests import TextRequest, read_request
from specjax.serve.worker import Busy, Job, Worker

MAX_BODY_BYTES = 2**20
BODY_SECONDS = 20.0  # for a whole body to arrive
LOCAL_HOSTS = "localhost", "127.0.0.1", "::1", "[::1]"


def make_app(worker: Worker, api_key: str | None = None, host: str = "127.0.0.1") -> Starlette:
    """Returns the application; it stops the worker when it shuts down.

    Without a key it answers only under `host` and this machine's own names.
    """
    name, tokenizer = worker.target.name, worker.target.require_tokenizer()
    chats = ChatFormatter(tokenizer)
    try:
        bytes_of = token_bytes(tokenizer)
    except SpecjaxError:  # of another kind
        bytes_of = {}

    chat_turn = asyncio.Lock()
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "specjax"}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def answer(request: Request) -> Response:
        is_chat = request.url.path.endswith("/chat/completions")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _body(request)
        except TimeoutError:
            problem = f"the request's body took longer than {BODY_SECONDS:g} s"
            return _error(408, problem, {"connection": "close"})
        except ClientDisconnect:
            return Response(status_code=499)  # the client is gone
        if body is None:
            return _error(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        try:
            read = read_request, body, is_chat, worker.target, chats.ids
            # Off the event loop, since texts may be long; chat templates run one at a time.
            async with chat_turn if is_chat else nullcontext():
                wanted = await asyncio.to_thread(*read)
            jobs = worker.submit(wanted)
        except SpecjaxError as error:
            return _error(400, str(error))
        except Busy:
            return _error(429, "too many requests are waiting; try again later")
        return await _answer(request, Answer(wanted, jobs, name, tokenizer, bytes_of))

    def checked(endpoint: Any) -> Any:
        async def check(request: Request) -> Response:
            scheme, _, sent = request.headers.get("authorization", "").partition(" ")
            sent = sent if scheme.lower() == "bearer" else ""
            if api_key is not None and not hmac.compare_digest(sent.encode(), api_key.encode()):
                return _error(401, "the API key is missing or wrong")
            # A page of another site can send forms to this machine, but not this content type.
            kind = request.headers.get("content-type", "")
            if request.method == "POST" and not kind.startswith("application/json"):
                return _error(415, "the content type must be application/json")
            return await endpoint(request)

        return check

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.stop)
        chats.stop()

    routes = [
        Route("/v1/models", checked(models)),
        Route("/v1/completions", checked(answer), methods=["POST"]),
        Route("/v1/chat/completions", checked(answer), methods=["POST"]),
    ]
    # A page of another site can send requests to this machine under another name.
    hosts = [*LOCAL_HOSTS, host, f"[{host}]"] if api_key is None else ["*"]
    middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


async def _body(request: Request) -> bytes | None:
    """Returns the body, or None if it is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return body


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    message = message.encode(errors="replace").decode()  # it may quote halves of characters
    error = {"message": message, "type": kind, "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


async def _answer(request: Request, answer: "Answer") -> Response:
    """Waits for the first part, so that an error still has a status, and for all if need be."""
    work = asyncio.ensure_future(answer.start() if answer.wanted.is_stream else answer.whole())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() or not work.done():
            raise asyncio.CancelledError
        result = work.result()
    except (SpecjaxError, RuntimeError) as error:
        answer.cancel()
        return _error(400 if isinstance(error, SpecjaxError) else 500, str(error))
    except asyncio.CancelledError:
        answer.cancel()
        work.cancel()
        return Response(status_code=499)  # the client is gone
    finally:
        gone.cancel()
    if isinstance(result, dict):
        return JSONResponse(result)
    return StreamingResponse(answer.events(result), media_type="text/event-stream")


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Answer:
    """The answer to one request, as a whole or in events."""

    def __init__(
        self,
        wanted: TextRequest,
        jobs: Sequence[Job],
        model: str,
        tokenizer: Any,
        bytes_of: Mapping[int, bytes],
    ):
        self.wanted, self._jobs = wanted, jobs
        self._tokenizer, self._bytes_of = tokenizer, bytes_of
        kind = "chat.completion" if wanted.is_chat else "text_completion"
        kind += ".chunk" if wanted.is_chat and wanted.is_stream else ""
        number = uuid.uuid4().hex
        self._head = {"id": number, "object": kind, "created": int(time.time()), "model": model}
        self._num_tokens = 0

    def cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    async def whole(self) -> dict[str, Any]:
        choices = []
        for index, job in enumerate(self._jobs):
            part = await job.next_part()
            while part.finish_reason is None:
                part = await job.next_part()
            choices.append(self._choice(index, part, "message"))
        return self._head | {"choices": choices, "usage": self._usage()}

    async def start(self) -> Completion:
        return await self._jobs[0].next_part()

    async def events(self, first: Completion) -> AsyncIterator[str]:
        """Yields the events of a stream that begins with `first`."""
        try:
            for index, job in enumerate(self._jobs):
                part, shown = first if index == 0 else await job.next_part(), None
                yield self._event([self._choice(index, part, "delta")])
                while part.finish_reason is None:
                    part, shown = await job.next_part(), part
                    if part.tokens != shown.tokens or part.finish_reason:
                        yield self._event([self._choice(index, part, "delta", shown)])
            if self.wanted.with_usage:
                yield self._event([], usage=self._usage())
            yield "data: [DONE]\n\n"
        except (SpecjaxError, RuntimeError) as error:
            yield f"data: {json.dumps({'error': {'message': str(error)}})}\n\n"
        finally:
            self.cancel()  # also when the client has gone

    def _event(self, choices: list[Any], **others: Any) -> str:
        return f"data: {json.dumps(self._head | {'choices': choices} | others)}\n\n"

    def _choice(
        self, index: int, part: Completion, key: str, shown: Completion | None = None
    ) -> dict[str, Any]:
        """Returns the part of a text that is not `shown` yet."""
        text = part.text[len(shown.text) if shown else 0 :]
        num_shown = len(shown.tokens) if shown else 0
        self._num_tokens += len(part.tokens) - num_shown
        reason = "stop" if part.finish_reason == "eos" else part.finish_reason
        choice = {"index": index, "finish_reason": reason, "logprobs": None}
        if part.logprobs is not None:
            entries = [self._logprob(record) for record in part.logprobs[num_shown:]]
            choice["logprobs"] = {"content": entries} if self.wanted.is_chat else _columns(entries)
        if not self.wanted.is_chat:
            return choice | {"text": text}
        role = {} if shown else {"role": "assistant"}
        return choice | {key: role | {"content": text}}

    def _logprob(self, record: dict[str, Any]) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            raw = self._bytes_of.get(token)
            text = self._tokenizer.decode([token]) if raw is None else raw.decode(errors="replace")
            raw = text.encode() if raw is None else raw
            if UNFINISHED in text:  # a part of a character: the vocabulary's spelling is unique
                text = self._tokenizer.convert_ids_to_tokens(token)
            return {"token": text, "logprob": logprob, "bytes": list(raw)}

        top = [entry(*other) for other in record["top_raw"]]
        return entry(record["token"], record["raw"]) | {"top_logprobs": top}

    def _usage(self) -> dict[str, int]:
        prompt = sum(map(len, self.wanted.prompts))
        names = "prompt_tokens", "completion_tokens", "total_tokens"
        return dict(zip(names, (prompt, self._num_tokens, prompt + self._num_tokens), strict=True))


def _columns(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns log-probabilities as completions have them."""
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [
            {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
            for entry in entries
        ],
    }
