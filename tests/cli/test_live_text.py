"""From text to tokens and back."""

import io

import numpy as np
import pytest
from rich.console import Console

from specjax.cli.live_text import DRAFTED, LiveText
from specjax.core.chat import VICUNA, chat_ids
from specjax.core.errors import warn_once
from specjax.core.text import EndingText, decode
from specjax.decoding.state import Generation


@pytest.mark.parametrize("template", ["{{ bos_token }}", "", None])
def test_chat_has_one_bos_whichever_template_it_uses(tiny_tokenizer, template, capsys):
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = type(tiny_tokenizer._tokenizer).from_str(tiny_tokenizer._tokenizer.to_str())
    backend.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    adds_bos = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|begin|>")
    if template is not None:
        adds_bos.chat_template = template + "{{ messages[0]['content'] }}"
    warn_once.cache_clear()
    ids = chat_ids(adds_bos, "value")
    assert chat_ids(adds_bos, "value") == ids
    assert capsys.readouterr().err.count("so chats use Vicuna's") == (template is None)
    if template is None:
        assert list(ids) == adds_bos(VICUNA.format(message="value"))["input_ids"]
    assert ids[0] == 0
    assert ids.count(0) == 1


def test_drafted_tokens_are_coloured_and_control_codes_shown(tiny_tokenizer):
    ids = tiny_tokenizer("best\x1b[2J\n")["input_ids"]
    drafted = np.arange(len(ids)) == 0
    generations = []
    for count in (1, len(ids)):
        values = {"tokens": [ids], "from_draft": [drafted], "length": [count]}
        generations.append(object.__new__(Generation))
        for name, value in values.items():
            object.__setattr__(generations[-1], name, np.asarray(value))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", no_color=False)
    live = LiveText(EndingText(tiny_tokenizer), console)
    for generation in generations:
        live.add(generation)
    live.finish()
    assert DRAFTED == "green"
    first = decode(tiny_tokenizer, ids[:1])
    rest = "best"[len(first) :]
    assert file.getvalue() == f"\x1b[32m{first}\x1b[0m{rest}\u241b[2J\n\n"
