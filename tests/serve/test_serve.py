"""`specjax serve` answers OpenAI's client, with the texts of the command line."""

import asyncio
import http.client
import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import openai
import pytest
import uvicorn
from starlette.testclient import TestClient

import specjax
from specjax.cli import main
from specjax.core.errors import SpecjaxError
from specjax.decoding import engine
from specjax.models.config import Rope
from specjax.serve import chats as chats_module
from specjax.serve.app import MAX_BODY_BYTES, _answer, make_app
from specjax.serve.chats import START_SECONDS, ChatFormatter
from specjax.serve.requests import read_request
from specjax.serve.worker import Busy, Job, Worker
from tests.cli.target import CONFIG, write_target

LIMIT = 24
PROMPT = "def longest_run(values):\n"
KEY = "a key"
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}, "is_sure": {"type": "boolean"}},
    "required": ["verdict", "is_sure"],
}


def schema_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}}


@pytest.fixture(scope="module")
def worker(tiny):
    target = specjax.load(tiny, padded_width=16)  # one width of a pass compiles faster
    return Worker(target, specjax.load_drafter("pld", target), LIMIT, max_waiting=16)


@contextmanager
def serving(app):
    """Runs the application at a free port, and yields the address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url(worker):
    with serving(make_app(worker, KEY)) as url:
        yield url
    assert not worker._thread.is_alive()


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)


@pytest.fixture
def complete(client):
    def create(prompt=PROMPT, **options):
        options = {"max_tokens": LIMIT, "temperature": 0.8, "seed": 5} | options
        return client.completions.create(model="tiny", prompt=prompt, **options)

    return create


def test_texts_are_those_of_the_command_line(complete, tiny, capsys):
    options = ["--target", str(tiny), "--max-new-tokens", str(LIMIT), "--temperature", "0.8"]
    assert main(["generate", PROMPT, "--json", *options, "--seed", "5"]) == 0
    expected = json.loads(capsys.readouterr().out)
    answer = complete()
    assert answer.choices[0].text == expected["text"] != ""
    assert answer.choices[0].finish_reason == {"eos": "stop"}.get(
        expected["finish_reason"], expected["finish_reason"]
    )
    assert answer.usage.completion_tokens == len(expected["tokens"])
    assert complete(seed=6).choices[0].text != expected["text"]


def test_a_stream_has_the_same_text_in_parts(complete):
    events = list(complete(stream=True, stream_options={"include_usage": True}))
    parts = [event.choices[0] for event in events[:-1]]
    whole = complete()
    assert "".join(part.text for part in parts) == whole.choices[0].text
    assert len(parts) > 2
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1].finish_reason == whole.choices[0].finish_reason
    assert events[-1].usage == whole.usage


def test_nothing_after_a_stop_text_is_shown(complete):
    whole = complete().choices[0].text
    stop = whole[len(whole) // 2 :][:3]
    answer, *events = complete(stop=stop), *complete(stop=[stop, "never"], stream=True)
    for choices in (answer.choices, [event.choices[0] for event in events]):
        assert "".join(choice.text for choice in choices) == whole[: whole.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_several_prompts_are_answered_in_their_order(complete):
    prompts = [PROMPT, "import os\n", PROMPT]
    texts = [choice.text for choice in complete(prompts).choices]
    assert texts == [complete(prompt).choices[0].text for prompt in prompts]
    parts = [event.choices[0] for event in complete(prompts, stream=True)]
    for index, text in enumerate(texts):
        assert "".join(part.text for part in parts if part.index == index) == text


def test_log_probabilities_belong_to_the_tokens(complete, client):
    greedy = {"temperature": 0, "max_tokens": 5}
    logprobs = complete(logprobs=2, **greedy).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob == max(top.values()) == top[token] < 0
    events = complete(logprobs=2, stream=True, **greedy)
    streamed = [e.choices[0].logprobs.token_logprobs for e in events]
    assert [x for part in streamed for x in part] == logprobs.token_logprobs
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Rename it."}],
        logprobs=True,
        top_logprobs=2,
        **greedy,
    )
    entries = chat.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 5
    text = b"".join(bytes(entry.bytes) for entry in entries)
    assert text.decode(errors="replace") == chat.choices[0].message.content


def test_a_chat_follows_a_json_schema(client):
    answer, events = (
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "Are you sure?"}]}],
            response_format=schema_form(SCHEMA),
            stream=is_stream,
            temperature=1,
            seed=5,
        )
        for is_stream in (False, True)
    )
    [choice], deltas = answer.choices, [event.choices[0] for event in events]
    text = choice.message.content
    assert deltas[0].delta.role == "assistant"
    assert "".join(each.delta.content for each in deltas) == text
    assert deltas[-1].finish_reason == choice.finish_reason
    if choice.finish_reason == "length":  # 24 tokens of a small vocabulary may not be enough
        assert text.startswith("{")
        return
    jsonschema.validate(json.loads(text), SCHEMA)


def test_eight_clients_at_once_get_their_own_texts(complete):
    seeds = [*range(8)]
    alone = [complete(seed=seed).choices[0].text for seed in seeds]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda seed: complete(seed=seed).choices[0].text, seeds))
    assert together == alone
    assert len(set(alone)) > 4


def whole_request(**changes) -> bytes:
    body = {"prompt": PROMPT, "max_tokens": LIMIT, "temperature": 0.8, "seed": 5} | changes
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def connect(url: str) -> socket.socket:
    port = int(url.split(":")[2].split("/")[0])
    return socket.create_connection(("127.0.0.1", port), timeout=30)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_hangs_up_frees_the_device(url, complete, is_stream, monkeypatch):
    complete()
    steps, put = [], Job.put

    def slow_put(self, part):
        steps.append(self.is_cancelled)
        time.sleep(0.2)
        put(self, part)

    monkeypatch.setattr(Job, "put", slow_put)
    with connect(url) as connection:
        connection.sendall(whole_request(stream=is_stream))
        while not steps:
            time.sleep(0.01)
    time.sleep(2)  # longer than the whole text takes
    num_steps = len(steps)
    assert complete(max_tokens=2).usage.completion_tokens == 2
    assert num_steps < 5  # of the six that the whole text takes


CHANGES = {
    "prompt": (None, "", [1, -1], [1, 10**9], ["ab", 3], "\ud800", ["ab"] * 100, "ab " * 999),
    "max_tokens": (0, LIMIT + 1, True, 1.5),
    "temperature": (-1, "hot"),
    "top_p": (0,),
    "seed": (-1, 2**40),
    "stop": ([""], 3, ["a"] * 17),
    "n": (2,),
    "echo": (True,),
    "logprobs": (21,),
    "stream": ("yes",),
    "logit_bias": ({"a": 1}, {"999999": 1}, {"1": 10**400}, {"1": math.nan}, {"1": 1e39}),
    "response_format": (
        schema_form({"type": "array", "minItems": "3"}),
        schema_form({"properties": {"\ud800": 3}, "type": "object"}),
        {"type": "xml"},
        {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
    ),
}
RUBBISH = [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "a", "temperature": NaN}']
RUBBISH += [
    json.dumps({"prompt": "ab", "max_tokens": 2, name: value}).encode()
    for name, values in CHANGES.items()
    for value in values
]
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}


def send(url: str, method: str, path: str, body: bytes = b"", headers=HEADERS):
    """Returns the status and the body of an answer."""
    host, _ = url.removeprefix("http://").split("/")
    connection = http.client.HTTPConnection(host, timeout=300)
    connection.request(method, f"/v1/{path}", body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def test_rubbish_gets_a_message_and_nothing_breaks(url):
    for body in RUBBISH:
        status, text = send(url, "POST", "completions", body)
        assert status == 400 and json.loads(text)["error"]["message"], (body[:100], text)


@pytest.fixture(scope="module")
def chats(worker):
    tokenizer = deepcopy(worker.target.tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].content == 'large' %}{{ 'x' * 3000000000 }}{% endif %}"
        "{% if messages[0].content == 'long' %}{% for i in range(99999) %}"
        "{% for i in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    formatter = ChatFormatter(tokenizer)
    yield formatter
    formatter.stop()


def test_a_template_cannot_take_the_memory_of_the_server(chats, worker, monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda *limit: limits.append(limit))
    with pytest.raises(SpecjaxError, match="it needs too much memory"):
        chats.ids([{"role": "user", "content": "large"}])
    hi = chats.ids([{"role": "user", "content": "hi"}])
    assert hi == tuple(worker.target.tokenizer("hi")["input_ids"])
    assert not limits


def test_a_process_that_formats_chats_is_replaced(chats, monkeypatch):
    hi = [{"role": "user", "content": "hi"}]
    ids, process = chats.ids(hi), chats._process
    process.kill()
    process.join()
    with pytest.raises(SpecjaxError, match="crashed or took too long; try again"):
        chats.ids(hi)
    assert chats.ids(hi) == ids
    monkeypatch.setattr(chats_module, "MAX_SECONDS", -START_SECONDS)
    with pytest.raises(SpecjaxError, match="crashed or took too long; try again"):
        chats.ids([{"role": "user", "content": "long"}])


def test_without_a_key_only_names_of_this_machine_are_answered(worker):
    def status(app, host):
        return TestClient(app).get("/v1/models", headers={"Host": host}).status_code

    app = make_app(worker, host="127.0.0.2")
    hosts = "localhost:8000", "127.0.0.1", "[::1]:8000", "127.0.0.2:1"
    assert [status(app, host) for host in hosts] == [200] * 4
    assert status(app, "evil.com") == 400
    assert status(make_app(worker, KEY), "evil.com") == 401


def test_a_client_that_has_gone_is_noticed_beside_the_first_part():
    class Gone:
        async def receive(self):
            return {"type": "http.disconnect"}

    class Ready:
        wanted = SimpleNamespace(is_stream=True)
        is_cancelled = False

        async def start(self):
            return "a part"

        def cancel(self):
            self.is_cancelled = True

        async def events(self, first):
            yield first

    ready = Ready()
    assert asyncio.run(_answer(Gone(), ready)).status_code == 499
    assert ready.is_cancelled


def test_memory_is_checked_when_a_text_begins(complete, monkeypatch):
    checked_in, check = [], engine.check_memory

    def noted(*request):
        checked_in.append(threading.current_thread().name)
        check(*request)

    monkeypatch.setattr(engine, "check_memory", noted)
    complete(max_tokens=1)
    assert checked_in == ["specjax"]


def test_a_text_without_a_limit_takes_the_room_that_longrope_leaves(worker, monkeypatch):
    rope = Rope("longrope", original_max_position_embeddings=20)
    target = replace(worker.target, config=replace(worker.target.config, rope=rope))
    monkeypatch.setattr(worker, "target", target)
    monkeypatch.setattr(Worker, "_run", lambda self, job: None)
    request = read_request(json.dumps({"prompt": [5] * 11}).encode(), False, target, tuple)

    async def limit():
        [job] = worker.submit(request)
        job.cancel()
        return job.max_tokens

    assert asyncio.run(limit()) == 20 - 11


def test_cancelled_and_running_texts_leave_room_in_the_queue(worker, monkeypatch):
    may_end, has_begun = threading.Event(), threading.Event()

    def run(self, job):
        has_begun.set()
        may_end.wait()

    monkeypatch.setattr(Worker, "_run", run)
    body = json.dumps({"prompt": ["ab"] * 16}).encode()
    many = read_request(body, False, worker.target, tuple)
    one = replace(many, prompts=many.prompts[:1])

    async def fill():
        worker.submit(one)
        assert await asyncio.to_thread(has_begun.wait, 60)
        first = worker.submit(many)
        with pytest.raises(Busy):
            worker.submit(one)
        for job in first:
            job.cancel()
        for job in worker.submit(many):
            job.cancel()

    try:
        asyncio.run(fill())
    finally:
        may_end.set()


def test_what_has_no_key_or_another_type_or_no_end_is_turned_away(url):
    body = b'{"prompt": "ab"}'
    without, wrong = {}, {"Authorization": "Bearer é".encode()}
    for headers in (without, wrong):
        headers |= {"Content-Type": "application/json"}
        assert send(url, "POST", "completions", body, headers)[0] == 401
        assert send(url, "GET", "models", headers=headers)[0] == 401
    assert send(url, "GET", "models", headers={"Authorization": f"bearer {KEY}"})[0] == 200
    assert send(url, "GET", "models", headers={"Authorization": KEY})[0] == 401
    text = HEADERS | {"Content-Type": "text/plain"}
    assert send(url, "POST", "completions", body, text)[0] == 415
    assert send(url, "POST", "completions", b" " * (MAX_BODY_BYTES + 1))[0] == 413


def test_a_full_queue_turns_requests_away(complete, worker, monkeypatch):
    def submit(request):
        raise Busy

    monkeypatch.setattr(worker, "submit", submit)
    with pytest.raises(openai.RateLimitError):
        complete("ab")


def test_more_prompts_than_may_wait_are_an_error(complete):
    with pytest.raises(openai.BadRequestError, match="limit, 16"):
        complete(["ab"] * 17)
    assert complete(max_tokens=1).choices


def test_others_need_a_key(tiny, capsys, monkeypatch):
    monkeypatch.delenv("SPECJAX_API_KEY", raising=False)
    assert main(["serve", "--target", str(tiny), "--host", "0.0.0.0"]) == 2
    assert "SPECJAX_API_KEY" in capsys.readouterr().err


@pytest.mark.slow
def test_a_signal_ends_the_server_after_the_texts_it_is_generating(tmp_path):
    write_target(tmp_path / "target", replace(CONFIG, num_hidden_layers=1))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specjax", "serve", "--target", str(tmp_path / "target")]
    process = subprocess.Popen([*command, "--port", str(port)], env=os.environ.copy())
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        for _ in range(600):
            try:
                assert [model.id for model in client.models.list()] == [str(tmp_path / "target")]
                break
            except openai.APIConnectionError:
                time.sleep(0.2)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(
                client.completions.create, model="tiny", prompt=PROMPT, max_tokens=LIMIT
            )
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            assert answer.result().choices[0].finish_reason
        assert process.wait(60) == 0
    finally:
        process.kill()
