"""The environment of a server or a router, without the trainer's rank variables.

A trainer often has many ranks, and its launcher passes its rank in variables. A server
with these variables acts as a rank: with torchrun's
``TORCHELASTIC_USE_AGENT_STORE=True``, SGLang waits for a store without a host. The
variables of known launchers are listed here and not inherited. Everything else is:
``PATH``, ``HOME``, and the user's settings for CUDA, NCCL, Hugging Face, proxies and
SGLang. A server with its own Python does not inherit the trainer's search path.
Variables in the user's ``environment=`` are always passed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_mapping

LAUNCHER_VARIABLES: Mapping[str, str] = {
    # Libraries mistake the trainer's rank for the server's, load another rank's share
    # or connect to the trainer's store.
    "torch.distributed": "RANK WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT LOCAL_RANK "
    "LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK ROLE_WORLD_SIZE",
    # The server's own process group would wait for the agent's store, and handle NCCL's
    # errors differently from torch's default.
    "torchrun": "TORCHELASTIC_* TORCH_ELASTIC_* PET_* "
    "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
    # transformers reads them, and loads weights as a rank of FSDP.
    "accelerate": "ACCELERATE_* FSDP_* MEGATRON_LM_* PARALLELISM_CONFIG_* "
    "FORK_LAUNCHED",
    # The trainer's rank, and its training mode.
    "DeepSpeed": "LOCAL_SIZE CROSS_RANK CROSS_SIZE DEEPSPEED_* DS_*",
    "Horovod": "HOROVOD_*",
    # MPI and PMI libraries would join the trainer's job as a rank.
    "Slurm": "SLURM_* SLURMD_* SRUN_* SBATCH_*",
    "MPI": "OMPI_* ORTE_* PRTE_* OPAL_* PMI_* PMI2_* PMIX_* MPI_LOCALRANKID "
    "MPI_LOCALNRANKS MPIRUN_* I_MPI_HYDRA_* HYDRA_* HYDI_* MV2_COMM_WORLD_* "
    "MPISPAWN_* PALS_* ALPS_APP_PE JSM_NAMESPACE_*",
    # These make a process a worker of the parent raylet, and need Ray's debugger. The
    # address of the cluster (RAY_ADDRESS) is passed on.
    "Ray": "RAY_JOB_ID RAY_RAYLET_PID RAY_NODE_ID RAY_WORKER_* RAY_ACTOR_* RAY_TASK_* "
    "RAY_RUNTIME_ENV_* RAY_CLIENT_MODE RAY_LD_PRELOAD_ON_WORKERS SPT_NOENV "
    "PYTHONBREAKPOINT=ray.*",
    # These make a process a kernel of the notebook's server, and need its packages.
    "Jupyter": "JPY_* MPLBACKEND=module://*inline*",
}
"""Launcher -> its variables to drop, separated by spaces.

``*`` matches any text. ``NAME=value`` matches only this value.
"""

SETTERS_OF_ONE_THREAD = ("TORCHELASTIC_RUN_ID", "RAY_RAYLET_PID")
"""Launchers that force ``OMP_NUM_THREADS=1`` unless the user sets it; servers do not
inherit this value."""

INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME")
"""Variables for the package search of an interpreter, not for another."""


def inherited_environment(
    environment: Mapping[str, str], *, own_python: bool
) -> dict[str, str]:
    """Returns the variables for a server, from a trainer's.

    ``own_python``: the server's interpreter differs from the trainer's.
    """
    patterns = " ".join(LAUNCHER_VARIABLES.values()).split()
    if any(name in environment for name in SETTERS_OF_ONE_THREAD):
        patterns.append("OMP_NUM_THREADS=1")
    if own_python:
        patterns += INTERPRETER_VARIABLES
    return {
        name: value
        for name, value in environment.items()
        if not any(_matches(name, value, pattern) for pattern in patterns)
    }


def check_environment(given: Any) -> dict[str, str]:
    """Returns the user's variables for a server; ``None`` means no variables."""
    if given is None:
        return {}
    for name, value in check_mapping("environment", given).items():
        if not (isinstance(name, str) and isinstance(value, str)):
            raise ConfigurationError(
                f"environment has {name!r}: {value!r}, and variables are texts; give "
                f"{str(name)!r}: {str(value)!r}."
            )
    return dict(given)


def _matches(name: str, value: str, pattern: str) -> bool:
    """Returns whether a variable matches ``NAME`` or ``NAME=value``."""
    text = f"{name}={value}" if "=" in pattern else name
    return fnmatch.fnmatchcase(text, pattern)
