"""Meshes of several devices, in separate processes: see `tests.on_mesh`."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def start(num_devices: int, *arguments: str) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.on_mesh", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check(*arguments: str) -> None:
    process = start(8, *arguments)
    _, error = process.communicate()
    assert process.returncode == 0, error


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of a run of two processes, of which one was killed, and the other's last words."""
    folder = tmp_path_factory.mktemp("mesh")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    both = [start(4, "killed", str(folder), f"{address},2,{rank}") for rank in range(2)]
    both[1].wait()
    _, error = both[0].communicate(timeout=600)
    return folder, both[0].returncode, error.splitlines()[-1]


@pytest.mark.slow
def test_a_lost_process_ends_the_others_with_one_line(killed):
    _, code, last_line = killed
    assert code == 2
    assert last_line.startswith("specjax: this or another process failed")
    assert last_line.endswith("start all again with --resume")


def test_a_mesh_decodes_as_one_device_does():
    check("decode", "data=2,model=4", "pld")


@pytest.mark.slow
def test_other_meshes_load_decode_and_train_as_one_device_does(killed, tmp_path):
    decode = "decode", "data=8;data=2,model=4", "eagle2", "then", "decode", "model=8", "medusa"
    check("load", str(tmp_path), "then", *decode, "then", "train", str(killed[0]))
