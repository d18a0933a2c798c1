"""Deterministic runs: checks of arguments, and settings of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from torchrl_sglang.errors import ConfigurationError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable of cuBLAS, which is deterministic with some of its values only."""

WORKSPACES = (":4096:8", ":16:8")
"""Those values, the faster one first."""


def check_repeatable(
    engine: Any, *, max_staleness: int, collector: Any, agent: Any
) -> None:
    """Refuses arguments of a run that do not go with ``deterministic=True``."""
    if max_staleness:
        raise ConfigurationError(
            f"deterministic=True needs max_staleness=0, got {max_staleness}: which "
            f"tokens are of which weights depends on timing otherwise."
        )
    if callable(collector):
        raise ConfigurationError(
            "deterministic=True is an argument of the collector, and collector is a "
            "function that makes one; give AsyncLLMCollector(deterministic=True) "
            "there, the servers deterministic=True in engine, and call "
            "torch.use_deterministic_algorithms(True)."
        )
    if agent is not None:
        raise ConfigurationError(
            "deterministic=True does not go with agent: an agent sends requests when "
            "it likes. Give step or tools instead, or leave deterministic out."
        )
    starts = engine is None or isinstance(engine, Mapping)
    if starts and not torch.cuda.is_available():
        raise ConfigurationError(
            "deterministic=True needs servers on GPUs, and there is none here: on CPU "
            "SGLang ignores the seeds of samples. Leave it out, or give a running "
            "engine in deterministic mode."
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Makes torch deterministic in the block; refuses other settings of cuBLAS."""
    workspace = os.environ.setdefault(WORKSPACE, WORKSPACES[0])
    if workspace not in WORKSPACES:
        raise ConfigurationError(
            f"{WORKSPACE}={workspace!r} does not let cuBLAS compute the same bits "
            f"twice; deterministic=True needs {' or '.join(map(repr, WORKSPACES))}."
        )
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    # It would choose among kernels by their speed of the moment.
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
