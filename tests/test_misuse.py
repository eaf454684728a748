"""Misuse of the Python API raises SpecjaxError, with advice, in one line.

It runs in a process without the type checks of the other tests.
"""

import subprocess
import sys

CALLS = """
import sys
import jax, jax.numpy as jnp, numpy as np
import specjax
from specjax import Prompt, Sampling, SpecjaxError

target = specjax.load(sys.argv[1], packed=False)
drafter, _ = specjax.load_drafter("plain", target)  # the fastest to compile
params, key = specjax.Params(target.params), jax.random.key(0)
prompt = specjax.encode(target.tokenizer, ["import os"])

def run(prompt=prompt, params=params, **options):
    options = {"target": target.model, "drafter": drafter, "max_new_tokens": 4} | options
    return specjax.speculative_generate(params, prompt, key, **options)

def stream(key, **options):
    options = {"target": target.model, "drafter": drafter, "max_new_tokens": 4} | options
    return specjax.stream(params, prompt, key, **options)

def text(*arguments, **options):
    return specjax.generate_text(target, *arguments, max_new_tokens=4, **options)

engine = specjax.Engine(target.model, drafter, max_new_tokens=4, eos=[2, 2])
tokens, length = prompt.tokens, prompt.length
MISUSES = {
    "encode none": lambda: specjax.encode(target.tokenizer, None),
    "encode without a tokenizer": lambda: specjax.encode(None, ["import os"]),
    "chat without a tokenizer": lambda: specjax.chat_ids(target, "import os"),
    "resume old": lambda: engine.resume(params, None, prompt, np.zeros(2, np.uint32)),
    "prefill batch": lambda: engine.prefill(params, prompt, jax.random.split(key, 2)),
    "seed text": lambda: text("import os", seed="5"),
    "rounds of a text": lambda: text("import os", rounds_per_call=8),
    "part drafter": lambda: specjax.load_drafter("hybrid", target, copy=drafter),
    "encode bytes": lambda: specjax.encode(target.tokenizer, b"ab"),
    "encode numbers": lambda: specjax.encode(target.tokenizer, [1, 2]),
    "encode surrogates": lambda: specjax.encode(target.tokenizer, ["a\\ud800"]),
    "ids nested": lambda: specjax.from_ids([[1, [2]]]),
    "ids bucket": lambda: specjax.from_ids([[1, 2]], bucket=0),
    "prompt of floats": lambda: run(Prompt(tokens.astype(jnp.float32), length)),
    "empty batch": lambda: run(Prompt(tokens[:0], length[:0])),
    "temperature text": lambda: Sampling(temperature="1"),
    "top k array": lambda: Sampling(top_k=jnp.ones((), int)),
    "integer params": lambda: run(
        params=specjax.Params(jax.tree.map(lambda leaf: leaf.astype(jnp.int32), target.params))
    ),
    "rounds below 0": lambda: run(max_rounds=-1),
    "a huge setting": lambda: specjax.load_drafter("pld", target, num_tokens=10**20),
    "huge new tokens": lambda: run(max_new_tokens=10**20),
    "new tokens true": lambda: run(max_new_tokens=True),
    "rounds float": lambda: run(max_rounds=1.5),
    "prompt text": lambda: run("import os"),
    "params of a model": lambda: run(params=target.params),
    "drafter name": lambda: run(drafter="pld"),
    "sampling dict": lambda: run(sampling={"temperature": 1.0}),
    "target loaded": lambda: run(target=target),
    "eos text": lambda: run(eos="</s>"),
    "key seed": lambda: engine.generate(params, prompt, 0),
    "key old": lambda: engine.generate(params, prompt, np.zeros(2, np.uint32)),
    "key batch": lambda: engine.generate(params, prompt, jax.random.split(key, 2)),
    "reference key": lambda: specjax.reference_generate(
        target.params, prompt, jax.random.PRNGKey(0), target=target.model
    ),
    "engine jitted": lambda: jax.jit(engine.generate)(params, Prompt(tokens[0], length), key),
    "engine eos": lambda: specjax.Engine(target.model, drafter, eos=["a"]),
    "engine target": lambda: specjax.Engine(target, drafter),
    "stream drafter": lambda: stream(key, drafter="pld"),
    "stream rounds": lambda: stream(key, rounds_per_call=0),
    "prompt of one message": lambda: text({"role": "user", "content": "a"}),
    "prompt of ids": lambda: text([5, 6]),
    "message without a role": lambda: text([{"content": "a"}, {"role": "user"}], "plain"),
    "method without params": lambda: text("import os", drafter),
    "sampling of text": lambda: text("import os", sampling={"temperature": 1.0}),
    "choices text": lambda: text("import os", choices="yes"),
    "drafter of a name": lambda: specjax.load_drafter("pld", "pocket"),
    "width float": lambda: specjax.load("pocket", padded_width=1.5),
    "stop numbers": lambda: text("import os", stop=[1]),
    "stop number": lambda: text("import os", stop=5),
    "choices once": lambda: text("import os", choices=(word for word in ("yes", "no"))),
    "regex bytes": lambda: text("import os", regex=b"yes"),
}
for name, misuse in MISUSES.items():
    try:
        misuse()
        print(name, "passes")
    except SpecjaxError as error:
        if "\\n" in str(error):
            print(name, "has several lines")
    except Exception as error:
        print(name, type(error).__name__, str(error)[:200])
run(max_rounds=10**20)
hash(engine)
print("done")
"""


def test_misuse_raises_the_error_of_specjax(tiny):
    done = subprocess.run([sys.executable, "-c", CALLS, tiny], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
