"""Formats chats as text and tokens, by the tokenizer's chat template or, without one, Vicuna's."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from os.path import isfile
from typing import Any

from specjax.core.errors import SpecjaxError, check_characters, warn_once
from specjax.core.files import expand_user, read_text
from specjax.core.interrupts import bounded

MAX_SECONDS = 10.0  # to format one chat; an endless template is stopped
MAX_GROWTH = 2**29  # bytes that formatting one chat may allocate
MAX_CHARACTERS = 2**23  # more than models have positions

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
VICUNA = SYSTEM + " USER: {message} ASSISTANT:"  # version 1.1, as Vicuna 1.3 and 1.5 use it
TEMPLATES = {  # in Jinja, by the names that `with_template` takes
    "vicuna": (
        "{% if messages[0].role in ('system', 'developer') %}{{ messages[0].content }}{% else %}"
        + SYSTEM
        + "{% endif %} {% for message in messages %}"
        "{% if message.role == 'user' %}USER: {{ message.content }} "
        "{% elif message.role == 'assistant' %}ASSISTANT: {{ message.content }}{{ eos_token }}"
        "{% elif not loop.first or message.role not in ('system', 'developer') %}"
        "{{ raise_exception('it takes no ' ~ message.role ~ ' message here') }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
}

FIXED_DAY = "01 Jan 2025"  # so that a resumed run sees the same tokens

Message = dict[str, str]  # "role": system, user or assistant, and "content"


def check_tokenizer(tokenizer: Any) -> None:
    """Raises SpecjaxError unless the tokenizer can be called; a target without one has None."""
    if not callable(tokenizer):
        raise SpecjaxError(
            f"the tokenizer is of type {type(tokenizer).__name__}; pass target.tokenizer, or ids "
            "if the target has none"
        )


def chat_ids(
    tokenizer: Any, chat: str | Sequence[Message], today: str | None = None
) -> tuple[int, ...]:
    """Returns the tokens of a chat, up to where the assistant's next answer begins.

    `chat` is a user's message, or all messages so far, ending with the user's. BOS comes from the
    template or else from the tokenizer, never from both. `today` is the date that some templates
    insert, by default today's.
    """
    messages = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    is_list = isinstance(messages, (list, tuple))
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise SpecjaxError(
            "a chat is a text, or a list of messages such as {'role': 'user', 'content': 'Hi.'}"
        )
    check_tokenizer(tokenizer)
    text = chat_text(tokenizer, messages, is_answer_next=True, today=today)
    check_characters("the chat", text)
    return tuple(encode_chat(tokenizer, text)["input_ids"])


def chat_text(
    tokenizer: Any,
    messages: Sequence[Message],
    is_answer_next: bool = False,
    today: str | None = None,
) -> str:
    """Formats messages with the tokenizer's chat template, or Vicuna's.

    With `is_answer_next` the text ends where the assistant's next answer begins. `today` is the
    date that some templates insert, by default today's.
    """
    template = tokenizer.chat_template
    if not template:
        template = TEMPLATES["vicuna"]
        warn_once(
            f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template, so "
            "chats use Vicuna's; if the model expects another, add its chat_template to "
            "tokenizer_config.json"
        )
    if isinstance(template, dict):  # of several by name
        template = template.get("default")
    if today is not None and template:
        template = f"{{% macro strftime_now(form) %}}{today}{{% endmacro %}}{template}"
    try:
        with bounded(MAX_SECONDS, MAX_GROWTH):  # `transformers` runs templates in Jinja's sandbox
            text = tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=is_answer_next,
                chat_template=template,
            )
        if len(text) > MAX_CHARACTERS:
            raise SpecjaxError(f"it writes {len(text)} characters")
        return text
    except Exception as error:  # Jinja's errors, and whatever the template computes wrongly
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = "it needs too much memory" if isinstance(error, MemoryError) else reason
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise SpecjaxError(
            f"the tokenizer's chat template fails on messages with roles {roles} ({reason}); drop "
            "the messages, or give the tokenizer another template"
        ) from error


def read_template(name: str) -> str:
    """Returns a chat template of `TEMPLATES`, or one from a file."""
    path = expand_user(name)
    if name not in TEMPLATES and not isfile(path):  # False for a whole template too
        raise SpecjaxError(
            f"--chat-template {name!r} is neither a file nor one of {', '.join(TEMPLATES)}"
        )
    return TEMPLATES.get(name) or read_text(path)


def with_template(tokenizer: Any, name: str) -> Any:
    """Returns a copy of a tokenizer with another chat template; see `read_template`."""
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = read_template(name)
    return tokenizer


def encode_chat(tokenizer: Any, text: str, **options: Any) -> Any:
    """Tokenizes a text that `chat_text` returned, with at most one BOS.

    `options` are passed to the tokenizer, for example `return_offsets_mapping=True`.
    """
    has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer(text, add_special_tokens=not has_bos, **options)


def opening_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Returns the tokens of a plain text, starting with BOS even if the tokenizer adds none."""
    ids = tuple(tokenizer(text, verbose=False)["input_ids"])
    has_bos = tokenizer.bos_token_id in (None, *ids[:1])
    return ids if has_bos else (tokenizer.bos_token_id, *ids)
