"""Servers of SGLang on a Ray cluster whose nodes are lost, with collectors in actors.

Every token's log-prob is Hugging Face's for the weights that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from helpers.collecting import tasks
from helpers.log_probs import TOLERANCE, batch_difference, response_difference
from helpers.ray_cluster import add_node, processes, ray_cluster
from helpers.waiting import wait_until
from tensordict import TensorDict
from torchrl.collectors.llm import RayLLMCollector
from torchrl.envs.llm import ChatEnv

from torchrl_sglang import (
    AsyncSGLang,
    RayAsyncLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    attach_weight_sync,
)
from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
from torchrl_sglang.errors import WeightSyncError
from torchrl_sglang.testing.tiny_model import make_tiny_model

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    # Ray's own, about futures and processes.
    pytest.mark.filterwarnings("ignore"),
]

SERVER = {"num_cpus": 1, "resources": {"server": 1}}
SECONDS = 240.0
"""For a server to start beside everything else."""

PROMPTS = [[3 + (7 * i + 5 * j) % 90 for j in range(8)] for i in range(8)]


class Nodes:
    """A cluster, and an engine whose two servers have a node each."""

    def __init__(self, cluster: Any, model: str) -> None:
        self.cluster = cluster
        self.count = 0
        self.nodes: dict[str, Any] = {}
        for _ in range(2):
            self.add()
        self.engine = AsyncSGLang.from_pretrained(
            model,
            num_replicas=2,
            device="cpu",
            launcher=RayLauncher(resources={"CPU": 1, "server": 1}),
            router_policy=None,
            max_restarts=100,
        )

    def add(self) -> None:
        self.count += 1
        node = add_node(self.cluster, self.count, **SERVER)
        self.nodes[node.node_ip_address] = node

    def lose(self, rank: int) -> None:
        """Loses the node of a server without notice, and adds an empty one."""
        node = self.nodes.pop(self.engine.servers[rank].host)
        self.cluster.remove_node(node, allow_graceful=False)
        self.add()


@pytest.fixture(scope="module")
def nodes(tiny_model_path: str) -> Iterator[Nodes]:
    from ray import cloudpickle

    # An actor cannot import this module.
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    # Engines of other files live as long as the session.
    before = {*processes(tiny_model_path)}
    with ray_cluster({"num_cpus": 4}) as cluster:
        nodes = Nodes(cluster, tiny_model_path)
        with nodes.engine:
            yield nodes
        assert {*processes(tiny_model_path)} <= before
        del nodes
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def states(engine: AsyncSGLang) -> list[str]:
    return [server.state for server in engine.stats().servers]


def error(engine: AsyncSGLang, model: torch.nn.Module, length: int = 16) -> float:
    """Greatest difference of the servers' log-probs from a model's."""
    answers = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": length, "ignore_eos": True},
        return_logprobs=True,
    )
    assert [len(answer.token_ids) for answer in answers] == [length] * len(PROMPTS)
    return max(
        response_difference(answer, prompt, model)
        for answer, prompt in zip(answers, PROMPTS, strict=True)
    )


def make_env(tokenizer: Any) -> ChatEnv:
    queries = [TensorDict(query=["hi", "what is 2+2?"], batch_size=2) for _ in range(9)]
    return ChatEnv.from_dataloader(queries, batch_size=(2,), tokenizer=tokenizer)


def test_a_node_is_lost_while_it_generates(nodes, tokenizer):
    """No token is lost; the server comes back elsewhere and waits for the weights."""
    engine = nodes.engine
    model = make_tiny_model(tokenizer, seed=21)
    sender = SGLangWeightSyncScheme(engine).create_sender()
    sender.update_weights(model)
    before = [server.url for server in engine.servers]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(error, engine, model, 1000)
        wait_until(lambda: all(each.running for each in engine.stats().servers))
        nodes.lose(0)
        assert call.result(SECONDS) < TOLERANCE
    assert error(engine, model) < TOLERANCE
    wait_until(lambda: states(engine) == ["stale", "serving"], SECONDS)
    after = [server.url for server in engine.servers]
    assert after[0] != before[0]
    assert after[1] == before[1]
    model = make_tiny_model(tokenizer, seed=22)
    sender.update_weights(model)
    assert states(engine) == ["serving", "serving"]
    assert error(engine, model) < TOLERANCE
    sender.shutdown()


class Exporter:
    """A model's weights; while they are sent, something happens once."""

    def __init__(self, happens: Any) -> None:
        self.model: Any = None
        self.armed = False
        self._happens = happens

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(self.model.named_parameters()):
            if self.armed and index == 5:
                self.armed = False
                self._happens()
            yield pair


def test_a_node_is_lost_while_it_takes_weights(nodes, tokenizer):
    """The next update reaches one server at least, and the one after it both."""
    engine = nodes.engine
    exporter = Exporter(partial(nodes.lose, 1))
    sender = SGLangWeightSyncScheme(engine, bucket_bytes=100_000).create_sender()
    exporter.model = make_tiny_model(tokenizer, seed=31)
    sender.update_weights(exporter)
    assert error(engine, exporter.model) < TOLERANCE
    exporter.model, exporter.armed = make_tiny_model(tokenizer, seed=32), True
    # It is tried again by itself, unless Ray tells of the lost node too late for that.
    with suppress(WeightSyncError):
        sender.update_weights(exporter)
    assert not exporter.armed
    sender.update_weights(exporter)
    assert error(engine, exporter.model) < TOLERANCE
    wait_until(
        lambda: states(engine) in (["serving", "stale"], ["serving", "serving"]),
        SECONDS,
    )
    exporter.model = make_tiny_model(tokenizer, seed=33)
    report = sender.update_weights(exporter)
    assert states(engine) == ["serving", "serving"]
    assert {s.weight_version for s in engine.stats().servers} == {report.version}
    assert error(engine, exporter.model) < TOLERANCE
    sender.shutdown()


def test_two_collectors_in_actors(nodes, tokenizer):
    """Both are on one fleet; one loses a node, and both have the new weights."""
    engine = nodes.engine
    scheme = SGLangWeightSyncScheme(engine)
    policy = SGLangWrapper(
        engine,
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 8},
        return_generation_info=True,
    )
    one = RayLLMCollector(
        partial(make_env, tokenizer),
        policy=policy,
        dialog_turns_per_batch=2,
        total_dialog_turns=100,
        track_policy_version=True,
        remote_config={"num_cpus": 1},
    )
    other = RayAsyncLLMCollector(
        policy=policy,
        prompts=tasks(90),
        rewards=lambda conversation, task: float(conversation.sample),
        group_size=2,
        groups_per_batch=2,
        weight_sync_schemes={"policy": scheme},
    )
    attach_weight_sync(one, scheme)
    batches = iter(other)
    model = make_tiny_model(tokenizer, seed=41)
    one.update_policy_weights_(model)
    assert (one.policy_version, other.policy_version) == (1, 1)
    assert batch_difference(one.next().reshape(-1), model) < TOLERANCE
    nodes.lose(0)
    assert batch_difference(one.next().reshape(-1), model) < TOLERANCE
    next(batches)
    wait_until(lambda: states(engine) == ["stale", "serving"], SECONDS)
    model = make_tiny_model(tokenizer, seed=42)
    report = other.update_policy_weights_(model)
    assert states(engine) == ["serving", "serving"]
    assert (one.policy_version, other.policy_version) == (2, 2)
    for _ in range(2):
        data = one.next().reshape(-1)
        assert batch_difference(data, model) < TOLERANCE
        versions = data.get(("generation_info", "weight_version"), as_list=True)
        assert {int(v) for each in versions for v in each} == {int(report.version)}
    for _ in range(4):
        batch = next(batches)
    assert batch_difference(batch, model) < TOLERANCE
    other.shutdown()
    one.shutdown()
    scheme.shutdown()


class Trainer:
    """An actor that sends weights."""

    def __init__(self, engine: AsyncSGLang) -> None:
        self._sender = SGLangWeightSyncScheme(engine).create_sender()

    def update(self, model: torch.nn.Module) -> str:
        return self._sender.update_weights(model).version


def test_a_sender_in_an_actor(nodes, tokenizer):
    """It follows the servers, too, and the driver's engine takes its version over."""
    import ray

    engine = nodes.engine
    trainer = ray.remote(num_cpus=1)(Trainer).remote(engine)
    for seed in (51, 52):
        model = make_tiny_model(tokenizer, seed=seed)
        version = ray.get(trainer.update.remote(model), timeout=SECONDS)
        assert {s.weight_version for s in engine.stats().servers} == {version}
        assert error(engine, model) < TOLERANCE
        assert engine.weight_version == version
        wait_until(lambda: states(engine) == ["serving", "serving"])
        assert error(engine, model) < TOLERANCE
        if seed == 51:
            nodes.lose(1)
            wait_until(lambda: states(engine) == ["serving", "stale"], SECONDS)
