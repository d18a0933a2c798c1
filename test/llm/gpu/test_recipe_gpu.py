"""Whole runs of the recipe, with its trainer and its servers on GPUs."""

from __future__ import annotations

import csv
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers import recipe
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model

from torchrl_sglang.cli.bench.models import server_arguments

pytest.importorskip("hydra")

pytestmark = [
    *NEEDS_GPU,
    # TorchRL's own, about what is deprecated in torch.
    pytest.mark.filterwarnings("ignore"),
]

ON_GPUS = (
    "train_model.device=cuda",
    "train_model.gradient_checkpointing=true",
    "train.mixed_precision=true",
    "inference_model.device=cuda",
    "inference_model.torch_dtype=bfloat16",
    "inference_model.enforce_eager=true",
    "inference_model.max_tokens=16",
    # A step of the optimizer for each batch.
    "train.optim_batch_size=16",
)

COLOCATED = ("sync", "inference_model.colocated=true")
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="it has the server on a second GPU")


def read_scalar(folder: Path, name: str) -> list[float]:
    (path,) = (folder / "logs").rglob(f"{name}.csv")
    with path.open() as file:
        return [float(value) for _, value in csv.reader(file)]


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(COLOCATED, id="colocated"),
        pytest.param(
            (*COLOCATED, "train_model.lora.enabled=true"), id="colocated-lora"
        ),
        pytest.param(("sync",), id="sync", marks=TWO_GPUS),
        pytest.param(
            ("async", "train.use_kl_to_ref=true", "train.kl_to_ref_coeff=0.1"),
            id="async",
            marks=TWO_GPUS,
        ),
        pytest.param(
            (
                *COLOCATED,
                "train_model.num_devices=2",
                "inference_model.num_devices=2",
            ),
            id="colocated-two",
            marks=TWO_GPUS,
        ),
    ],
)
def test_a_run(overrides, gpu_model_path, tmp_path):
    import grpo_train

    folder = tmp_path / "run"
    mode, *others = overrides
    further = [
        f"+inference_model.server_args.{name}={json.dumps(value)}"
        for name, value in server_arguments().items()
    ]
    cfg = recipe.compose(
        folder,
        mode,
        *recipe.SMALL,
        *ON_GPUS,
        f"model.name={gpu_model_path}",
        *others,
        *further,
    )
    with ExitStack() as stack:
        run = grpo_train.Run(cfg, stack)
        run.loop()
        run.finish()
        lora = cfg.train_model.lora.enabled
        # It was trained, and the server has what was trained.
        if not lora:
            assert difference(run.engine, new_model(0)) > 0.1
            assert difference(run.engine, run.model.to(torch.bfloat16)) < TOLERANCE
    # Trainer and server agree about the tokens, after each update, too. Responses of an
    # asynchronous run are older after its first batch.
    name = "rollout_corr/kl" if mode == "async" else "loss/kl_approx"
    kl = read_scalar(folder, name)
    assert len(kl) == 3
    assert max(map(abs, kl[:1] if mode == "async" else kl)) < TOLERANCE
    rows = (folder / "rollouts.jsonl").read_text().splitlines()
    assert len(rows) == 48
