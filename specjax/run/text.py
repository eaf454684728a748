"""Text in, text out: the short way to try a target and a method."""

from collections.abc import Sequence
from typing import Any

import jax

from specjax.core.chat import Message
from specjax.core.text import decode
from specjax.decoding.drafter import Drafter, Params
from specjax.decoding.generate import speculative_generate
from specjax.decoding.prompt import chat_ids, encode, from_ids
from specjax.decoding.sampling import Sampling
from specjax.loading.drafters import load_drafter
from specjax.loading.targets import LoadedTarget


def generate_text(
    target: LoadedTarget,
    prompt: str | Sequence[Message],
    method: str | tuple[Drafter, Any] = "pld",
    *,
    chat: bool = False,
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    seed: int = 0,
) -> str:
    """Continues a text, or answers a conversation, and returns the new text.

    Args:
        target: from `specjax.load`.
        prompt: a text to continue, used exactly as given, or the messages of a conversation, such
            as `[{"role": "user", "content": "..."}]`.
        chat: whether the text is a user's message, for the tokenizer's chat template.
        method: a name from `specjax methods`, or what `specjax.load_drafter` returned; load a head
            or a draft model once that way if you call this often.
        sampling: how tokens are drawn; by default the most likely one is taken.
        max_new_tokens: new tokens at most.
        seed: of the draws.

    Raises:
        SpecjaxError: for a target without a tokenizer, a method that this target cannot have, or a
            prompt that is empty or too long.
    """
    tokenizer = target.require_tokenizer()
    loaded = load_drafter(method, target) if isinstance(method, str) else method
    drafter, drafter_params = loaded
    if chat or not isinstance(prompt, str):
        rows = from_ids([chat_ids(tokenizer, prompt)])
    else:
        rows = encode(tokenizer, [prompt])
    generation = speculative_generate(
        Params(target.params, drafter_params),
        rows,
        jax.random.key(seed),
        target=target.model,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        eos=target.eos,
    )
    generation.check()
    return decode(tokenizer, generation.tokens[0, : generation.length[0]].tolist())
