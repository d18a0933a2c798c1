"""The whole loop as TorchRL runs it: LLMCollector, ChatEnv, and a scheme attached."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss

from torchrl_sglang import SGLangWeightSyncScheme, SGLangWrapper
from torchrl_sglang.errors import WeightSyncStateError
from torchrl_sglang.testing.tiny_model import make_tiny_model

TOLERANCE = 1e-4
QUERIES = ["hi", "what is 2+2?"]


def make_collector(engine, tokenizer, **kwargs) -> LLMCollector:
    batches = [
        TensorDict(query=list(QUERIES), batch_size=(len(QUERIES),)) for _ in range(8)
    ]
    env = ChatEnv.from_dataloader(
        dataloader=batches,
        batch_size=(len(QUERIES),),
        tokenizer=tokenizer,
        input_mode="history",
    )
    policy = SGLangWrapper(
        engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8}
    )
    return LLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=len(QUERIES),
        total_dialog_turns=100,
        track_policy_version=True,
        **kwargs,
    )


def response_error(data, model) -> float:
    """Greatest difference of the collected log-probs from a model's."""
    worst = 0.0
    for full, response, log_probs in zip(
        data.get(("tokens", "full"), as_list=True),
        data.get(("tokens", "response"), as_list=True),
        data.get(("log_probs", "response"), as_list=True),
        strict=True,
    ):
        with torch.no_grad():
            logits = model(full[None]).logits[0, -len(response) - 1 : -1]
        reference = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        worst = max(worst, float((log_probs - reference).abs().max()))
    return worst


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
    assert response_error(data, hf_model) < TOLERANCE
    assert response_error(data, new_model) > 0.1
    assert data["history"].full[0].content[0] == QUERIES[0]
    before = int(engine.weight_version) if engine.weight_version.isdigit() else 0
    assert collector.policy_version == 0
    collector.update_policy_weights_()
    assert collector.policy_version == 1
    assert engine.weight_version == str(before + 1)
    data = next(batches).reshape(-1)
    assert response_error(data, new_model) < TOLERANCE

    # The same count when the sender is called directly.
    scheme.create_sender().update_weights()
    assert collector.policy_version == 2
    # Weights that are given win over the registered model's.
    collector.update_policy_weights_(hf_model)
    assert collector.policy_version == 3
    data = next(batches).reshape(-1)
    assert response_error(data, hf_model) < TOLERANCE
    collector.shutdown()
    scheme.shutdown()


def test_without_a_registered_model_nothing_is_counted(restored_engine, tokenizer):
    """The inference wrapper has no parameters; sending those would send nothing."""
    collector = make_collector(restored_engine, tokenizer)
    scheme = SGLangWeightSyncScheme(restored_engine)
    collector._setup_weight_sync(None, {"policy": scheme})
    with pytest.raises(WeightSyncStateError, match="register the model"):
        collector.update_policy_weights_()
    assert collector.policy_version == 0
    collector.shutdown()


def test_collected_data_trains(engine, hf_model, tokenizer):
    """GRPOLoss takes the data as it is; at the first step all ratios are one."""
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=2)
    collector = make_collector(engine, tokenizer, replay_buffer=buffer)
    next(iter(collector), None)
    data = buffer.sample(2)
    data.set(
        "advantage",
        torch.ones(data.get(("tokens", "full"), as_padded_tensor=True).shape)[
            ..., None
        ],
    )
    actor = TransformersWrapper(
        hf_model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=False,
    )
    loss = GRPOLoss(actor_network=actor, masking_strategy="rlhf")
    out = loss(data)
    assert out.loss_objective.isfinite()
    # All ratios are one, so nobody learns anything about the ratio yet.
    assert abs(float(out.kl_approx)) < TOLERANCE
    assert float(out.clip_fraction) == 0.0
    out.loss_objective.backward()
    assert all(
        parameter.grad is not None
        for name, parameter in hf_model.named_parameters()
        if "layers" in name
    )
    collector.shutdown()
