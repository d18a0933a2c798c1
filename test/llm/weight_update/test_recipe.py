"""TorchRL's own recipe for GRPO, with the imports changed and nothing else.

The calls are those of ``sota-implementations/grpo`` in TorchRL 0.14.1.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from torchrl.trainers.algorithms import GRPOTrainer

from torchrl_sglang import SGLangWeightSyncScheme, SGLangWrapper, get_model_metadata
from torchrl_sglang.errors import ConfigurationError, WeightSyncStateError
from torchrl_sglang.testing.tiny_model import make_tiny_model


@pytest.fixture
def policy_training(tokenizer):
    model = make_tiny_model(tokenizer, seed=41, initializer_range=0.05)
    return TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )


def vllm_scheme(engine) -> SGLangWeightSyncScheme:
    """The recipe's function for vLLM; the engine comes later."""
    return SGLangWeightSyncScheme(
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        gpus_per_replica=engine.get_tp_size(),
        num_replicas=getattr(engine, "num_replicas", 1),
        strategy="state_dict",
    )


def sglang_scheme(engine) -> SGLangWeightSyncScheme:
    """The recipe's function for SGLang, but for a device that is no GPU."""
    return SGLangWeightSyncScheme(
        server_url=engine.server_url,
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        num_gpus=engine.get_tp_size() * engine.get_dp_size(),
        strategy="state_dict",
        device="cpu",
    )


class Counter:
    """What the recipe calls of a collector."""

    policy_version = 0

    def increment_version(self):
        self.policy_version += 1


@pytest.mark.parametrize("make_scheme", [vllm_scheme, sglang_scheme])
def test_the_calls_of_the_recipe(restored_engine, policy_training, make_scheme):
    inference_engine = restored_engine
    collector = Counter()
    weight_sync_scheme = make_scheme(inference_engine)
    sender = weight_sync_scheme.create_sender()
    sender.register_model(policy_training.model)
    metadata = get_model_metadata(policy_training.model)
    sender.init_all_workers_group(metadata, vllm_engine=inference_engine)
    sender.register_collector(collector)
    for count in (1, 2):
        sender.update_weights()
        assert collector.policy_version == count
        assert difference(inference_engine, policy_training.model) < TOLERANCE
        with torch.no_grad():
            policy_training.model.lm_head.weight.mul_(-1)
    sender.shutdown()
    assert weight_sync_scheme.engine is inference_engine


def test_arguments_that_do_not_fit_the_engine(engine):
    for arguments, name in (
        ({"gpus_per_replica": 2}, "gpus_per_replica=2"),
        ({"num_replicas": 3}, "num_replicas=3"),
        ({"num_gpus": 4}, "num_gpus=4"),
    ):
        scheme = SGLangWeightSyncScheme(**arguments)
        with pytest.raises(ConfigurationError, match=f"{name}.* has 1"):
            scheme.create_sender().init_all_workers_group(vllm_engine=engine)
        with pytest.raises(ConfigurationError, match=name):
            SGLangWeightSyncScheme(engine, **arguments)
    with pytest.raises(ConfigurationError, match="'zip' is not one of"):
        SGLangWeightSyncScheme(engine, strategy="zip")
    with pytest.raises(ConfigurationError, match="engine once"):
        SGLangWeightSyncScheme(engine, server_url=engine.server_url)
    with pytest.raises(WeightSyncStateError, match="no engine"):
        SGLangWeightSyncScheme().create_sender().update_weights(torch.nn.Linear(2, 2))
    other = SGLangWeightSyncScheme(server_url="http://127.0.0.1:9")
    with pytest.raises(ConfigurationError, match="same engine"):
        other.create_sender().init_all_workers_group(vllm_engine=engine)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(engine):
    """TorchRL's default."""
    for device in (0, "cuda:0"):
        with pytest.raises(ConfigurationError, match="leave it out"):
            SGLangWeightSyncScheme(engine, device=device)


def test_an_address_is_connected_to_when_needed(restored_engine, policy_training):
    scheme = SGLangWeightSyncScheme(server_url=restored_engine.server_url)
    scheme.create_sender().update_weights(policy_training.model)
    assert scheme.engine is not restored_engine
    assert difference(restored_engine, policy_training.model) < TOLERANCE
    scheme.shutdown()


def test_the_trainer_sends(restored_engine, policy_training, tokenizer):
    """``GRPOTrainer`` steps, and the servers have the stepped weights."""
    engine = restored_engine
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4),
        sampler=SamplerWithoutReplacement(),
        batch_size=2,
    )
    env = ChatEnv.from_dataloader(
        dataloader=[TensorDict(query=["a", "b"], batch_size=(2,)) for _ in range(8)],
        batch_size=(2,),
        tokenizer=tokenizer,
        input_mode="history",
    )
    policy = SGLangWrapper(
        engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4}
    )
    collector = LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
        track_policy_version=True,
        postproc=with_advantage,
        flatten_data=True,
    )
    scheme = SGLangWeightSyncScheme(engine)
    sender = scheme.create_sender()
    sender.register_model(policy_training.model)
    sender.init_all_workers_group(
        get_model_metadata(policy_training.model), vllm_engine=engine
    )
    sender.register_collector(collector)
    sender.update_weights()
    before = policy_training.model.lm_head.weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = GRPOTrainer(
            collector=collector,
            total_frames=4,
            optim_steps_per_batch=None,
            loss_module=GRPOLoss(
                actor_network=policy_training, masking_strategy="rlhf"
            ),
            optimizer=torch.optim.SGD(policy_training.parameters(), lr=0.1),
            weight_sync_sender=sender,
            replay_buffer=buffer,
            empty_replay_buffer_on_weight_update=True,
            progress_bar=False,
            log_rewards=False,
            log_kl=False,
        )
        trainer.train()
    assert not torch.equal(policy_training.model.lm_head.weight, before)
    # One for each of two batches, after the first one.
    assert collector.policy_version == 3
    assert collector.last_sync_report.version == engine.weight_version
    assert difference(engine, policy_training.model) < TOLERANCE
    scheme.shutdown()


def with_advantage(data):
    tokens = data.get(("tokens", "full"), as_padded_tensor=True)
    return data.set("advantage", torch.ones(*tokens.shape, 1))
