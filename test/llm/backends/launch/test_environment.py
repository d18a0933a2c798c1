from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.router import make_sglang_router
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.errors import ConfigurationError

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "ROLE_RANK": "0",
    "ROLE_NAME": "default",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "OMP_NUM_THREADS": "1",
}

LEFT_BY = {
    "torchrun": TORCHRUN,
    "accelerate": {
        **TORCHRUN,
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_DYNAMO_BACKEND": "no",
        "FSDP_VERSION": "2",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "MEGATRON_LM_TP_DEGREE": "1",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "FORK_LAUNCHED": "1",
    },
    "deepspeed": {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_SIZE": "8",
        "WORLD_SIZE": "8",
        "CROSS_RANK": "0",
        "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "DS_ENV_FILE": ".deepspeed_env",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    },
    "srun": {
        "SLURM_JOB_ID": "42",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "8",
        "SLURM_NODELIST": "node[1-2]",
        "SLURM_STEP_ID": "0",
        "SLURM_MPI_TYPE": "pmix",
        "SLURMD_NODENAME": "node1",
        "SRUN_DEBUG": "3",
        "SBATCH_EXPORT": "ALL",
        "PMI_RANK": "0",
        "PMI_SIZE": "8",
        "PMI_FD": "13",
        "PMIX_RANK": "0",
        "PMIX_NAMESPACE": "slurm.pmix.42.0",
        "PMIX_SERVER_URI41": "slurm.pmix;tcp4://127.0.0.1:1",
    },
    "mpirun of Open MPI": {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "8",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_UNIVERSE_SIZE": "8",
        "OMPI_MCA_orte_hnp_uri": "1;tcp://127.0.0.1:1",
        "ORTE_SCHIZO_DETECTION": "ORTE",
        "PRTE_LAUNCHED": "1",
        "PMIX_RANK": "0",
        "OPAL_OUTPUT_STDERR_FD": "2",
    },
    "mpirun of MPICH and Intel MPI": {
        "PMI_RANK": "0",
        "PMI_FD": "9",
        "PMI2_RANK": "0",
        "MPI_LOCALRANKID": "0",
        "MPI_LOCALNRANKS": "8",
        "HYDRA_LAUNCHER": "ssh",
        "HYDI_CONTROL_FD": "9",
        "I_MPI_HYDRA_DEBUG": "0",
        "MV2_COMM_WORLD_RANK": "0",
    },
    "a Ray actor": {
        "RAY_JOB_ID": "01000000",
        "RAY_RAYLET_PID": "7079",
        "RAY_NODE_ID": "ab",
        "RAY_WORKER_NICENESS": "0",
        "RAY_LD_PRELOAD_ON_WORKERS": "0",
        "RAY_RUNTIME_ENV_HASH": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONBREAKPOINT": "ray.util.rpdb.set_trace",
        "SPT_NOENV": "1",
    },
    "Jupyter": {
        "JPY_PARENT_PID": "1",
        "JPY_SESSION_NAME": "a.ipynb",
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    },
}
"""What launchers leave in the environment of what they start."""

USERS = {
    "PATH": "/usr/bin",
    "HOME": "/home/me",
    "LD_LIBRARY_PATH": "/opt/lib",
    "CUDA_HOME": "/usr/local/cuda",
    "CUDA_VISIBLE_DEVICES": "4,5",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "HF_HOME": "/hf",
    "HF_TOKEN": "hf_x",
    "HTTPS_PROXY": "http://proxy:1",
    "no_proxy": "127.0.0.1",
    "SGLANG_LOGGING_CONFIG_PATH": "/log.json",
    "TRITON_CACHE_DIR": "/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/inductor",
    "RAY_ADDRESS": "10.0.0.1:6379",
    "LOCAL_MODELS": "/models",
    "GROUP_NAME": "team",
    "RANKING": "3",
    "OMP_NUM_THREADS": "8",
    "MPLBACKEND": "Agg",
    "PYTHONBREAKPOINT": "0",
}
"""What is the user's, some of it much like a launcher's."""


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
