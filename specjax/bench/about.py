"""What a benchmark tells of itself, so that its figures can be believed and made again."""

import json
import shlex
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import jax

from specjax.bench.measure import Request
from specjax.bench.options import BenchOptions
from specjax.hub import Target
from specjax.provenance import revision, versions
from specjax.tuned import fingerprint


def about(
    target: Target, options: BenchOptions, requests: Sequence[Request], bandwidth: float
) -> dict[str, Any]:
    """Target, device, prompts, settings, versions, and the command.

    A benchmark is gone on with only if all of it but the command and the measured `bandwidth`
    (bytes per second) is the same.
    """
    prompts = json.dumps([(request.kind, request.ids) for request in requests])
    return {
        "target": target.name,
        "fingerprint": fingerprint(target.config, target.params),
        "dtype": str(target.params["embed_tokens"]["weight"].dtype),
        "device": jax.devices()[0].device_kind,
        "bandwidth": bandwidth,
        "tasks": options.tasks,
        "num_prompts": len(requests),
        "prompts": f"{zlib.crc32(prompts.encode()):08x}",  # tells one list from another
        "methods": options.methods,
        "drafters": list(options.drafter),
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
