"""Downloads by the hub's own client, from a server on this machine that plays the hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.loading.hub_server import Hub, serve
from tests.loading.test_targets import saved  # noqa: F401

NAME = "someone/tiny-llama"
CLIENT = """
import json, sys
from specjax.core.errors import SpecjaxError
from specjax.loading import hub, targets

for line in sys.stdin:
    name, revision, loads = json.loads(line)
    try:
        if loads:
            params = targets.load(name, dtype="float32", revision=revision, packed=False).params
            print(json.dumps({"norm": params["norm"]["weight"].tolist()}), flush=True)
        else:
            print(json.dumps({"folder": str(hub.target_folder(name, revision, False))}), flush=True)
    except SpecjaxError as error:
        print(json.dumps({"error": str(error)}), flush=True)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A server and a process that downloads from it."""
    server = serve(Hub())
    address = f"http://127.0.0.1:{server.server_address[1]}"
    home = str(tmp_path_factory.mktemp("hub"))
    settings = {"HF_ENDPOINT": address, "HF_HOME": home, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "none"}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    yield server, client
    client.kill()
    client.wait()
    server.shutdown()


@pytest.fixture
def hub(running, saved) -> Hub:  # noqa: F811
    files = {path.name: path.read_bytes() for path in saved.iterdir()}
    running[0].hub = Hub({NAME: {"main": files}})
    return running[0].hub


@pytest.fixture
def download(running):
    def download(name: str, revision: str | None = None, loads: bool = False) -> dict:
        print(json.dumps([name, revision, loads]), file=running[1].stdin, flush=True)
        answer = json.loads(running[1].stdout.readline())
        assert "\n" not in answer.get("error", "")
        return answer

    return download


def test_a_model_is_loaded_through_redirects_and_then_from_the_cache(hub, download, saved):  # noqa: F811
    hub.repositories[NAME]["main"]["README.md"] = b"not needed"
    first = download(NAME, loads=True)
    assert len(first["norm"]) == 32
    assert any(path.startswith("/cdn/") for path in hub.requests)
    assert not any("README" in path for path in hub.requests)
    hub.requests.clear()
    assert download(NAME, loads=True) == first
    assert not any("resolve" in path for path in hub.requests), "it is cached"


def test_revisions_differ(hub, download):
    config = json.loads(hub.repositories[NAME]["main"]["config.json"])
    files = hub.repositories[NAME]["main"]
    changed = json.dumps(config | {"max_position_embeddings": 99}).encode()
    hub.repositories["someone/two"] = {"main": files, "v2": files | {"config.json": changed}}
    folders = [download("someone/two", revision)["folder"] for revision in (None, "v2")]
    configs = [json.loads(Path(folder, "config.json").read_bytes()) for folder in folders]
    lengths = [each["max_position_embeddings"] for each in configs]
    assert lengths == [config["max_position_embeddings"], 99]
    assert "has no revision 'v9'; see " in download("someone/two", "v9")["error"]


def test_what_is_missing_or_gated_is_named(hub, download):
    assert "neither a folder nor a public repository" in download("someone/else")["error"]
    hub.repositories["someone/gated"] = hub.repositories[NAME]
    hub.gated.add("someone/gated")
    assert "is gated; request access at" in download("someone/gated")["error"]


def test_a_busy_hub_and_a_cut_connection_are_named_and_the_next_try_downloads(hub, download):
    files, name = hub.repositories[NAME]["main"], "someone/busy"
    weights = np.random.default_rng(0).bytes(2**20)  # which no other repository has
    hub.repositories[name] = {"main": files | {"model.safetensors": weights}}
    hub.num_busy = 1
    error = download(name)["error"]
    assert error.startswith(f"{name} could not be downloaded (") and "503 Service" in error
    hub.num_cut = 20
    assert download(name)["error"].startswith(f"{name} could not be downloaded (")
    hub.num_cut = 0
    folder = download(name)["folder"]
    assert Path(folder, "model.safetensors").read_bytes() == weights
