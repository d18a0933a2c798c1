"""Where a run has its servers, which it starts itself."""

from __future__ import annotations

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference
from helpers.memory_saver import write_saver_python
from helpers.small_runs import few_tokens

from torchrl_sglang import GRPO, RayLauncher
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.urls import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from torchrl_sglang.trainers.placement import (
    check_gpus,
    check_placement,
    connect_arguments,
    server_arguments,
)
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.report import flatten
from torchrl_sglang.types import ServerPlacement

# TorchRL's own, about what is deprecated in torch.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def make(tiny_model_path, tmp_path):
    def made(**arguments):
        return GRPO(
            tiny_model_path,
            prompts=[{"query": f"Say {number}."} for number in range(12)],
            rewards=few_tokens,
            generate_kwargs={"max_new_tokens": 8},
            group_size=4,
            groups_per_batch=4,
            lr=2e-3,
            output=tmp_path / "run",
            **arguments,
        )

    with torch.random.fork_rng(devices=[]):
        yield made


def test_a_launcher_does_not_know_of_the_trainer():
    def server(local, *gpus):
        return ServerPlacement(url="http://x", local=local, device="cuda", gpus=gpus)

    check_gpus([server(False, "0"), server(True, "2", "3")], ["0", "1"])
    with pytest.raises(ConfigurationError, match="at http://x on the trainer's GPUs"):
        check_gpus([server(True, "1", "2")], ["0", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
def test_colocated(make, tmp_path, lora):
    """Servers sleep while the trainer trains; the memory saver is a stand-in."""
    python = write_saver_python(tmp_path)
    run = make(colocated=True, lora=lora, engine={"python": python})
    with run:
        run.begin()
        for batch in run.batches():
            run.step += 1
            with run.memory_for_training():
                assert run.engine.asleep
                run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
            assert not run.engine.asleep
        # Groups that begin with new weights wait until all memory is back.
        told = run.collector.stats()
        assert (told["groups_retried"], told["errors"]) == (0, [])
        run.finish()
        assert run.step == 3
        assert run.clock.totals["sleep"] > 0
        if lora is None:
            assert difference(run.engine, run.model) < TOLERANCE
    assert len((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()) == 48


@pytest.mark.slow
def test_servers_on_ray(make, ray_here, tmp_path):
    launcher = RayLauncher(strategy="SPREAD")
    make(max_staleness=1, engine={"launcher": launcher, "num_replicas": 2}).train()
    assert len((tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()) == 48


def arguments_of(given, *, local_size=1, **settings):
    ranks = TrainerRanks(size=local_size, local_size=local_size)
    kept = {"colocated": False, "lora": None, "by_file": False, "seed": 3}
    return server_arguments(given, ranks, **{**kept, **settings})


def test_servers_take_the_gpus_after_the_trainers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = arguments_of({"num_replicas": 2, "tp_size": 2}, local_size=4)
    assert found["cuda_devices"] == [4, 5, 6, 7]
    assert found["num_replicas"] == 2
    assert arguments_of({"cuda_devices": [1]})["cuda_devices"] == [1]
    assert "cuda_devices" not in arguments_of({"launcher": "ray"})
    found = arguments_of({"tp_size": 2}, colocated=True)
    assert found["cuda_devices"] == [0, 1]
    assert found["enable_memory_saver"]
    # A server on each of the trainer's GPUs.
    assert arguments_of({}, local_size=4, colocated=True)["num_replicas"] == 4
    found = arguments_of({"tp_size": 2}, local_size=4, colocated=True)
    assert (found["num_replicas"], found["cuda_devices"]) == (2, [0, 1, 2, 3])
    for size, given in (
        (1, {"num_replicas": 2}),
        (2, {"num_replicas": 2, "tp_size": 2}),
    ):
        with pytest.raises(ConfigurationError, match="weight_sync={'directory'"):
            arguments_of(given, local_size=size, colocated=True)
        arguments_of(given, local_size=size, colocated=True, by_file=True)
    arguments_of({"num_replicas": 2}, colocated=True, lora={"r": 4})


def test_servers_on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arguments_of({}, lora={"r": 4}) == {
        "random_seed": 3,
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["all"],
        "device": "cpu",
    }


def test_servers_that_run():
    urls = ["http://a:1", "http://b:2"]
    assert connect_arguments("http://a:1", {}) == {"url": "http://a:1"}
    assert connect_arguments(urls, {KEY_VARIABLE: "k"}) == {
        "urls": urls,
        "api_key": "k",
    }
    keys = {KEY_VARIABLE: "k", ADMIN_KEY_VARIABLE: "a"}
    assert connect_arguments(urls, keys) == {
        "urls": urls,
        "api_key": "k",
        "admin_api_key": "a",
    }
    given = {"router_url": "http://c:3", "api_key": "mine"}
    assert connect_arguments(given, {KEY_VARIABLE: "k"}) == given
    assert connect_arguments({"num_replicas": 2}, {KEY_VARIABLE: "k"}) is None
    assert connect_arguments(None, {}) is None
    with pytest.raises(
        ConfigurationError, match="servers that run, and 'num_replicas'"
    ):
        connect_arguments({"urls": urls, "num_replicas": 2}, {})
    check_placement(torch.nn.Linear(1, 1), urls, False, 0)


def test_no_logger_gets_a_key():
    found = flatten({"engine": {"api_key": "secret", "urls": ["http://me:secret@a:1"]}})
    assert found == {"engine.api_key": "***", "engine.urls": "['http://***@a:1']"}
