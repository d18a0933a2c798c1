"""Whole runs of ``GRPO``, with its trainer and its servers on GPUs."""

from __future__ import annotations

import pytest
import torch
from helpers.csv_logs import logged
from helpers.gpu import GPUS, NEEDS_GPU, TOLERANCE, difference, new_model
from helpers.small_runs import few_tokens

from torchrl_sglang import GRPO
from torchrl_sglang.cli.bench.models import server_arguments

pytestmark = [
    *NEEDS_GPU,
    # TorchRL's own, about what is deprecated in torch.
    pytest.mark.filterwarnings("ignore"),
]

LORA = {"lora": {"r": 16}}
ASYNC = {
    "max_staleness": 2,
    "correction": "decoupled_token_is",
    "kl_to_ref_coeff": 0.1,
}
TWO_GPUS = pytest.mark.skipif(GPUS < 2, reason="it has the server on a second GPU")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"colocated": True}, id="colocated"),
        pytest.param({"colocated": True, **LORA}, id="colocated-lora"),
        pytest.param({}, id="sync", marks=TWO_GPUS),
        pytest.param(ASYNC, id="async", marks=TWO_GPUS),
        pytest.param(LORA, id="lora", marks=TWO_GPUS),
    ],
)
def test_a_run(arguments, gpu_model_path, tmp_path):
    folder = tmp_path / "run"
    prompts = [{"query": f"Say {number}."} for number in range(12)]
    run = GRPO(
        gpu_model_path,
        prompts=prompts,
        rewards=few_tokens,
        eval_prompts=prompts[:3],
        eval_every=2,
        checkpoint_every=2,
        generate_kwargs={"max_new_tokens": 16},
        group_size=4,
        groups_per_batch=4,
        steps=3,
        lr=2e-3,
        engine={
            "device": "cuda",
            "dtype": torch.bfloat16,
            "enforce_eager": True,
            "gpu_memory_utilization": 0.5,
            "max_total_tokens": 65_536,
            "max_model_len": 256,
            **server_arguments(),
        },
        output=folder,
        **arguments,
    )
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
            run.report(metrics)
        run.finish()
        # It was trained, and the server has what was trained.
        if "lora" not in arguments:
            assert difference(run.engine, new_model(0)) > 0.1
            assert difference(run.engine, run.model.to(torch.bfloat16)) < TOLERANCE
    # Trainer and server agree about the tokens, after each update, too. Responses of an
    # asynchronous run are older after its first batch.
    is_async = "max_staleness" in arguments
    kl = logged(folder, "rollout_corr/kl" if is_async else "train/kl_approx")
    assert len(kl) == 3
    assert max(map(abs, kl[:1] if is_async else kl)) < TOLERANCE
    assert len((folder / "rollouts.jsonl").read_text().splitlines()) == 48
