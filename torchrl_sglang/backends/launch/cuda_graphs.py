"""CUDA graphs of a server for as many concurrent requests as training sends.

SGLang captures graphs for up to 256 requests on GPUs of 80 or 140 GB with ``tp_size``
below 4, and runs larger steps without: with 0.5B shapes on an H200 at a third of the
speed. A batch of 64 groups of 8 is 512.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchrl_sglang.backends.launch.gpus import query_gpus

UP_TO = 512
"""Number of requests with graphs in vLLM, and in SGLang from ``tp_size=4`` on."""

SGLANG = 256
"""Number of requests with graphs in SGLang below that, without an argument."""

ARGUMENT = "cuda_graph_max_bs_decode"

LEAST_MEMORY = 60 * 1024
"""Smallest GPU, in MiB, on which SGLang captures graphs for hundreds of requests."""

LEAST_HEADROOM = 10 * 1024
"""SGLang's least free memory on such a GPU for activations and graphs, in MiB."""

OTHERS = (
    "cuda_graph",
    "disable_cuda_graph",
    "disable_decode_cuda_graph",
    "speculative_algorithm",
    "enable_dp_attention",
    "moe_a2a_backend",
)
"""Prefixes of arguments in place of the default: they determine the graphs, or multiply
their memory."""


def graph_arguments(
    arguments: Mapping[str, Any], known: Collection[str], memory: int | None
) -> dict[str, int]:
    """Returns the argument for more graphs; none where SGLang's choice is kept.

    ``known`` has the names of all arguments of the server's version; ``memory`` is
    MiB of the smallest GPU; None: unknown.
    """
    if ARGUMENT not in known or memory is None or memory < LEAST_MEMORY:
        return {}
    values = (arguments[name] for name in arguments if name.startswith(OTHERS))
    if any(value is not None and value is not False for value in values):
        return {}
    # All machines of a server must capture the same graphs, and this checks only this
    # machine.
    nodes = _number(arguments.get("nnodes"), 1)
    share = _number(arguments.get("mem_fraction_static"), 0.0)
    largest = _number(arguments.get("max_running_requests"), UP_TO)
    # Also if a value is not a number, which SGLang itself reports.
    if not (nodes <= 1 and (1 - share) * memory >= LEAST_HEADROOM and largest > SGLANG):
        return {}
    return {ARGUMENT: int(min(largest, UP_TO))}


def _number(value: Any, default: float) -> float:
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


@functools.cache
def gpu_memory() -> int | None:
    """Returns MiB of this machine's smallest GPU, as SGLang reads it.

    None if nvidia-smi does not report it, or if GPUs are divided (MIG).
    """
    return least_memory(query_gpus("memory.total", "mig.mode.current"))


def least_memory(gpus: Sequence[Sequence[str]]) -> int | None:
    """Returns the least memory of undivided GPUs in MiB; None: unknown."""
    if any(divided == "Enabled" or not total.isdecimal() for total, divided in gpus):
        return None
    return min((int(total) for total, _ in gpus), default=None)
