"""`specjax.generate_text`: the texts that the command line prints."""

import pytest

import specjax
from specjax import SpecjaxError

PROMPT = "def longest_run(values):"


def test_text_and_messages_go_in_and_text_comes_out(tiny, generate):
    target = specjax.load(tiny, dtype="float32")
    loaded = specjax.load_drafter("pld", target)
    settings = {"max_new_tokens": 24, "sampling": specjax.Sampling(temperature=1.0), "seed": 3}
    options = ("--temperature", "1", "--seed", "3", "--dtype", "float32")
    continued = specjax.generate_text(target, PROMPT, "pld", **settings)
    assert continued == generate(PROMPT, *options)["text"]
    answer = specjax.generate_text(target, PROMPT, loaded, chat=True, **settings)
    assert answer == generate(PROMPT, "--chat", *options)["text"] != continued
    message = [{"role": "user", "content": PROMPT}]
    assert answer == specjax.generate_text(target, message, loaded, **settings)


def test_an_empty_prompt_is_refused(tiny):
    with pytest.raises(SpecjaxError, match="prompt 0 is empty"):
        specjax.generate_text(specjax.load(tiny, dtype="float32"), "")
