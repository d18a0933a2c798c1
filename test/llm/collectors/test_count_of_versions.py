"""The documented loop, wherever servers and collector have counted differently.

The collector counts its trainer's updates, the servers count everybody's; a correction
compares the collector's count with the collector's.
"""

from __future__ import annotations

import re
import textwrap
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from helpers.collecting import (
    OneReward,
    ask_gateway,
    collection_of,
    length_reward,
    one_turn_env,
    talk,
    tasks,
    user,
    versions_of,
)
from helpers.fake_server import FakeServer

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    OffPolicyCorrection,
    RolloutCorrectionConfig,
    RunRecorder,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    attach_weight_sync,
)
from torchrl_sglang.backends import session
from torchrl_sglang.errors import (
    CollectionError,
    ConfigurationError,
    WeightMismatchError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.page import read_runs
from torchrl_sglang.weight_update import sender as senders

PAGE = Path(__file__).parents[3] / "docs/source/off_policy.rst"
UPDATES = 4
"""Batches of a run."""


def documented_loop() -> str:
    """Returns the code block of the page that sets the consumer's version."""
    text = PAGE.read_text()
    blocks = re.findall(r"code-block:: python\n\n((?:[ ]{3,}.*\n|\n)+)", text)
    (block,) = [each for each in blocks if "consumer_version = " in each]
    lines = textwrap.dedent(block).splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("correct = "))
    return "\n".join(lines[start:])


async def one_turn(task, *, base_url, api_key):
    await ask_gateway(base_url, api_key, [user(task["query"])], max_tokens=5)
    return 1.0


KINDS = {
    "functions": lambda gateway: {"rewards": length_reward},
    "an environment": lambda gateway: {"env": lambda: one_turn_env(OneReward())},
    "an agent": lambda gateway: {"agent": one_turn, "gateway": gateway},
}
"""What makes conversations -> arguments of a collector."""


class Trainers:
    """Senders and collectors of several trainers on one server."""

    def __init__(self, fake, model, folder, stack):
        self.fake, self._model = fake, model
        self._folder, self._stack = folder, stack

    def connect(self):
        return self._stack.enter_context(AsyncSGLang.connect(self.fake.url))

    def scheme(self, engine):
        scheme = SGLangWeightSyncScheme(
            engine, self._model, transport="disk", directory=self._folder
        )
        self._stack.callback(scheme.shutdown)
        return scheme

    def collector(self, engine, kind="functions", scheme=None, **options):
        gateway = None
        if kind == "an agent":
            gateway = self._stack.enter_context(Gateway(engine))
        settings = {
            "policy": SGLangWrapper(engine, generate_kwargs={"max_new_tokens": 6}),
            "prompts": tasks(4000),
            "groups_per_batch": 1,
            "max_staleness": 0,
            "weight_sync_schemes": None if scheme is None else {"policy": scheme},
            **KINDS[kind](gateway),
        }
        collector = AsyncLLMCollector(**{**settings, **options})
        self._stack.callback(collector.shutdown)
        return collector


@pytest.fixture
def trainers(fake, hf_model, tmp_path):
    with ExitStack() as stack:
        yield Trainers(fake, hf_model, tmp_path, stack)


class Run:
    """A trainer with a collector, on servers that may have a history."""

    def __init__(self, trainers):
        self.engine = trainers.connect()
        self.collector = trainers.collector(
            self.engine,
            scheme=trainers.scheme(self.engine),
            group_size=2,
            groups_per_batch=2,
            max_staleness=4,
            total_groups=2 * UPDATES,
        )

    def loop(self, updates=2) -> list[float]:
        """Runs the loop of the page; returns which share of each batch was too old.

        It is compared with the version of each row, which is a count of its own.
        """
        dropped, true = [], []
        correction = OffPolicyCorrection(
            RolloutCorrectionConfig(rollout_is=None, max_staleness=1, bypass_mode=True),
            masking_strategy="rlhf",
        )

        class Loss:
            def __call__(self, batch):
                return self

            loss_objective = torch.zeros((), requires_grad=True)

        def correct(batch):
            ages = self.collector.policy_version - batch["policy_version"]
            true.append(float((ages > 1).float().mean()))
            batch = batch.select("tokens", "masks", "log_probs", "token_policy_version")
            batch.set("advantage", torch.ones(len(batch), 1, 1))
            corrected = correction(batch)
            dropped.append(correction.metrics["rollout_corr/stale_masked_fraction"])
            for _ in range(updates):
                self.collector.update_policy_weights_()
            return corrected

        class Correct:
            def __setattr__(self, name, value):
                setattr(correction, name, value)

            def __call__(self, batch):
                return correct(batch)

        scope = {
            "collector": self.collector,
            "buffer": self.collector,
            "loss": Loss(),
            "actor": None,
            "logger": type("Logger", (), {"log": staticmethod(lambda metrics: None)}),
            "OffPolicyCorrection": lambda *args, **kwargs: Correct(),
        }
        Correct.metrics = property(lambda self: correction.metrics)
        exec(compile(documented_loop(), PAGE, "exec"), scope)
        assert dropped == true
        return dropped


def check(dropped: list[float]) -> None:
    """The first batch is fresh, and some others are not."""
    assert dropped[0] == 0
    assert max(dropped) > 0


@pytest.mark.parametrize(
    ("before", "later"),
    [("default", "default"), ("21", "21"), ("21", "25")],
    ids=["first run", "second run", "another trainer's updates"],
)
def test_stale_tokens_are_dropped_wherever_servers_count(trainers, fake, before, later):
    fake.weight_version = before
    trainer = Run(trainers)
    fake.weight_version = later
    check(trainer.loop())
    assert trainer.collector.policy_version == 2 * UPDATES


def test_after_a_resume_on_new_servers(trainers, tiny_model_path):
    first = Run(trainers)
    for _ in range(20):
        first.collector.update_policy_weights_()
    next(iter(first.collector))
    state = first.collector.state_dict()
    first.collector.shutdown()
    with FakeServer(tiny_model_path) as trainers.fake:
        second = Run(trainers)
        # The order of the docs: send the weights, then load the state.
        second.collector.update_policy_weights_()
        second.collector.load_state_dict(state)
        assert second.collector.policy_version == 20
        check(second.loop())


def test_another_count_is_an_error(trainers, fake):
    """The servers' versions go with the servers' count, and not with the trainer's."""
    fake.weight_version = "21"
    trainer = Run(trainers)
    policy = trainer.collector.policy.get_new_version(return_generation_info=True)
    collector = AsyncLLMCollector(
        policy=policy, prompts=tasks(4), rewards=length_reward, groups_per_batch=1
    )
    batch = next(iter(collector))
    collector.shutdown()
    batch = batch.select("tokens", "masks", "log_probs", "generation_info")
    batch.set("advantage", torch.ones(len(batch), 1, 1))
    correct = OffPolicyCorrection(
        RolloutCorrectionConfig(rollout_is=None, max_staleness=1, bypass_mode=True),
        masking_strategy="rlhf",
        version_key=("generation_info", "weight_version"),
        consumer_version=collector.policy_version,
    )
    with pytest.raises(ConfigurationError, match="version 21, and consumer_version is"):
        correct(batch)
    correct.consumer_version = int(trainer.engine.weight_version)
    correct(batch)
    assert correct.metrics["rollout_corr/stale_masked_fraction"] == 0
    # Without any versions, the error says where they come from.
    correct.version_key = "token_policy_version"
    with pytest.raises(ConfigurationError, match="AsyncLLMCollector writes"):
        correct(batch)


# Another sender.


def warned(caplog) -> list[str]:
    return [each for each in caplog.messages if "another trainer" in each]


@pytest.mark.parametrize("reaction", ["warn", "raise"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_another_senders_weights(trainers, fake, caplog, kind, reaction):
    engine = trainers.connect()
    collector = trainers.collector(
        engine, kind, trainers.scheme(engine), on_other_sender=reaction
    )
    batches = iter(collector)
    for _ in range(2):
        collector.update_policy_weights_()
        next(batches)
    assert not warned(caplog)
    another = trainers.scheme(trainers.connect()).create_sender()
    with collector.pause():
        collector.update_policy_weights_()
        other = another.update_weights()
    words = f"Batch 3 has tokens of weight version '{other.version}' from .*{fake.url}"
    if reaction == "raise":
        with pytest.raises(CollectionError, match=words) as error:
            next(batches)
        assert isinstance(error.value.__cause__, WeightSyncStateError)
        assert "on_other_sender='warn'" in str(error.value)
        return
    for _ in range(2):
        next(batches)
        collector.update_policy_weights_()
    # Once by the collector, and once by the sender.
    first, *others = warned(caplog)
    assert re.search(words, first)
    assert [each.startswith("The servers at") for each in others] == [True]


@pytest.mark.parametrize("spans", [True, False], ids=["spans", "one version"])
def test_one_trainer_is_not_taken_for_two(trainers, tiny_model_path, caplog, spans):
    """Its own updates are known, whatever has sent them and whoever collects."""
    options = {"on_other_sender": "raise", "max_staleness": 2}
    with FakeServer(tiny_model_path, version_spans=spans) as fake:
        trainers.fake = fake
        # An earlier run has left its weights.
        fake.weight_version = "21"
        engine = trainers.connect()
        scheme = trainers.scheme(engine)
        collectors = [
            # One of them has an engine of its own, and one knows of no sender.
            trainers.collector(trainers.connect(), scheme=scheme, **options),
            trainers.collector(engine, scheme=scheme, **options),
            trainers.collector(engine, **options),
        ]
        batches = [iter(each) for each in collectors]

        def collect() -> None:
            for each in batches:
                next(each)

        collect()
        for _ in range(2):
            scheme.create_sender().update_weights()
            collect()
        scheme.create_sender().recover()
        collect()
        # It is resumed on the same servers.
        state = collectors[1].state_dict()
        again = trainers.scheme(engine)
        resumed = trainers.collector(trainers.connect(), scheme=again, **options)
        resumed.load_state_dict(state)
        attach_weight_sync(collectors[0], again)
        batches.append(iter(resumed))
        collect()
        again.create_sender().update_weights()
        collect()
        assert resumed.policy_version == collectors[1].policy_version + 1
    assert not warned(caplog)


def test_versions_of_an_agents_tokens_are_the_collectors(trainers, fake):
    """Tokens that are not the policy's have none."""

    async def agent(task, *, base_url, api_key):
        await talk(base_url, api_key, task["query"], turns=2, max_tokens=5)
        return 1.0

    fake.weight_version = "21"
    trainer = Run(trainers)
    with Gateway(trainer.engine) as gateway:
        collector = AsyncLLMCollector(
            policy=trainer.collector.policy,
            prompts=tasks(1),
            agent=agent,
            gateway=gateway,
            groups_per_batch=1,
        )
        row = next(iter(collector))[0]
        collector.shutdown()
    versions = row["token_policy_version"]
    prompt = len(row["tokens"].full) - len(versions)
    own = row["masks"].all_assistant_mask[prompt:]
    assert versions[own].eq(0).all()
    assert versions[~own].eq(-1).all()
    assert own.any()
    assert not own.all()


def test_responses_between_resumption_and_count(trainers, fake, monkeypatch):
    """Servers generate with new weights before the update that sent them returns."""
    fake.weight_version = "21"
    engine = trainers.connect()
    scheme = trainers.scheme(engine)
    sender = scheme.create_sender()
    policy = SGLangWrapper(
        engine, generate_kwargs={"max_new_tokens": 6}, return_generation_info=True
    )
    collector = trainers.collector(
        engine,
        scheme=scheme,
        policy=policy,
        groups_per_batch=4,
        max_staleness=1,
        max_in_flight=1,
        total_groups=4 * 8,
    )
    count_of = {engine.weight_version: 0}
    count = type(sender)._count

    def count_late(self, report, counts_itself=None):
        # As long as a comparison of a large model's log-probs takes.
        time.sleep(0.3)
        return count(self, report, counts_itself)

    monkeypatch.setattr(type(sender), "_count", count_late)
    new = 0
    for batch in collector:
        for row in batch:
            served = row["generation_info", "weight_version"].flatten().tolist()
            told = row["token_policy_version"].tolist()
            assert {*told} == {count_of[str(each)] for each in served}
            new += max(told) == collector.policy_version
        report = collector.update_policy_weights_()
        count_of[report.version] = collector.policy_version
    assert new > 0


def test_an_update_that_fails_is_not_announced(trainers, fake, monkeypatch):
    trainer = Run(trainers)
    versions = versions_of(trainer.collector)

    def fail(*args, **options):
        assert versions.of(options["version"]) == 1
        raise WeightTransferError("It broke.")

    monkeypatch.setattr(session, "update_weights", fail)
    begun = []
    monkeypatch.setattr(collection_of(trainer.collector), "set_version", begun.append)
    with pytest.raises(WeightTransferError, match="It broke"):
        trainer.collector.update_policy_weights_()
    assert versions.of("1") == versions.current == 0
    assert not begun, "No version began, which would end a deterministic collection."


def test_weights_that_are_not_verified(trainers, fake, tmp_path, monkeypatch):
    """They generate nothing of this engine's, and have a count of their own."""
    engine = trainers.connect()
    scheme = trainers.scheme(engine)
    recorder = RunRecorder(tmp_path / "recording")
    collector = trainers.collector(
        engine,
        scheme=scheme,
        groups_per_batch=4,
        max_staleness=1000,
        max_in_flight=1,
        recorder=recorder,
    )
    sender, sent = scheme.create_sender(), []

    def requests() -> int:
        return len(fake.payloads("/generate"))

    def fail() -> None:
        for _ in range(2):
            # Those of before may still come in.
            time.sleep(0.2)
            sent.append(requests())
        raise WeightMismatchError("Other values.")

    def watch(engine, weights, given, *, version):
        return weights, fail

    monkeypatch.setattr(senders, "watch", watch)
    next(iter(collector))
    begun = requests()
    time.sleep(0.2)
    assert requests() > begun
    with pytest.raises(WeightMismatchError, match="Other values"):
        sender.update_weights(verify=True)
    assert sent[0] == sent[1]
    assert collector.policy_version == versions_of(collector).of("1") == 1
    report = sender.update_weights(verify=False)
    assert collector.policy_version == versions_of(collector).of(report.version) == 2
    assert versions_of(collector).of("1") == 1
    collector.shutdown()
    recorder.close()
    (run,) = read_runs([Recording.open(tmp_path / "recording")])
    updates = [(event["version"], event["transport"]) for event in run.updates]
    assert updates == [(1, ""), (2, "disk")]
