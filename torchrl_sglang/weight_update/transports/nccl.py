"""The NCCL setting that a trainer and SGLang's servers must share.

SGLang sets ``NCCL_CUMEM_ENABLE`` in its processes, to 0 unless it was started with
symmetric memory or inherits a value. NCCL maps memory between processes accordingly,
and reads it with the first communicator of a process. Where both sides differ, the
first broadcast fails with "invalid argument"; disabling peer access or shared memory
works around that, at a fiftieth of the link's speed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed import distributed_c10d
from torchrl._utils import logger as torchrl_logger

from torchrl_sglang.errors import ConfigurationError

__all__ = ["advice", "decide", "share_settings"]

VARIABLE = "NCCL_CUMEM_ENABLE"

SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
"""Settings that disable the fast path between GPUs."""


def decide(
    environment: Mapping[str, str], servers: str, begun: bool
) -> Literal["agree", "set", "late", "differ"]:
    """Compares the trainer's setting with the servers' value. Pure."""
    value = environment.get(VARIABLE)
    if value is None:
        return "late" if begun else "set"
    return "agree" if value == servers else "differ"


def share_settings(server_args: Mapping[str, Any], *, refuse: bool) -> None:
    """Sets the servers' value unless the trainer has one.

    With ``refuse``, raises :class:`ConfigurationError` if NCCL has begun without it.
    """
    servers = str(int(bool(server_args.get("enable_symm_mem"))))
    for name in SLOW:
        if os.environ.get(name, "0") not in ("", "0"):
            torchrl_logger.warning(
                f"{name}={os.environ[name]} keeps NCCL from the fast path between "
                f"GPUs; it is not needed, unset it."
            )
    decision = decide(os.environ, servers, _has_begun())
    if decision == "set":
        os.environ[VARIABLE] = servers
    elif decision == "differ":
        # Servers that inherited the trainer's environment have its value.
        torchrl_logger.warning(
            f"{VARIABLE} is {os.environ[VARIABLE]} here, and SGLang's own value is "
            f"{servers}. {advice(servers)}"
        )
    elif decision == "late" and refuse:
        raise ConfigurationError(
            f"NCCL has made a communicator in this process already, without "
            f"{VARIABLE}, and the servers have {servers}. {advice(servers)}"
        )


def advice(servers: str = "0") -> str:
    """Returns the sentence that tells how both sides come to agree."""
    return (
        f"Both sides must agree: set {VARIABLE}={servers} in the trainer's "
        f"environment, or make the SGLangWeightSyncScheme before the trainer's first "
        f"communicator of NCCL. Do not disable peer access or shared memory instead."
    )


def _has_begun() -> bool:
    for group in list(distributed_c10d._world.pg_map):
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # It has none for GPUs.
            continue
        # Other backends for GPUs lack this method.
        if getattr(backend, "_is_initialized", lambda: False)():
            return True
    return False
