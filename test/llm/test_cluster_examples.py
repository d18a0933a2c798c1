"""The files in ``examples/cluster`` are what Slurm and Kubernetes take."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

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


def test_the_batch_script_is_a_script():
    subprocess.run(["bash", "-n", str(FOLDER / "slurm.sbatch")], check=True)


def test_the_batch_script_ends_if_ray_does_not_start(tmp_path):
    commands = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo node1",
        "hostname": "echo 10.0.0.1",
        "ray": "exit 1",
        "activate": "",
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "VENV": str(tmp_path),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_GPUS_ON_NODE": "8",
    }
    done = subprocess.run(
        ["bash", str(FOLDER / "slurm.sbatch"), "rollouts.py"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "The head of the Ray cluster did not start." in done.stderr
