"""Measures the host memory that loading a sharded checkpoint onto a mesh takes.

    python -m benchmarks.loading FOLDER [--mesh data=2,model=4]

The devices are parts of the CPU, so what they hold is host memory too. If FOLDER does not exist,
a random Llama of 1.2 GB in 8 files is written there first.
"""

import json
import multiprocessing
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from safetensors.numpy import load_file, save_file

from benchmarks.harness import Shape, main, option, random_params, table
from specjax import Transformer
from specjax.core.errors import SpecjaxError
from specjax.models.families import read_config
from specjax.models.io.huggingface import load_transformer, save_transformer
from specjax.models.sharding import Placement, make_mesh

SHAPE = Shape(32000, 2048, 5632, 11, 32, "bfloat16", 4)
NUM_FILES, NUM_DEVICES = 8, 8
HEADER = ("mesh", "largest file MB", "devices hold MB", "peak MB", "at most MB")


@dataclass(frozen=True)
class LoadingOptions:
    """The options of this benchmark."""

    folder: Path = option("a checkpoint in Hugging Face format, or where to write one", kind=Path)
    mesh: str = option("how the devices share it", "data=2,model=4")


class HostMemory(NamedTuple):
    """The memory of one loading, in bytes."""

    largest_file: int
    held: int  # by all devices together
    peak: int  # of the process, above what it held before


def measure(folder: Path, mesh: str) -> HostMemory:
    """Loads a checkpoint and asks the system for the peak of this process."""
    config = read_config(folder)
    placement = Placement(make_mesh(mesh), config.head_dim)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = load_transformer(folder, config, "bfloat16", placement=placement)
    shards = [shard.data for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    jax.block_until_ready(shards)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    largest = max(path.stat().st_size for path in folder.glob("*.safetensors"))
    return HostMemory(largest, sum(shard.nbytes for shard in shards), 1024 * peak)


def write(folder: Path) -> None:
    """Writes a random checkpoint whose tensors are spread over the files."""
    config = SHAPE.config(2048)
    params = random_params(Transformer(config), SHAPE.dtype)
    save_transformer(folder, config, params, SHAPE.dtype)
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = {name: f"model-{at % NUM_FILES}.safetensors" for at, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, folder / file)
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def run(options: LoadingOptions) -> None:
    """Writes the checkpoint where there is none, loads it, and prints the table."""
    folder = options.folder
    if not folder.exists():  # in a process of its own, whose memory is gone when it ends
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder,))
        writer.start()
        writer.join()
        if writer.exitcode:
            raise SpecjaxError(f"{folder} could not be written; see above, and delete it")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    found = measure(folder, options.mesh)
    allowed = found.held + 1.3 * found.largest_file
    sizes = (found.largest_file, found.held, found.peak, allowed)
    print(table(HEADER, [[options.mesh, *(f"{size / 1e6:.0f}" for size in sizes)]]))
    print("at most: what the devices hold, and 1.3 times the largest file")


if __name__ == "__main__":
    main(run, LoadingOptions, __doc__)
