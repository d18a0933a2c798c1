"""The run of ``real_model.py`` with TorchRL's own parts, as far as they run.

Its ``LLMCollector``, ``SGLangWrapper``, ``MCAdvantage`` and ``GRPOLoss`` take steps.
Its weight-sync scheme is tried last: NCCL joins the trainer with servers on other GPUs.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, LazyStackStorage, ReplayBuffer, Unbounded
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import StepCounter, Transform
from torchrl.modules.llm import SGLangWrapper, TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from torchrl.weight_update.llm import SGLangWeightSyncScheme, get_model_metadata
from transformers import AutoModelForCausalLM

UPDATE_TIMEOUT = 60.0
"""Seconds for the try of a weight update."""


class Score(Transform):
    """Rewards a response as the task does."""

    def __init__(self, score: Callable[..., float], tasks: Mapping[str, Any]) -> None:
        super().__init__(in_keys=[("text", "response"), "query"], out_keys=["reward"])
        self._score, self._tasks = score, tasks

    def _step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        class Conversation:
            response = ""

        rewards = []
        queries = tensordict["query"]
        for text, query in zip(tensordict["text", "response"], queries, strict=True):
            Conversation.response = text.removesuffix("<|im_end|>")
            rewards.append(self._score(Conversation, self._tasks[query]))
        reward = torch.tensor(rewards).view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", reward)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def run(
    name: str,
    engine: Any,
    options: argparse.Namespace,
    arguments_of: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Trains for so many seconds, and returns what was measured.

    Args:
        name: of the run.
        engine: whose server generates.
        options: of the command line.
        arguments_of: returns the arguments of ``GRPO`` of a run.
    """
    set_list_to_stack(True).set()
    given = arguments_of(name.replace("torchrl", "sync"), options)
    device = "cuda" if options.device == "cuda" else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model = model.to(device).eval()
    tokenizer = engine.get_tokenizer()
    group, turns = given["group_size"], given["group_size"] * given["groups_per_batch"]
    collector = make_collector(engine, tokenizer, given, turns)
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
    )
    loss = GRPOLoss(actor, clip_epsilon=0.2, masking_strategy="sft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"], weight_decay=0.0)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(turns),
        sampler=SamplerWithoutReplacement(),
        batch_size=16,
    )
    buffer.append_transform(MCAdvantage(grpo_size=group, prompt_key="query"))
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for batch in collector:
        collected = time.perf_counter()
        rewards = batch["next", "reward"]
        buffer.empty()
        buffer.extend(batch.view(-1))
        train(buffer, loss, optimizer, turns, device)
        now = time.perf_counter()
        last = rows[-1]["seconds"] if rows else 0.0
        rows.append(
            {
                "step": len(rows) + 1,
                "seconds": now - begin,
                "batch/reward": rewards.mean().item(),
                "time/collect": collected - begin - last,
                "time/train": now - collected,
            }
        )
        print(f"{name}: step {len(rows)}, {now - begin:.0f} s", flush=True)
        if now - begin > options.seconds:
            break
    found = {"rows": [{"step": 0, "seconds": 0.0}, *rows]}
    return found | {"update": try_update(engine, model, device)}


def make_collector(engine: Any, tokenizer: Any, given: Any, turns: int) -> LLMCollector:
    """Returns TorchRL's collector over its environment and wrapper."""
    policy = SGLangWrapper(
        engine.server_url,
        tokenizer=tokenizer,
        input_mode="history",
        generate_kwargs=dict(given["generate_kwargs"]),
        return_log_probs=True,
    )
    tasks = [{"query": each["query"]} for each in given["prompts"]]
    env = ChatEnv.from_dataloader(
        DataLoader(tasks, batch_size=given["groups_per_batch"], shuffle=True),
        repeats=given["group_size"],
        batch_size=(turns,),
        tokenizer=tokenizer,
    )
    env.append_transform(StepCounter(max_steps=1))
    score = given["rewards"]["score"][0]
    env.append_transform(Score(score, {t["query"]: t for t in given["prompts"]}))
    return LLMCollector(
        env, policy=policy, dialog_turns_per_batch=turns, total_dialog_turns=10**9
    )


def train(buffer: Any, loss: Any, optimizer: Any, turns: int, device: str) -> None:
    """Takes an optimizer step on a batch, in parts."""
    parts = turns // 16
    for _ in range(parts):
        rows = lazy_stack(list(buffer.sample().unbind(0))).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            output = loss(rows)
        (output.loss_objective.mean() / parts).backward()
    torch.nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def try_update(engine: Any, model: Any, device: str) -> str:
    """Says what an update by TorchRL's scheme comes to on this machine."""
    result = [f"no end after {UPDATE_TIMEOUT:.0f} s"]

    def update() -> None:
        try:
            scheme = SGLangWeightSyncScheme(
                engine.server_url, master_address="127.0.0.1", num_gpus=1, device=0
            )
            sender = scheme.create_sender()
            sender.register_model(model)
            sender.init_all_workers_group(get_model_metadata(model))
            begin = time.perf_counter()
            # With tied weights, which the metadata has as well.
            sender.update_weights(model.state_dict())
            result[0] = f"{time.perf_counter() - begin:.2f} s"
        except Exception as error:  # noqa: BLE001 - It is the result.
            result[0] = repr(error)[:2000]

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    thread.join(UPDATE_TIMEOUT)
    return result[0]
