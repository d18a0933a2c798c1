"""A trainer that waits for a batch while all servers are started again."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest
import torch
from helpers.collecting import tasks
from helpers.fake_launcher import FakeLauncher, make_engine

from torchrl_sglang import AsyncLLMCollector, SGLangWeightSyncScheme, SGLangWrapper


def slow_reward(conversation, task):
    time.sleep(0.05)
    return 1.0


@pytest.mark.parametrize("trained", [False, True])
def test_the_next_batch_comes(tiny_model_path, hf_model, trained):
    """Of the model as it is: a new policy version, where a step came meanwhile."""
    with ExitStack() as stack:
        launcher = FakeLauncher(tiny_model_path, 1)
        stack.callback(launcher.close)
        engine = stack.enter_context(make_engine(launcher))
        scheme = SGLangWeightSyncScheme(engine, hf_model, transport="cuda_ipc")
        stack.callback(scheme.shutdown)
        collector = AsyncLLMCollector(
            policy=SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 4}),
            prompts=tasks(8),
            rewards=slow_reward,
            group_size=2,
            groups_per_batch=2,
            batches_per_update=30,
            max_staleness=0,
            max_in_flight=4,
            weight_sync_schemes={"policy": scheme},
        )
        stack.enter_context(collector)
        collector.update_policy_weights_()
        batches = iter(collector)
        assert set(next(batches)["policy_version"].flatten().tolist()) == {1}
        if trained:
            with torch.no_grad():
                next(hf_model.parameters()).mul_(1.001)
        launcher.handles[-1].vanish()
        # What was complete comes first.
        while len(launcher.handles) == 1 or not launcher.handles[1].server.payloads():
            next(batches)
        assert collector.policy_version == 1 + trained
        assert set(next(batches)["policy_version"].flatten().tolist()) == {1 + trained}
