"""The files in ``examples/cluster`` are what Slurm and Kubernetes take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from helpers.forked_starts import trainer_python
from helpers.ray_cluster import ray_cluster
from helpers.small_runs import write_run
from helpers.waiting import wait_for_text

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"

TEXT, FLAG = {"type": "string"}, {"type": "boolean"}
COUNT = {"type": "integer", "minimum": 0}
NUMBER = {"type": "number", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def fields(required: tuple[str, ...] = (), **known: Any) -> dict[str, Any]:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


def items(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


RESOURCES = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?([mkMGT]i?)?$"},
}
POD = fields(
    ("containers",),
    terminationGracePeriodSeconds=COUNT,
    containers=items(
        fields(
            ("name", "image"),
            name=TEXT,
            image=TEXT,
            resources=fields(requests=RESOURCES, limits=RESOURCES),
            ports=items(fields(("containerPort",), containerPort=COUNT, name=TEXT)),
            volumeMounts=items(
                fields(("name", "mountPath"), name=TEXT, mountPath=TEXT)
            ),
        )
    ),
    volumes=items(
        fields(
            ("name",),
            name=TEXT,
            persistentVolumeClaim=fields(("claimName",), claimName=TEXT),
            emptyDir=fields(medium=TEXT, sizeLimit=TEXT),
        )
    ),
)
TEMPLATE = fields(("spec",), spec=POD)
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    headGroupSpec=fields(("template",), rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=items(
        fields(
            ("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        )
    ),
)
RAY_JOB = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(("name",), name=TEXT),
    spec=fields(
        ("rayClusterSpec",),
        entrypoint=TEXT,
        entrypointNumCpus=NUMBER,
        entrypointNumGpus=NUMBER,
        runtimeEnvYAML=TEXT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        backoffLimit=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        rayClusterSpec=CLUSTER,
    ),
)
"""The fields of KubeRay's v1 types, and of Kubernetes' pods, that one may need here."""


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    return found


def test_the_manifest_has_known_fields(manifest):
    jsonschema.validate(manifest, RAY_JOB)


def test_the_program_fits_the_cluster(manifest):
    spec = manifest["spec"]
    words = spec["entrypoint"].split()
    replicas = int(words[words.index("--num-replicas") + 1])
    tp_size = int(words[words.index("--tp-size") + 1])
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    per_node = gpus // tp_size
    beside_trainer = (gpus - spec["entrypointNumGpus"]) // tp_size
    assert replicas <= beside_trainer + per_node * (group["replicas"] - 1)


def test_each_mount_has_its_volume(manifest):
    (group,) = manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    pod = group["template"]["spec"]
    mounted = {each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("name", ["slurm.sbatch", "grpo.sbatch"])
def test_the_batch_script_is_a_script(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


SRUN = """
tasks=1
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && tasks=${1#*=}
    shift
done
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=$rank "$@" &
    started+=($!)
done
trap 'kill "${started[@]}"; wait' TERM
for each in "${started[@]}"; do wait "$each" || status=$?; done
exit "${status:-0}"
"""
"""Runs the tasks of a step here, and ends them when it is ended."""


def slurm_job(folder: Path, nodes: int, **commands: str) -> dict[str, str]:
    """Writes stand-ins for Slurm's commands; returns the environment of a job."""
    names = " ".join(f"127.0.0.{number}" for number in range(1, nodes + 1))
    commands = {
        "srun": SRUN,
        "scontrol": f"printf '%s\\n' {names}",
        "hostname": "[[ $* == -I ]] && echo 127.0.0.1 10.0.0.1",
        "activate": "",
        **commands,
    }
    (folder / "bin").mkdir()
    for name, text in commands.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "VENV": str(folder),
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{nodes}]",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_PER_TASK": "8",
    }


def test_the_batch_script_ends_if_ray_does_not_start(tmp_path):
    environment = slurm_job(tmp_path, 1, ray="exit 1")
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sbatch"), "rollouts.py"],
        env={**environment, "SLURM_GPUS_ON_NODE": "8"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "The head of the Ray cluster did not start." in done.stderr


def start_job(folder: Path, environment: dict[str, str], words: list[str]) -> Any:
    with (folder / "log.txt").open("a") as log:
        return subprocess.Popen(
            ["bash", str(FOLDER / "grpo.sbatch"), *words],
            env={"TRAIN": str(FOLDER.parent / "grpo" / "train.py"), **environment},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(job: Any, number: int) -> None:
    """Sends a signal to all processes of a job."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_job_that_is_preempted(tmp_path, tiny_model_path):
    """Two torchruns of "nodes" that meet on loopback, and a real server."""
    python = trainer_python()
    environment = slurm_job(
        tmp_path,
        3,
        python3=f'exec {sys.executable} "$@"',
        torchrun=f'exec {python} -m torch.distributed.run "$@"',
        **{"torchrl-sglang": f'exec {python} -m torchrl_sglang "$@"'},
    )
    environment |= {
        "TRAINER_NODES": "2",
        "RANKS_PER_NODE": "1",
        "REPLICAS": "1",
        "SERVER_OPTIONS": "--device cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    words, log = write_run(tmp_path, tiny_model_path, 4), tmp_path / "log.txt"
    job = start_job(tmp_path, environment, words)
    try:
        wait_for_text(log, "step 2/4", job)
    finally:
        # As Slurm does it: all steps and the script, and after a while for good.
        end(job, signal.SIGTERM)
        try:
            job.wait(60)
        finally:
            end(job, signal.SIGKILL)
    again = start_job(tmp_path, environment, words)
    try:
        wait_for_text(log, "The model is in", again)
        assert again.wait(120) == 0, log.read_text()[-3000:]
    finally:
        end(again, signal.SIGKILL)
    assert "goes on after step" in log.read_text()
    rows = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    steps = Counter(json.loads(row)["step"] for row in rows)
    assert steps == dict.fromkeys(range(1, 5), 16)
    assert not list(tmp_path.glob(".servers-*"))


@pytest.mark.parametrize(
    ("nodes", "words", "message"),
    [
        (2, ["run.yaml"], "Give the model of the servers, as model=/shared/model."),
        (1, ["model=m"], "1 nodes are none for servers beside 1 for the trainer."),
    ],
)
def test_a_job_that_cannot_be(nodes, words, message, tmp_path):
    job = start_job(tmp_path, slurm_job(tmp_path, nodes), words)
    assert job.wait(60) == 2
    assert message in (tmp_path / "log.txt").read_text()


def test_a_job_elsewhere_says_where_to_submit(tmp_path):
    environment = {**slurm_job(tmp_path, 2), "TRAIN": "elsewhere/train.py"}
    job = start_job(tmp_path, environment, ["run.yaml", "model=m"])
    assert job.wait(60) == 2
    assert "no elsewhere/train.py" in (tmp_path / "log.txt").read_text()


def test_a_job_whose_servers_do_not_start(tmp_path):
    environment = slurm_job(tmp_path, 2, **{"torchrl-sglang": "exit 1"})
    job = start_job(tmp_path, environment, ["run.yaml", "model=m"])
    assert job.wait(60) == 1
    assert "The servers did not start." in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_of_ray(tmp_path, tiny_model_path, monkeypatch):
    """Three nodes: two with a rank each, and one on which a server is placed."""
    words = write_run(tmp_path, tiny_model_path, 2)
    # A job's working folder, which is here that of the rewards, is on all nodes.
    folders = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", folders)
    with ray_cluster(*[{"num_cpus": 1}] * 3) as cluster:
        command = [sys.executable, str(FOLDER / "grpo_ray.py"), "--nodes", "2"]
        command += ["--ranks-per-node", "1", "--device", "cpu", "--restarts", "0"]
        # The tasks are in folders of Ray's.
        words[0] = str(tmp_path / "run.yaml")
        words += [f"output={tmp_path / 'run'}", f"prompts={tmp_path / 'prompts.jsonl'}"]
        done = subprocess.run(
            [*command, *words, "engine.num_replicas=1"],
            env={
                **os.environ,
                "RAY_ADDRESS": cluster.address,
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert Counter(json.loads(row)["step"] for row in rows) == {1: 16, 2: 16}
