"""Hostile clients of the endpoint get an answer in time, and the log stays free of tracebacks."""

import json
import socket
import time
from collections import Counter
from contextlib import suppress
from random import Random

import pytest

import specjax
from specjax.serve import app as app_module
from specjax.serve.app import MAX_BODY_BYTES, make_app
from specjax.serve.worker import Worker
from tests.serve.test_serve import (  # noqa: F401
    LIMIT,
    client,
    complete,
    connect,
    send,
    serving,
    whole_request,
)

CHAT, COMPLETION = "chat/completions", "completions"
VALUES = (
    *(-1, 0, 1.5, 2**31, 2**63, 10**400, -(10**400), 1e308, True, "", "x", "\x1b[31m", "\ud800"),
    *([], [[]], [None], ["a" * 100_000], {}, {"a": {"b": []}}, float("nan"), float("inf")),
)
FIELDS = (
    *("prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream"),
    *("logprobs", "logit_bias", "response_format", "presence_penalty", "stream_options", "n"),
)
HEADS = (
    b"GET / HTTP/1.1\r\nHost: x y z\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\x00" * 1000,
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: \x00\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
    b"Content-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    b"Content-Type: application/json\r\n\r\nZZZ\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
    b"Connection: upgrade\r\nContent-Length: 2\r\n\r\n{}",
    b"BREW /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
)
PATHS = (
    *("/", "/v1", "/v1/models/x", "/v1/embeddings", "/v1/completions/", "/../../etc/passwd"),
    *("/%00", "/v1/%2e%2e/x", "/v1/models?" + "a=b&" * 1000, "//v1//models", "/v1/completions"),
)


@pytest.fixture(scope="module")
def url(tiny):
    """It does not draft, since every setting that is valid is compiled."""
    target = specjax.load(tiny)
    worker = Worker(target, specjax.load_drafter("plain", target), LIMIT, batch=2)
    with serving(make_app(worker)) as url:
        yield url


@pytest.fixture(autouse=True)
def _has_no_traceback(caplog, capsys):
    yield
    records = caplog.get_records("call")
    assert not [each for each in records if each.exc_info], [each.getMessage() for each in records]
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out


def post(url: str, path: str, body: bytes, kind: str = "application/json") -> int:
    return send(url, "POST", path, body, {"Content-Type": kind})[0]


def raw(url: str, sent: bytes) -> int | None:
    """Sends bytes and returns the status of the answer, or None for a closed connection."""
    with connect(url) as connection:
        try:
            connection.sendall(sent)
            with suppress(OSError):  # the server may have closed the connection by now
                connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except ConnectionError:
            return None
    return int(answer.split()[1]) if answer else None


def bodies() -> list[tuple[str, bytes]]:
    base = {"prompt": "ab", "max_tokens": 1, "temperature": 0}
    found = [
        (COMPLETION, json.dumps(base | {field: value}).encode())
        for field in FIELDS
        for value in VALUES
    ]
    chats = [{"messages": value} for value in VALUES]
    chats += [{"messages": [value]} for value in VALUES]
    chats += [{"messages": [{"role": "user", "content": value}]} for value in VALUES]
    chats += [{"messages": [{"role": value, "content": "a"}]} for value in VALUES]
    found += [(CHAT, json.dumps(chat | {"max_tokens": 1}).encode()) for chat in chats]
    whole, random = json.dumps(base).encode(), Random(0)
    for _ in range(60):
        broken = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            broken[random.randrange(len(broken))] = random.randrange(256)
        found.append((COMPLETION, bytes(broken[: random.randint(1, len(broken))])))
    found += [(path, b'{"a":' * 50_000) for path in (CHAT, COMPLETION)]
    return found


@pytest.mark.slow
def test_hostile_requests_get_a_status_in_time(url, complete, capsys):  # noqa: F811
    counts, slowest = Counter(), 0.0
    for path, body in bodies():
        started = time.monotonic()
        status = post(url, path, body)
        counts[status] += 1
        assert status in (200, 400), (path, body[:200], status)
        if status == 400:  # others may compile
            slowest = max(slowest, time.monotonic() - started)
    for head in HEADS:
        counts[status := raw(url, head)] += 1
        assert status in (None, 400, 404, 405, 415, 200), (head[:100], status)
    for path in PATHS:
        sent = f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        counts[status := raw(url, sent)] += 1
        assert status in (307, 404, 405), (path, status)
    for kind in ("text/plain", "", "multipart/form-data", "application/x-www-form-urlencoded"):
        counts[status := post(url, COMPLETION, b"{}", kind)] += 1
        assert status == 415
    assert post(url, COMPLETION, b" " * (MAX_BODY_BYTES + 1)) == 413
    assert complete(max_tokens=1).choices
    assert slowest < 30
    with capsys.disabled():
        print(1 + counts.total(), counts, f"slowest {slowest:.1f} s")


def test_clients_that_hang_up_or_dawdle_hold_up_no_one(url, complete, monkeypatch):  # noqa: F811
    whole = whole_request(stream=True)
    for cut in (1, 20, len(whole) - 1, *[len(whole)] * 8):
        with connect(url) as connection:
            connection.sendall(whole[:cut])
            if cut == len(whole):
                connection.recv(1)
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.5)
    with connect(url) as connection:
        connection.sendall(whole[:-1])
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert complete(max_tokens=1).choices
        while connection.recv(4096):  # until the server closes it
            pass
    idle = [connect(url) for _ in range(50)]
    for number, connection in enumerate(idle):
        connection.sendall(whole[: number + 1])
    assert complete(max_tokens=1).choices
    for connection in idle:
        connection.close()
    assert complete(max_tokens=1).choices
