"""The environment of a server or a router: what it inherits from the trainer.

A trainer is often one of many ranks, and its launcher tells it so in variables. A
server that inherits them takes itself for a rank: with torchrun's
``TORCHELASTIC_USE_AGENT_STORE=True``, SGLang waits for a store that nobody hosts. The
variables of known launchers are listed here and not inherited. Everything else is:
``PATH``, ``HOME``, and the user's settings for CUDA, NCCL, Hugging Face, proxies and
SGLang. A server with its own Python does not inherit the trainer's search path.

Variables in the user's ``environment=`` are always passed.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "INTERPRETER_VARIABLES",
    "LAUNCHER_VARIABLES",
    "LauncherVariables",
    "inherited_environment",
]


@dataclass(frozen=True, slots=True)
class LauncherVariables:
    """Variables that a launcher sets for its own processes."""

    launcher: str
    """Name of the launcher."""
    names: str
    """Their names, separated by spaces; ``*`` matches any text."""
    reason: str
    """What they would do to a server."""
    value: str = "*"
    """The launcher's value; with another one, they are the user's."""
    beside: str = ""
    """They are the launcher's only where one of these is set, too."""


LAUNCHER_VARIABLES: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        "torch.distributed",
        "RANK WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT LOCAL_RANK "
        "LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK "
        "ROLE_WORLD_SIZE",
        "They are the trainer's place among its ranks; libraries take it for the "
        "server's, load another rank's share or meet the trainer's store.",
    ),
    LauncherVariables(
        "torchrun",
        "TORCHELASTIC_* TORCH_ELASTIC_* PET_*",
        "The server's own process group would wait for the agent's store.",
    ),
    LauncherVariables(
        "torchrun",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING NCCL_ASYNC_ERROR_HANDLING",
        "torchrun sets it for its ranks, and a trainer for the moment in which it "
        "makes a group; the server has torch's default.",
    ),
    LauncherVariables(
        "torchrun and Ray",
        "OMP_NUM_THREADS",
        "They set 1 where the user sets nothing, so that ranks do not take each "
        "other's cores; a server would compute with one of them.",
        value="1",
        beside="TORCHELASTIC_RUN_ID RAY_RAYLET_PID",
    ),
    LauncherVariables(
        "accelerate",
        "ACCELERATE_* FSDP_* MEGATRON_LM_* PARALLELISM_CONFIG_* FORK_LAUNCHED",
        "transformers reads them, and loads weights as a rank of FSDP does.",
    ),
    LauncherVariables(
        "DeepSpeed",
        "LOCAL_SIZE CROSS_RANK CROSS_SIZE DEEPSPEED_* DS_*",
        "They are the trainer's place among its ranks, and how it trains.",
    ),
    LauncherVariables(
        "Slurm",
        "SLURM_* SLURMD_* SRUN_* SBATCH_*",
        "MPI and PMI libraries would join the job step as one of its tasks.",
    ),
    LauncherVariables(
        "MPI",
        "OMPI_* ORTE_* PRTE_* OPAL_* PMI_* PMI2_* PMIX_* MPI_LOCALRANKID "
        "MPI_LOCALNRANKS MPIRUN_* I_MPI_HYDRA_* HYDRA_* HYDI_* MV2_COMM_WORLD_* "
        "MPISPAWN_* PALS_* ALPS_APP_PE JSM_NAMESPACE_*",
        "MPI libraries would join the trainer's job as one of its ranks.",
    ),
    LauncherVariables(
        "Horovod",
        "HOROVOD_*",
        "They are the trainer's place among its ranks.",
    ),
    LauncherVariables(
        "Ray",
        "RAY_JOB_ID RAY_RAYLET_PID RAY_NODE_ID RAY_WORKER_* RAY_ACTOR_* RAY_TASK_* "
        "RAY_RUNTIME_ENV_* RAY_CLIENT_MODE RAY_LD_PRELOAD_ON_WORKERS SPT_NOENV",
        "They make a process a worker of the raylet that started it. Where the "
        "cluster is (RAY_ADDRESS) is passed on.",
    ),
    LauncherVariables(
        "Ray",
        "PYTHONBREAKPOINT",
        "It is a function of a package that the server need not have.",
        value="ray.*",
    ),
    LauncherVariables(
        "Jupyter",
        "MPLBACKEND",
        "It is a module of a package that the server need not have.",
        value="module://*inline*",
    ),
    LauncherVariables(
        "Jupyter",
        "JPY_*",
        "They make a process a kernel of the notebook's server.",
    ),
)
"""Variables that are not inherited."""

INTERPRETER_VARIABLES = ("PYTHONPATH", "PYTHONHOME")
"""Where an interpreter finds its packages; not inherited by another one."""


def inherited_environment(
    environment: Mapping[str, str], *, own_python: bool
) -> dict[str, str]:
    """Returns the variables that a server inherits from a trainer's.

    ``own_python``: the server's interpreter is another one than the trainer's.

    Examples:
        >>> environment = {"HOME": "/home/me", "RANK": "3", "HF_HOME": "/hf"}
        >>> inherited_environment(environment, own_python=True)
        {'HOME': '/home/me', 'HF_HOME': '/hf'}
    """
    rows = [row for row in LAUNCHER_VARIABLES if _applies(row, environment)]
    return {
        name: value
        for name, value in environment.items()
        if not any(_is_of(row, name, value) for row in rows)
        and not (own_python and name in INTERPRETER_VARIABLES)
    }


def _applies(row: LauncherVariables, environment: Mapping[str, str]) -> bool:
    return not row.beside or any(name in environment for name in row.beside.split())


def _is_of(row: LauncherVariables, name: str, value: str) -> bool:
    return fnmatch.fnmatchcase(value, row.value) and any(
        fnmatch.fnmatchcase(name, pattern) for pattern in row.names.split()
    )
