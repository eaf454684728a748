"""Hostile clients of the endpoint get an answer in time, and the log stays free of tracebacks."""

import http.client
import json
import logging
import socket
import time
from collections import Counter
from random import Random

import pytest

import specjax
from specjax.serve import app as app_module
from specjax.serve.app import MAX_BODY_BYTES, make_app
from specjax.serve.worker import Worker
from tests.cli.target import write_target
from tests.serve.test_serve import LIMIT, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
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
def port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("targets") / "tiny"
    write_target(folder)
    target = specjax.load(folder)
    worker = Worker(target, specjax.load_drafter("pld", target), LIMIT, batch=2)
    with serving(make_app(worker)) as url:
        yield int(url.split(":")[2].split("/")[0])


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def post(port: int, path: str, body: bytes, kind: str = "application/json") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, body, {"Content-Type": kind})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def raw(port: int, sent: bytes, wait: float = 30) -> int | None:
    """Sends bytes and returns the status of the answer, or None for a closed connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except ConnectionError:
            return None
    return int(answer.split()[1]) if answer else None


def request(body: bytes, path: str = COMPLETION) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


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


def healthy(port: int) -> bool:
    return post(port, COMPLETION, b'{"prompt": "ab", "max_tokens": 1, "temperature": 0}') == 200


@pytest.mark.slow
def test_hostile_requests_get_a_status_in_time(port, log, capsys):
    assert healthy(port)
    counts, slowest = Counter(), 0.0
    for path, body in bodies():
        started = time.monotonic()
        status = post(port, path, body)
        if status != 200:  # others may compile
            slowest = max(slowest, time.monotonic() - started)
        counts[f"body {status}"] += 1
        assert status in (200, 400), (path, body[:200], status)
    for head in HEADS:
        status = raw(port, head)
        counts[f"head {status}"] += 1
        assert status in (None, 400, 404, 405, 415, 200), (head[:100], status)
    for path in PATHS:
        status = raw(port, f"DELETE {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        counts[f"path {status}"] += 1
        assert status in (307, 404, 405), (path, status)
    for kind in ("text/plain", "", "multipart/form-data", "application/x-www-form-urlencoded"):
        assert post(port, COMPLETION, b"{}", kind) == 415
        counts["type 415"] += 1
    assert post(port, COMPLETION, b" " * (MAX_BODY_BYTES + 1)) == 413
    counts["size 413"] += 1
    assert healthy(port)
    assert slowest < 30
    assert not [r for r in log.records if r.exc_info], log.text
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    with capsys.disabled():
        print(sum(counts.values()), dict(sorted(counts.items())), f"slowest {slowest:.1f} s")


def test_clients_that_hang_up_or_dawdle_hold_up_no_one(port, log, capsys, monkeypatch):
    body = json.dumps({"prompt": "ab", "max_tokens": LIMIT, "temperature": 0, "stream": True})
    whole = request(body.encode())
    for cut in (1, 20, len(whole) - 1, *[len(whole)] * 8):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(whole[:cut])
            if cut == len(whole):
                connection.recv(1)
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.5)
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(whole[:-1])
        assert connection.recv(4096).startswith(b"HTTP/1.1 408 ")
        assert healthy(port)
        while connection.recv(4096):  # until the server closes it
            pass
    idle = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(50)]
    for number, connection in enumerate(idle):
        connection.sendall(whole[: number + 1])
    assert healthy(port)
    for connection in idle:
        connection.close()
    assert healthy(port)
    assert not [r for r in log.records if r.exc_info], log.text
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
