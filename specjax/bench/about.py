"""What a benchmark tells of itself, so that its figures can be believed and made again."""

import json
import shlex
import sys
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from specjax.bench.contestants import OwnMethod, make_contestants
from specjax.bench.measure import Request
from specjax.bench.options import BenchOptions, temperatures_in
from specjax.bench.results import Stage
from specjax.core.provenance import machine, revision, versions
from specjax.hub import LoadedTarget
from specjax.models.fingerprint import fingerprint


def about(
    target: LoadedTarget, options: BenchOptions, requests: Sequence[Request]
) -> dict[str, Any]:
    """Target, device, prompts, methods, settings, versions, and the command.

    A benchmark is gone on with only if all of it but the command is the same.

    Raises:
        SpecjaxError: for a method that cannot be had for this target.
    """
    stage = Stage(temperatures_in(options.temperature)[0], 1)
    made = make_contestants(target, replace(options, peers=""), requests, stage)
    own = [each for each in made if isinstance(each, OwnMethod)]
    prompts = json.dumps([(request.kind, request.ids) for request in requests])
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.config, target.params),
        "dtype": str(target.dtype),
        "device": jax.devices()[0].device_kind,
        "machine": machine(),
        "tasks": options.tasks,
        "num_prompts": len(requests),
        "prompts": f"{zlib.crc32(prompts.encode()):08x}",  # tells one list from another
        "padded_length": own[0].padded_length,
        "methods": {each.name: each.settings for each in own},
        "peers": options.peers,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "batch": options.batch,
        "verification": options.verification,
        "runs": options.runs,
        "seed": options.seed,
        "versions": versions(),
        "revision": revision(),
        "command": shlex.join(["specjax", *sys.argv[1:]]),
    }
