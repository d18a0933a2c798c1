"""TorchRL's recipe for GRPO on Ray: its calls, with the imports changed.

What ``sota-implementations/grpo`` of TorchRL calls, asynchronously with two collectors
and synchronously with one, on the tiny model and a CPU: environments with a device,
collectors and replay buffer as actors, training as a task that is handed the policy.
Left out are what needs a GPU (mixed precision, device maps), a data set or a network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from helpers.log_probs import TOLERANCE, difference
from tensordict import TensorDict, set_list_to_stack
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement, Unbounded
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import Transform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang import SGLangWeightSyncScheme, SGLangWrapper, get_model_metadata

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # TorchRL's and Ray's own, about futures and processes.
    pytest.mark.filterwarnings("ignore"),
]

DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Config:
    """The part of the recipe's configuration that says something here."""

    model: str
    sync: bool
    num_envs: int = 2
    repeats: int = 4
    dialog_turns_per_batch: int = 8
    total_dialog_turns: int = 400
    optim_batch_size: int = 8
    gradient_accumulation_steps: int = 2
    steps: int = 4
    max_tokens: int = 8


class LetterReward(Transform):
    """Rewards small letters, a little for each: other for other responses."""

    def _step(self, tensordict, next_tensordict):
        histories = tensordict["history"].full.unbind(0)
        rewards = [
            [[1.0 + sum(letter.islower() for letter in one.content[-1])]]
            for one in histories
        ]
        next_tensordict["reward"] = torch.tensor(rewards, device=tensordict.device)
        done = torch.ones_like(next_tensordict["done"])
        next_tensordict["done"] = next_tensordict["terminated"] = done
        return next_tensordict

    def transform_reward_spec(self, reward_spec):
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def make_env(cfg: Config, single_env: bool = False):
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    num_envs = 1 if single_env else cfg.num_envs
    batches = [
        TensorDict(query=[f"what is {n}+{n}?"] * num_envs, batch_size=(num_envs,))
        for n in range(40)
        for _ in range(cfg.repeats)
    ]
    env = ChatEnv.from_dataloader(
        dataloader=batches,
        batch_size=(num_envs,),
        tokenizer=tokenizer,
        input_mode="history",
        # The device that the recipe's environments have.
        device=torch.device("cpu"),
    )
    return env.append_transform(LetterReward())


def make_policy(cfg: Config, engine) -> SGLangWrapper:
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    tokenizer.padding_side = "left"
    return SGLangWrapper(
        engine,
        input_mode="history",
        chat_template_name="qwen",
        return_log_probs=True,
        tokenizer=tokenizer,
        pad_output=False,
        generate_kwargs={
            "max_new_tokens": cfg.max_tokens,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    )


def make_scheme(engine) -> SGLangWeightSyncScheme:
    return SGLangWeightSyncScheme(
        server_url=engine.server_url,
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        num_gpus=engine.get_tp_size() * engine.get_dp_size(),
        strategy="state_dict",
        device="cpu",
    )


def train(
    replay_buffer: Any, cfg: Config, collectors: list[Any], policy: SGLangWrapper
) -> dict[str, Any]:
    """The recipe's training loop, run as a Ray task; returns its observations."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    set_list_to_stack(True).set()
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    actor = TransformersWrapper(
        model.eval(),
        tokenizer=AutoTokenizer.from_pretrained(cfg.model),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        device=torch.device("cpu"),
    )
    loss_fn = GRPOLoss(
        actor_network=actor,
        kl_to_inference_coeff=1e-2,
        entropy_coeff=1e-4,
        masking_strategy="sft",
        device=torch.device("cpu"),
    )
    scheme = make_scheme(policy.model)
    sender = scheme.create_sender()
    sender.register_model(actor.model)
    sender.init_all_workers_group(get_model_metadata(actor.model))
    sender.update_weights()
    for collector in collectors:
        if not cfg.sync:
            collector.start()
        sender.register_collector(collector)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    seen: dict[str, Any] = {"rewards": [], "ratios": [], "versions": []}

    def learn(batch: Any, step: int) -> None:
        assert batch.device in (None, torch.device("cpu"))
        history = batch.view(-1)[0]["history", "full"]
        assert history.apply_chat_template(tokenizer=actor.tokenizer)
        loss = loss_fn(batch.to("cpu"))
        value = loss.mean(reduce=True) / cfg.gradient_accumulation_steps
        assert torch.isfinite(value)
        value.backward()
        rewards = torch.cat(batch.get(("next", "reward"), as_list=True))
        seen["rewards"] += rewards.flatten().tolist()
        versions = batch["next", "policy_version"].flatten().tolist()
        if step == 0:
            # Before the first step, trainer and engine are the same model.
            seen["ratios"] += [float(loss.ESS), float(loss.kl_approx.abs())]
        seen["versions"] += [int(version) for version in versions]
        if (step + 1) % cfg.gradient_accumulation_steps == 0:
            torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    run = synchronously if cfg.sync else asynchronously
    try:
        run(replay_buffer, cfg, collectors, sender, learn)
        seen["policy_versions"] = [each.policy_version for each in collectors]
        seen["engine_version"] = sender.last_report.version
        seen["state_dict"] = model.state_dict()
    finally:
        for collector in collectors:
            collector.shutdown()
        scheme.shutdown()
    return seen


def asynchronously(replay_buffer, cfg, collectors, sender, learn) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not replay_buffer.write_count:
        assert any(collector.is_running() for collector in collectors)
        assert time.monotonic() < deadline
    size = cfg.optim_batch_size // cfg.gradient_accumulation_steps
    for step in range(cfg.steps):
        assert any(collector.is_running() for collector in collectors)
        learn(replay_buffer.sample(size), step)
        if (step + 1) % cfg.gradient_accumulation_steps == 0:
            sender.update_weights()


def synchronously(replay_buffer, cfg, collectors, sender, learn) -> None:
    (collector,) = collectors
    step = 0
    for data in collector:
        # The collector writes to the buffer itself.
        assert data is None
        if not len(replay_buffer):
            continue
        for batch in replay_buffer:
            learn(batch, step)
            step += 1
        sender.update_weights()
        replay_buffer.empty(empty_write_count=False)
        if step >= cfg.steps:
            return


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_the_recipe(restored_engine, hf_model, tiny_model_path, ray_here, sync):
    engine, ray = restored_engine, ray_here
    cfg = Config(model=tiny_model_path, sync=sync)
    policy = make_policy(cfg, engine)
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, cfg.dialog_turns_per_batch),
        transform_factory=partial(MCAdvantage, grpo_size=cfg.repeats),
        batch_size=cfg.optim_batch_size // cfg.gradient_accumulation_steps,
        remote_config={"num_cpus": 1},
        **({"sampler": SamplerWithoutReplacement} if sync else {}),
    )
    # The recipe hands the buffer itself around, which TorchRL 0.14.1 cannot pickle.
    client = buffer.client()
    collectors = [
        RayLLMCollector(
            env=partial(make_env, cfg, single_env=not sync),
            policy=policy,
            dialog_turns_per_batch=cfg.dialog_turns_per_batch,
            total_dialog_turns=cfg.total_dialog_turns,
            replay_buffer=client,
            ray_init_config=None,
            weight_updater=None,
            track_policy_version=True,
            remote_config={"num_cpus": 1, "num_gpus": 0},
            yield_only_last_steps=False,
            verbose=False,
            **({"sync_iter": True} if sync else {}),
        )
        for _ in range(1 if sync else 2)
    ]
    ray.get([each._collector.is_initialized.remote() for each in collectors])
    task = ray.remote(num_cpus=1)(train).remote(client, cfg, collectors, policy)
    seen = ray.get(task, timeout=DEADLINE_SECONDS * 2)
    assert len(seen["rewards"]) >= cfg.steps * 2
    assert min(seen["rewards"]) >= 1.0
    assert len(set(seen["rewards"])) > 1
    # Each update after the first one is counted by every collector.
    assert len(set(seen["policy_versions"])) == 1
    assert seen["policy_versions"][0] >= cfg.steps // cfg.gradient_accumulation_steps
    assert max(seen["versions"]) <= seen["policy_versions"][0]
    # The engine serves the trainer's last weights.
    hf_model.load_state_dict(seen["state_dict"])
    assert difference(engine, hf_model) < TOLERANCE
