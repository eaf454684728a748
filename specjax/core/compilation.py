"""`jax.jit` for loops: on a GPU they become one CUDA graph, and types are always JAX's default."""

import re
from collections.abc import Callable
from functools import cached_property, update_wrapper, wraps
from types import MethodType
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

# XLA's defaults and WHILE: the GPU itself then evaluates a loop's condition (CUDA 12.3 or later),
# and the host launches a whole generation once.
COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    )
}
# Without Triton, XLA concatenates the weights of q, k and v anew in every round to multiply once.
BEFORE_AMPERE = {"xla_gpu_dot_merger_threshold_mb": 0}


def is_before_ampere() -> bool:
    """Whether the default device is an NVIDIA GPU older than Ampere."""
    capability = getattr(jax.devices()[0], "compute_capability", None)  # AMD's are names
    return re.match(r"[1-7]\.", str(capability)) is not None


class jit_loops:
    """Compiles a function as `jax.jit` does, with `COMPILER_OPTIONS` where the device is a GPU.

    JAX takes such options for whole programs only, so inside another `jit` this is `jax.jit`.
    """

    def __init__(self, function: Callable, **settings: Any):
        self.function, self.settings = function, settings
        self._nested = jax.jit(function, **settings)
        update_wrapper(self, function)

    @cached_property
    def _alone(self) -> Any:
        options: dict[str, Any] = {}
        if jax.default_backend() == "gpu":
            options = COMPILER_OPTIONS | (BEFORE_AMPERE if is_before_ampere() else {})
        return jax.jit(self.function, compiler_options=options, **self.settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_nested = isinstance(jnp.zeros(()), Tracer)
        return with_default_types(self._nested if is_nested else self._alone)(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python and JAX probe for optional methods
            raise AttributeError(name)
        return with_default_types(getattr(self._alone, name))


def with_default_types(function: Callable) -> Callable:
    """Traces as if the user had switched on neither x64 nor strict promotion."""

    @wraps(function, assigned=("__doc__",))
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return call
