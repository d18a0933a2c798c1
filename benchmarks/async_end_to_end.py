r"""Steps per hour of GRPO with a synchronous and an asynchronous collector.

Trainer and engine have the same shapes, the trainer on the first GPU and the engine
on the second one. A step is a batch of groups whose responses differ in length
(log-normal, from a 64th of the longest on), its GRPO loss, one optimizer step and a
weight update.

Generation alone and training alone, the weight update included, are measured in the
same run. No overlap of the two can be faster than the slower one: that is the bound,
and overlap efficiency is its share of the measured time.

    python benchmarks/async_end_to_end.py 0.5b
    python benchmarks/async_end_to_end.py tiny --device cpu --groups 4 --new-tokens 64 \
        --in-flight 32
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDictBase, set_list_to_stack
from torch.utils.data import DataLoader
from torchrl import logger as torchrl_logger
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoConfig, AutoModelForCausalLM

from script import print_row, read_options
from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    CorrectedGRPOLoss,
    SGLangLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.cli.bench.measure import (
    GROUP_SIZE,
    Clock,
    Load,
    OwnLengths,
    fill,
    long_tailed,
    make_env,
    reward,
    start_engine,
)

TRAINING_KEYS = ("tokens", "masks", "log_probs")
Step = Callable[[TensorDictBase], None]


class Trainer:
    """Takes one GRPO step on each batch.

    Args:
        engine: serves the shapes that are trained.
        device: to train on.
        size: responses of a forward pass.
    """

    def __init__(self, engine: AsyncSGLang, device: str, *, size: int) -> None:
        config = AutoConfig.from_pretrained(engine.model_path)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._device = device
        self._size = size
        actor = TransformersWrapper(
            self.model,
            tokenizer=engine.get_tokenizer(),
            input_mode="tokens",
            generate=False,
        )
        self._loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False)
        # A rate that keeps random weights as they are: the work is the same.
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-7, weight_decay=0.0
        )

    def train(self, batch: TensorDictBase) -> None:
        """Takes a step; the device is done with it at the end."""
        rewards = batch["next", "reward"].view(-1, GROUP_SIZE)
        scale = rewards.std(-1, keepdim=True).clamp_min(1e-6)
        advantage = (rewards - rewards.mean(-1, keepdim=True)) / scale
        rows = batch.select(*TRAINING_KEYS).set("advantage", advantage.view(-1, 1, 1))
        parts = rows.split(self._size)
        self._loss.accumulate(part.to(self._device) for part in parts)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device != "cpu":
            torch.cuda.synchronize()


class Benchmark:
    """Measures seconds per step.

    Args:
        engine: generates.
        arguments: of the command line.
    """

    def __init__(self, engine: AsyncSGLang, arguments: argparse.Namespace) -> None:
        self._engine = engine
        self._groups = arguments.groups
        self._turns = arguments.groups * GROUP_SIZE
        self._in_flight = arguments.in_flight
        self._warmup = arguments.warmup
        self._steps = arguments.steps
        self._lengths = long_tailed(
            Load(
                prompts=self._turns * (self._warmup + self._steps),
                new_tokens=arguments.new_tokens,
            )
        )
        source = random.Random(0)
        self._tasks = [
            {"query": "".join(source.choices(string.ascii_letters, k=64))}
            for _ in range(len(self._lengths) // GROUP_SIZE)
        ]
        device = "cpu" if arguments.device == "cpu" else "cuda:0"
        self._trainer = Trainer(engine, device, size=arguments.minibatch)
        self._scheme = SGLangWeightSyncScheme(engine)
        self._sender = self._scheme.create_sender()
        self._sender.register_model(self._trainer.model)
        self._sender.update_weights()

    @property
    def tokens(self) -> float:
        """Response tokens of a step, in the mean."""
        return sum(self._lengths) / (self._warmup + self._steps)

    def close(self) -> None:
        self._scheme.shutdown()

    def generate_alone(self) -> tuple[float, list[TensorDictBase]]:
        """Returns seconds per step with the engine always full, and the batches."""
        # More than is measured, so that the engine is full to the end.
        more = -(-self._in_flight // self._turns)
        total = (self._warmup + self._steps + more) * self._groups
        buffer = ReplayBuffer(storage=LazyStackStorage(total * GROUP_SIZE))
        collector = self._make_async(
            max_staleness=1, groups_per_batch=total, replay_buffer=buffer
        )
        with collector:
            collector.start()
            fill(collector, buffer, self._warmup * self._turns)
            clock = Clock()
            fill(collector, buffer, (self._warmup + self._steps) * self._turns)
            seconds = clock.stop(1).seconds
        batches = [
            buffer[number * self._turns : (number + 1) * self._turns]
            for number in range(self._warmup + self._steps)
        ]
        return seconds / self._steps, batches

    def train_alone(self, batches: list[TensorDictBase]) -> float:
        """Returns seconds per step on batches that exist, weight updates included."""

        def step(batch: TensorDictBase) -> None:
            self._trainer.train(batch)
            self._sender.update_weights()

        return self._time(iter(batches), step)

    def train_synchronously(self) -> float:
        """Returns seconds per step with ``SGLangLLMCollector``."""
        loader = DataLoader(self._tasks, batch_size=self._groups)
        env = ChatEnv.from_dataloader(
            loader,
            tokenizer=self._engine.get_tokenizer(),
            batch_size=(self._turns,),
            repeats=GROUP_SIZE,
        )
        with warnings.catch_warnings():
            # It lacks a transform that only TorchRL's own wrappers need.
            warnings.simplefilter("ignore", FutureWarning)
            collector = SGLangLLMCollector(
                make_env(env=env),
                policy=self._make_policy(),
                dialog_turns_per_batch=self._turns,
                weight_sync_schemes={"policy": self._scheme},
            )
        batches = (batch.view(-1) for batch in collector)
        return self._time(batches, self._train_and_update(collector))

    def train_asynchronously(self, max_staleness: int) -> float:
        """Returns seconds per step with ``AsyncLLMCollector``."""
        collector = self._make_async(
            max_staleness=max_staleness,
            groups_per_batch=self._groups,
            weight_sync_schemes={"policy": self._scheme},
        )
        with collector:
            return self._time(iter(collector), self._train_and_update(collector))

    def _make_policy(self) -> SGLangWrapper:
        policy = SGLangWrapper(self._engine)
        policy.model = OwnLengths(self._engine, self._lengths)
        return policy

    def _make_async(self, **options: Any) -> AsyncLLMCollector:
        return AsyncLLMCollector(
            policy=self._make_policy(),
            prompts=self._tasks,
            rewards=reward,
            group_size=GROUP_SIZE,
            max_in_flight=self._in_flight,
            **options,
        )

    def _train_and_update(self, collector: Any) -> Step:
        def step(batch: TensorDictBase) -> None:
            self._trainer.train(batch)
            collector.update_policy_weights_()

        return step

    def _time(self, batches: Iterator[TensorDictBase], step: Step) -> float:
        """Returns seconds per step, after those that warm up."""
        for batch in itertools.islice(batches, self._warmup):
            step(batch)
        clock = Clock()
        for batch in itertools.islice(batches, self._steps):
            step(batch)
        return clock.stop(1).seconds / self._steps


def report(name: str, seconds: float, bound: float | None = None) -> None:
    """Prints a row of the table."""
    share = () if bound is None else (bound / seconds,)
    print_row(name, seconds, round(3600 / seconds), *share)


def main() -> None:
    arguments = read_options(
        __doc__,
        model="tiny",
        device="cuda|cpu",
        groups=32,
        new_tokens=512,
        in_flight=256,
        minibatch=8,
        steps=6,
        warmup=2,
        staleness=(0, 1, 2, 4),
    )
    set_list_to_stack(True).set()
    # Without a line for each weight update.
    torchrl_logger.setLevel("WARNING")
    options: dict[str, Any] = {"max_running_requests": arguments.in_flight}
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    else:
        # Weights of 32 bits, multiplied by Tensor Cores.
        torch.set_float32_matmul_precision("high")
        options["base_gpu_id"] = 1
    with start_engine(arguments.model, device=arguments.device, **options) as engine:
        benchmark = Benchmark(engine, arguments)
        print(
            f"{arguments.model} on {arguments.device}: {arguments.groups} groups of "
            f"{GROUP_SIZE} a step, {benchmark.tokens:,.0f} response tokens, up to "
            f"{arguments.new_tokens} each"
        )
        print_row("", "s a step", "steps/hour", "efficiency")
        generating, batches = benchmark.generate_alone()
        report("generation alone", generating)
        training = benchmark.train_alone(batches)
        report("training alone", training)
        batches.clear()
        bound = max(generating, training)
        report("bound", bound, bound)
        report("SGLangLLMCollector", benchmark.train_synchronously(), bound)
        for k in arguments.staleness:
            seconds = benchmark.train_asynchronously(k)
            report(f"AsyncLLM, k = {k}", seconds, bound)
        benchmark.close()


if __name__ == "__main__":
    main()
