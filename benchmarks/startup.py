"""Measures the seconds from a command to its first token: python -m benchmarks.startup FILE.gguf

specjax starts cold, with an empty cache of compiled programs, and then warm; transformers and
llama.cpp run the same file, where `accelerate` with torch and `llama-cpp-python` are installed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tyro.conf import Positional

from benchmarks.harness import at_least_1, main, table
from specjax import SpecjaxError

TRANSFORMERS = """
import sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
file = Path(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
chat = [{"role": "user", "content": sys.argv[2]}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
model.generate(**ids, max_new_tokens=16, streamer=TextStreamer(tokenizer, skip_prompt=True))
"""
LLAMA_CPP = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, verbose=False)
chat = [{"role": "user", "content": sys.argv[2]}]
for part in model.create_chat_completion(chat, stream=True, max_tokens=16):
    print(part["choices"][0]["delta"].get("content", ""), end="", flush=True)
"""
PEERS = {"transformers": ("accelerate", TRANSFORMERS), "llama.cpp": ("llama_cpp", LLAMA_CPP)}


@dataclass(frozen=True)
class StartupOptions:
    """The options of this benchmark."""

    target: Positional[str]  # a GGUF file
    prompt: str = "Name three primary colours."
    repeats: int = 3  # runs of each, in turn


def seconds_to_first_token(command: Sequence[str], variables: Mapping[str, str]) -> float:
    """Runs a command, and returns the seconds until it prints text."""
    started = time.perf_counter()
    environment = os.environ | variables
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        while (character := process.stdout.read(1)).isspace():
            pass
        seconds = time.perf_counter() - started
        process.stdout.read()
    if not character or process.returncode:
        raise SpecjaxError(f"{' '.join(command)} failed; run it by hand to see why")
    return seconds


def run(options: StartupOptions) -> None:
    """Runs all commands in turn, and prints a table."""
    at_least_1(options, "repeats")
    if not Path(options.target).is_file():
        raise SpecjaxError(f"{options.target} is not a file; pass a GGUF file")
    generate = [sys.executable, "-m", "specjax", "generate", "--target", options.target]
    generate += ["--chat", options.prompt, "--max-new-tokens", "16"]
    commands = {
        name: [sys.executable, "-c", script, options.target, options.prompt]
        for name, (module, script) in PEERS.items()
        if find_spec(module)
    }
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repeats):
        with TemporaryDirectory() as folder:
            for name, command in {"cold": generate, "warm": generate, **commands}.items():
                taken = seconds_to_first_token(command, {"XDG_CACHE_HOME": folder})
                seconds.setdefault(name, []).append(taken)
    rows = [(name, f"{median(taken):.1f}") for name, taken in seconds.items()]
    print(table(("start", "seconds"), rows))


if __name__ == "__main__":
    main(run, StartupOptions, __doc__)
