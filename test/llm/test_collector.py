"""The whole loop as TorchRL runs it: LLMCollector, ChatEnv, and a scheme attached."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.log_probs import TOLERANCE, batch_difference
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_sglang import (
    SGLangLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    attach_weight_sync,
)
from torchrl_sglang.errors import ConfigurationError, WeightSyncStateError
from torchrl_sglang.testing.tiny_model import make_tiny_model

QUERIES = ["hi", "what is 2+2?"]


def make_env(tokenizer) -> ChatEnv:
    batches = [
        TensorDict(query=list(QUERIES), batch_size=(len(QUERIES),)) for _ in range(8)
    ]
    return ChatEnv.from_dataloader(
        dataloader=batches,
        batch_size=(len(QUERIES),),
        tokenizer=tokenizer,
        input_mode="history",
    )


def make_collector(engine, tokenizer, kind=LLMCollector, **kwargs) -> Any:
    policy = SGLangWrapper(
        engine,
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 8},
        return_generation_info=True,
    )
    options = {"track_policy_version": True, **kwargs}
    return kind(
        partial(make_env, tokenizer),
        policy=policy,
        dialog_turns_per_batch=len(QUERIES),
        total_dialog_turns=100,
        **options,
    )


@pytest.fixture
def new_model(tokenizer):
    return make_tiny_model(tokenizer, seed=11)


def test_collect_update_collect(restored_engine, hf_model, new_model, tokenizer):
    engine = restored_engine
    collector = make_collector(engine, tokenizer)
    scheme = SGLangWeightSyncScheme(engine)
    scheme.create_sender().register_model(new_model)
    collector._setup_weight_sync(None, {"policy": scheme})
    batches = iter(collector)

    data = next(batches).reshape(-1)
    assert batch_difference(data, hf_model) < TOLERANCE
    assert batch_difference(data, new_model) > 0.1
    assert data["history"].full[0].content[0] == QUERIES[0]
    before = int(engine.weight_version) if engine.weight_version.isdigit() else 0
    assert collector.policy_version == 0
    collector.update_policy_weights_()
    assert collector.policy_version == 1
    assert engine.weight_version == str(before + 1)
    data = next(batches).reshape(-1)
    assert batch_difference(data, new_model) < TOLERANCE

    # The same count when the sender is called directly.
    scheme.create_sender().update_weights()
    assert collector.policy_version == 2
    # Weights that are given win over the registered model's.
    collector.update_policy_weights_(hf_model)
    assert collector.policy_version == 3
    data = next(batches).reshape(-1)
    assert batch_difference(data, hf_model) < TOLERANCE
    collector.shutdown()
    scheme.shutdown()


def newest_version(engine) -> int:
    """The greatest version that the engine's server has had, as a number."""
    (version,) = SGLangWeightSyncScheme(engine).create_receiver().weight_versions()
    return int(version) if version.isdigit() else 0


@pytest.fixture
def scheme(restored_engine, new_model):
    scheme = SGLangWeightSyncScheme(restored_engine)
    scheme.create_sender().register_model(new_model)
    yield scheme
    scheme.shutdown()


def test_the_collector_takes_schemes(
    scheme, restored_engine, hf_model, new_model, tokenizer
):
    collector = make_collector(
        restored_engine,
        tokenizer,
        SGLangLLMCollector,
        weight_sync_schemes={"policy": scheme},
    )
    assert collector.last_sync_report is None
    batches = iter(collector)
    for count, (arguments, model) in enumerate(
        [
            ({}, new_model),
            ({"policy": hf_model}, hf_model),
            ({"weights": new_model.state_dict()}, new_model),
            ({"weights_dict": {"policy": hf_model}}, hf_model),
        ],
        start=1,
    ):
        report = collector.update_policy_weights_(**arguments)
        assert collector.policy_version == count
        assert collector.last_sync_report is report
        assert restored_engine.weight_version == report.version
        assert batch_difference(next(batches).reshape(-1), model) < TOLERANCE
    collector.shutdown()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": 1, "weights": 2}, "weights and policy were given"),
        ({"model_id": "critic"}, "'critic'"),
        ({"weights_dict": {"policy": 1, "critic": 2}}, "'critic'"),
        ({"worker_ids": 0}, "every SGLang server"),
    ],
)
def test_arguments_that_mean_nothing_here(
    scheme, restored_engine, tokenizer, arguments, message
):
    collector = attach_weight_sync(make_collector(restored_engine, tokenizer), scheme)
    before = newest_version(restored_engine)
    with pytest.raises(ConfigurationError, match=message):
        collector.update_policy_weights_(**arguments)
    assert collector.policy_version == 0
    assert newest_version(restored_engine) == before
    collector.shutdown()


def test_schemes_for_something_else(engine, tokenizer):
    scheme = SGLangWeightSyncScheme(engine)
    for schemes in ({"critic": scheme}, {"policy": object()}, scheme, [scheme]):
        with pytest.raises(ConfigurationError, match="weight_sync_schemes takes"):
            make_collector(
                engine, tokenizer, SGLangLLMCollector, weight_sync_schemes=schemes
            )
    for other in (engine, SGLangWeightSyncScheme, None, "http://127.0.0.1:30000"):
        with pytest.raises(
            ConfigurationError, match="takes an SGLangWeightSyncScheme, got"
        ):
            attach_weight_sync(object(), other)


def test_every_way_of_calling_counts_once(scheme, restored_engine, tokenizer):
    """Two collectors share a scheme, and one of them is known in two ways."""
    sender = scheme.create_sender()
    first, second = (
        attach_weight_sync(make_collector(restored_engine, tokenizer), scheme)
        for _ in range(2)
    )
    sender.register_collector(first)
    ways = [
        sender.update_weights,
        first.update_policy_weights_,
        second.update_policy_weights_,
        lambda: first.update_policy_weights_(sender.resolve()),
        sender.recover,
    ]
    for count, update in enumerate(ways, start=1):
        before = newest_version(restored_engine)
        report = update()
        assert first.policy_version == second.policy_version == count
        assert int(report.version) == max(before + 1, count)
        assert first.last_sync_report is second.last_sync_report is report
    # TorchRL's own path, of which no collector is the caller.
    scheme.init_on_sender(model_id="policy")
    scheme.connect()
    scheme.send()
    assert first.policy_version == second.policy_version == len(ways) + 1
    first.shutdown()
    second.shutdown()


def test_a_scheme_set_up_as_torchrl_does_counts_once(
    scheme, restored_engine, tokenizer
):
    sender = scheme.create_sender()
    own = make_collector(restored_engine, tokenizer)
    own._setup_weight_sync(None, {"policy": scheme})
    other = make_collector(restored_engine, tokenizer)
    sender.register_collector(own)
    sender.register_collector(other)
    for count, update in enumerate(
        [own.update_policy_weights_, sender.update_weights], start=1
    ):
        update()
        assert own.policy_version == other.policy_version == count
        assert own.last_sync_report is sender.last_report
    own.shutdown()
    other.shutdown()


def test_an_update_that_fails_counts_nothing(scheme, restored_engine, tokenizer):
    collector = attach_weight_sync(make_collector(restored_engine, tokenizer), scheme)
    before = newest_version(restored_engine)
    with pytest.raises(ValueError, match="do not fit"):
        collector.update_policy_weights_({"nope": torch.zeros(2)})
    assert collector.policy_version == 0
    assert collector.last_sync_report is None
    assert newest_version(restored_engine) == before
    collector.shutdown()


def test_versions_of_engine_collector_and_tokens_agree(
    scheme, restored_engine, tokenizer
):
    collector = attach_weight_sync(make_collector(restored_engine, tokenizer), scheme)
    start = newest_version(restored_engine) + 50
    collector.policy_version_tracker.version = start
    batches = iter(collector)
    for version in (start + 1, start + 2):
        report = collector.update_policy_weights_()
        assert collector.policy_version == version
        assert report.version == restored_engine.weight_version == str(version)
        data = next(batches).reshape(-1)
        assert data["next", "policy_version"].unique().tolist() == [version]
        of_tokens = data.get(("generation_info", "weight_version"), as_list=True)
        responses = data.get(("tokens", "response"), as_list=True)
        for versions, response in zip(of_tokens, responses, strict=True):
            assert versions.tolist() == [version] * len(response)
    # A collector that is behind does not have versions come back.
    collector.policy_version_tracker.version = 3
    assert collector.update_policy_weights_().version == str(start + 3)
    assert collector.policy_version == 4
    collector.shutdown()


def test_versions_that_are_no_numbers(scheme, restored_engine, tokenizer):
    tracker = PolicyVersion(version_type="uuid")
    collector = attach_weight_sync(
        make_collector(restored_engine, tokenizer, track_policy_version=tracker),
        scheme,
    )
    before = collector.policy_version
    newest = newest_version(restored_engine)
    assert collector.update_policy_weights_().version == str(newest + 1)
    assert collector.policy_version != before
    assert len(tracker.version_history) == 2
    collector.shutdown()


class Gone:
    """A collector that ended."""

    policy_version = 1

    def increment_version(self):
        raise ConnectionError("the actor is gone")


def test_a_collector_that_cannot_count_is_refused(scheme, restored_engine, tokenizer):
    sender = scheme.create_sender()
    gone = Gone()
    sender.register_collector(gone)
    collector = attach_weight_sync(make_collector(restored_engine, tokenizer), scheme)
    with pytest.raises(WeightSyncStateError, match="Gone: the actor is gone"):
        sender.update_weights()
    assert collector.policy_version == 1
    assert collector.last_sync_report.version == restored_engine.weight_version
    collector.shutdown()


def test_without_a_registered_model_nothing_is_counted(restored_engine, tokenizer):
    """The inference wrapper has no parameters; sending those would send nothing."""
    collector = make_collector(restored_engine, tokenizer)
    scheme = SGLangWeightSyncScheme(restored_engine)
    collector._setup_weight_sync(None, {"policy": scheme})
    with pytest.raises(WeightSyncStateError, match="give the model that is trained"):
        collector.update_policy_weights_()
    attach_weight_sync(collector, scheme)
    with pytest.raises(WeightSyncStateError, match="give the model that is trained"):
        collector.update_policy_weights_()
    assert collector.policy_version == 0
    collector.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_collector_on_ray(
    scheme, restored_engine, hf_model, new_model, tokenizer, ray_here, caplog
):
    """The trainer sends, and the actor counts and has the new weights."""
    collector = make_collector(
        restored_engine, tokenizer, RayLLMCollector, remote_config={"num_cpus": 1}
    )
    start = newest_version(restored_engine)
    assert batch_difference(collector.next().reshape(-1), hf_model) < TOLERANCE
    sender = scheme.create_sender()
    attach_weight_sync(collector, scheme)
    sender.register_collector(collector)
    for count, update in enumerate(
        [sender.update_weights, collector.update_policy_weights_], start=1
    ):
        report = update()
        assert collector.policy_version == count
        assert collector.last_sync_report is report
        assert report.version == str(max(start, 0) + count)
        data = collector.next().reshape(-1)
        assert batch_difference(data, new_model) < TOLERANCE
        assert data["next", "policy_version"].unique().tolist() == [count]
        versions = data.get(("generation_info", "weight_version"), as_list=True)
        assert {int(v) for each in versions for v in each} == {int(report.version)}
    # One whose actor has ended is forgotten, and said to be so once.
    before = newest_version(restored_engine)
    ray_here.kill(collector._collector)
    for count in (1, 2):
        assert sender.update_weights().version == str(before + count)
    assert caplog.text.count("has ended and counts no more weight updates") == 1
