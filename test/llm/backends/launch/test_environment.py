from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.router import make_sglang_router
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.errors import ConfigurationError


def variables(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "1")


TORCHRUN = variables(
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME LOCAL_WORLD_SIZE WORLD_SIZE "
    "GROUP_WORLD_SIZE ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT "
    "TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID "
    "TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_SIGNALS_TO_HANDLE "
    "TORCHELASTIC_ERROR_FILE TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS"
)

LEFT_BY = {
    "torchrun": TORCHRUN,
    "accelerate": TORCHRUN
    | variables(
        "ACCELERATE_MIXED_PRECISION ACCELERATE_USE_FSDP ACCELERATE_DYNAMO_BACKEND "
        "FSDP_VERSION FSDP_CPU_RAM_EFFICIENT_LOADING MEGATRON_LM_TP_DEGREE "
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE FORK_LAUNCHED"
    ),
    "deepspeed": variables(
        "RANK LOCAL_RANK LOCAL_SIZE WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR "
        "MASTER_PORT DS_ENV_FILE ACCELERATE_DEEPSPEED_ZERO_STAGE"
    ),
    "srun": variables(
        "SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NTASKS SLURM_NODELIST "
        "SLURM_STEP_ID SLURM_MPI_TYPE SLURMD_NODENAME SRUN_DEBUG SBATCH_EXPORT "
        "PMI_RANK PMI_SIZE PMI_FD PMIX_RANK PMIX_NAMESPACE PMIX_SERVER_URI41"
    ),
    "mpirun of Open MPI": variables(
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
        "OMPI_UNIVERSE_SIZE OMPI_MCA_orte_hnp_uri ORTE_SCHIZO_DETECTION "
        "PRTE_LAUNCHED PMIX_RANK OPAL_OUTPUT_STDERR_FD"
    ),
    "mpirun of MPICH and Intel MPI": variables(
        "PMI_RANK PMI_FD PMI2_RANK MPI_LOCALRANKID MPI_LOCALNRANKS HYDRA_LAUNCHER "
        "HYDI_CONTROL_FD I_MPI_HYDRA_DEBUG MV2_COMM_WORLD_RANK"
    ),
    "a Ray actor": {
        **variables(
            "RAY_JOB_ID RAY_RAYLET_PID RAY_NODE_ID RAY_WORKER_NICENESS "
            "RAY_LD_PRELOAD_ON_WORKERS RAY_RUNTIME_ENV_HASH OMP_NUM_THREADS SPT_NOENV"
        ),
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
    },
    "Jupyter": {
        **variables("JPY_PARENT_PID JPY_SESSION_NAME"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    },
}
"""Variables of launchers in the environment of their processes."""

USERS = {
    **variables(
        "PATH HOME LD_LIBRARY_PATH CUDA_HOME CUDA_VISIBLE_DEVICES NCCL_SOCKET_IFNAME "
        "NCCL_DEBUG GLOO_SOCKET_IFNAME HF_HOME HF_TOKEN HTTPS_PROXY no_proxy "
        "SGLANG_LOGGING_CONFIG_PATH TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR "
        "RAY_ADDRESS LOCAL_MODELS GROUP_NAME RANKING"
    ),
    "OMP_NUM_THREADS": "8",
    "MPLBACKEND": "Agg",
    "PYTHONBREAKPOINT": "0",
}
"""Variables of the user, some of them much like a launcher's."""


@pytest.mark.parametrize("launcher", LEFT_BY)
def test_variables_of_a_launcher_are_not_passed_on(launcher):
    left = LEFT_BY[launcher]
    assert inherited_environment(left, own_python=False) == {}
    mixed = {**left, **USERS}
    assert inherited_environment(mixed, own_python=False) == USERS


def test_one_thread_is_the_users_word_where_no_launcher_is():
    alone = {"OMP_NUM_THREADS": "1"}
    assert inherited_environment(alone, own_python=False) == alone


def test_packages_of_the_trainer_are_for_its_own_python():
    trainers = {"PYTHONPATH": "/trainer", "PYTHONHASHSEED": "0"}
    assert inherited_environment(trainers, own_python=False) == trainers
    others = inherited_environment(trainers, own_python=True)
    assert others == {"PYTHONHASHSEED": "0"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_has_none_of_it_but_what_the_user_names(
    monkeypatch, tiny_model_path, device
):
    for name, value in {**TORCHRUN, "HF_HOME": "/hf"}.items():
        monkeypatch.setenv(name, value)
    named = {"MASTER_ADDR": "10.0.0.1", "OMP_NUM_THREADS": "1", "HF_HOME": "/mine"}
    plans = [
        make_server_command(tiny_model_path, device=device),
        make_server_command(tiny_model_path, device=device, environment=named),
    ]
    for plan in plans:
        plan.release()
    alone, asked = (plan.environment for plan in plans)
    assert not TORCHRUN.keys() & alone.keys()
    assert alone["HF_HOME"] == "/hf"
    assert TORCHRUN.keys() & asked.keys() == {"MASTER_ADDR", "OMP_NUM_THREADS"}
    assert named.items() <= asked.items()


@pytest.mark.parametrize("given", [["A=1"], {"A": 1}, {1: "a"}])
def test_variables_that_are_none(tiny_model_path, given):
    with pytest.raises(ConfigurationError, match="environment"):
        make_server_command(tiny_model_path, device="cpu", environment=given)


def test_groups_of_a_server_for_this_machine_listen_on_loopback(
    monkeypatch, tiny_model_path
):
    def gloo(**arguments):
        plan = make_server_command(tiny_model_path, device="cpu", **arguments)
        plan.release()
        return plan.environment.get("GLOO_SOCKET_IFNAME")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo() == "lo"
    assert gloo(host="0.0.0.0", api_key="sesame") is None
    two_nodes = {"nnodes": 2, "node_rank": 0, "dist_init_addr": "node-1:5000"}
    assert gloo(**two_nodes) is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert gloo() == "eth0"


def test_a_router_has_none_of_it(monkeypatch):
    for name, value in {**TORCHRUN, "HF_HOME": "/hf"}.items():
        monkeypatch.setenv(name, value)
    with make_sglang_router([], environment={"RANK": "mine"}) as router:
        # Its watchdog; what that starts has the same.
        raw = Path(f"/proc/{router.pid}/environ").read_bytes()
    found = dict(line.split("=", 1) for line in raw.decode().split("\0") if line)
    assert found["HF_HOME"] == "/hf"
    assert {name: found[name] for name in TORCHRUN if name in found} == {"RANK": "mine"}
