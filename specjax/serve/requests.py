"""Reads the bodies of requests: what to continue, and how."""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specjax.core.chat import Message
from specjax.core.errors import SpecjaxError, check_whole
from specjax.core.settings import declared_fields
from specjax.data.conversations import read_messages
from specjax.decoding.prompt import encode
from specjax.decoding.sampling import Sampling
from specjax.loading.targets import LoadedTarget

# Fields that change the answer in ways that are not supported, with the values that change nothing.
UNSUPPORTED = {"n": 1, "best_of": 1, "echo": False, "suffix": "", "tools": [], "functions": []}
FILTERS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
COMPLETION_TOKENS = 16  # of a completion without max_tokens, as OpenAI's
MAX_STOPS = 16


@dataclass(frozen=True)
class TextRequest:
    """The prompts of one request, and how each is continued."""

    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    max_tokens: int | None  # None: as many as there is room for
    stop: tuple[str, ...]
    seed: int
    json_schema: Mapping[str, Any] | None
    is_chat: bool
    is_stream: bool
    with_usage: bool  # at the end of a stream


def read_request(
    body: bytes,
    is_chat: bool,
    target: LoadedTarget,
    chat_ids: Callable[[Sequence[Message]], tuple[int, ...]],
) -> TextRequest:
    """Reads a request; raises SpecjaxError that names the field if it is invalid.

    `chat_ids` returns the tokens of a chat; it is that of `ChatFormatter`.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SpecjaxError(f"the body is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise SpecjaxError("the body is not a JSON object")
    values = {name: value for name, value in values.items() if value is not None}
    for name, default in UNSUPPORTED.items():
        if values.get(name, default) != default:
            raise SpecjaxError(f"{name} {values[name]!r} is not supported; leave it out")
    stop = _field(values, "stop", (str, list), [])
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in stop):
        raise SpecjaxError(f"stop must be at most {MAX_STOPS} texts, none of them empty")
    seed = _field(values, "seed", int, secrets.randbelow(2**32))
    if not 0 <= seed < 2**32:
        raise SpecjaxError(f"seed must be at least 0 and below {2**32}, got {seed}")
    max_tokens = None
    for name in ("max_tokens", "max_completion_tokens"):
        max_tokens = _field(values, name, int, max_tokens)
        check_whole(name, 1 if max_tokens is None else max_tokens, 1)
    if is_chat:
        prompts = (chat_ids(read_messages(_field(values, "messages", list, []))),)
    else:
        prompts = _prompts(values, target)
    return TextRequest(
        prompts=prompts,
        sampling=_sampling(values, is_chat),
        max_tokens=max_tokens,
        stop=stop,
        seed=seed,
        json_schema=_schema(_field(values, "response_format", dict, {"type": "text"})),
        is_chat=is_chat,
        is_stream=_field(values, "stream", bool, False),
        with_usage=bool(_field(values, "stream_options", dict, {}).get("include_usage")),
    )


def _field(values: Mapping[str, Any], name: str, kind: Any, default: Any) -> Any:
    value = values.get(name, default)
    is_wrong = not isinstance(value, kind) or (kind is int and isinstance(value, bool))
    if name in values and is_wrong:
        raise SpecjaxError(f"{name} {str(value)[:60]!r} is of the wrong type")
    return value


def _sampling(values: Mapping[str, Any], is_chat: bool) -> Sampling:
    options: dict[str, Any] = {"temperature": 1.0}
    options |= {name: values[name] for name in FILTERS if name in values}
    if options.get("top_k") in (-1, 0):  # how others write "all"
        del options["top_k"]
    bias = _field(values, "logit_bias", dict, {})
    try:
        options["logit_bias"] = {int(token): float(number) for token, number in bias.items()}
    except (TypeError, ValueError, OverflowError):
        raise SpecjaxError("logit_bias must map token ids to numbers") from None
    if not is_chat:
        options["logprobs"] = values.get("logprobs")
    elif _field(values, "logprobs", bool, False):
        options["logprobs"] = values.get("top_logprobs", 0)
    return Sampling(**declared_fields(Sampling, options))


def _schema(form: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = form.get("json_schema")
    schema = schema.get("schema") if isinstance(schema, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise SpecjaxError(
            "response_format must have the type text, json_object, or json_schema with a "
            "json_schema.schema"
        )
    return schema


def _prompts(values: Mapping[str, Any], target: LoadedTarget) -> tuple[tuple[int, ...], ...]:
    prompt = _field(values, "prompt", (str, list), "")
    is_many = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
    prompts: Sequence[Any] = prompt if is_many else [prompt]
    if all(isinstance(prompt, str) for prompt in prompts):
        return tuple(encode(target.require_tokenizer(), list(prompts)).ids)
    return tuple(_ids(prompt, target) for prompt in prompts)


def _ids(prompt: Any, target: LoadedTarget) -> tuple[int, ...]:
    if isinstance(prompt, str):  # beside ids
        return encode(target.require_tokenizer(), [prompt]).ids[0]
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise SpecjaxError("prompt must be text, or token ids, or a list of these")
    return tuple(prompt)
