"""The training loop of both scripts.

A synchronous and an asynchronous run differ by ``train.max_staleness`` alone: how many
weight updates the collector may be ahead of the trainer.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger
from transformers.utils.logging import disable_progress_bar

from grpo_checkpoint import (
    Checkpoints,
    forget_later_steps,
    random_state,
    set_random_state,
)
from grpo_config import flatten
from grpo_data import RIGHT, Problem, evaluate, load_problems
from grpo_learner import Learner, check_learner
from grpo_utils import (
    check_logger,
    find_model,
    get_inference_model,
    get_ref_model,
    get_tokenizer,
    get_train_model,
    make_collector,
    make_logger,
    make_weight_sync_scheme,
    memory_for_training,
    sampling_parameters,
    save_model,
)

PHASES = {
    "collect": "Generation",
    "train": "Training",
    "update": "Sending weights",
    "evaluate": "Evaluation",
    "save": "Writing checkpoints",
}
"""Phase of the trainer -> what bounds a run that it takes the longest of.

A trainer that collects waits for responses."""

STEP = ("collect", "train", "update")
"""Phases of each step."""


class Clock:
    """Adds up the seconds of each phase of the trainer."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(PHASES, 0.0)
        self.last = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()

    def done(self, phase: str) -> None:
        """Counts the time since the last call as one phase."""
        now = time.perf_counter()
        self.last[phase] = now - self._start
        self.totals[phase] += self.last[phase]
        self._start = now


def summarize(totals: Mapping[str, float], bottleneck: str, *, sync: bool) -> str:
    """Says in a line what bounded a run.

    Args:
        totals: seconds of each phase of the trainer.
        bottleneck: what the collector says.
        sync: whether one phase waits for the other, so that the longest one counts.

    Examples:
        >>> totals = {"collect": 6.0, "train": 3.0, "update": 1.0}
        >>> summarize(totals, "Training bounds the run.", sync=True)
        'Generation bounds the run (collect 60%, train 30%, update 10%).'
        >>> summarize({**totals, "save": 10.0}, "Training bounds the run.", sync=False)
        'Writing checkpoints bounds the run (collect 30%, train 15%, update 5%, \
save 50%).'
    """
    total = sum(totals.values()) or 1.0
    shares = ", ".join(f"{name} {each / total:.0%}" for name, each in totals.items())
    sentence, longest = bottleneck, max(totals, key=lambda phase: totals[phase])
    # The collector does not know what else the trainer does.
    elsewhere = longest not in STEP
    if elsewhere or (sync and not bottleneck.startswith("The environment")):
        sentence = f"{PHASES[longest]} bounds the run."
    return f"{sentence.rstrip('.')} ({shares})."


class Run:
    """A run, from its configuration to its last checkpoint.

    Args:
        cfg: the configuration.
        stack: ends what the run starts.
    """

    def __init__(self, cfg: DictConfig, stack: ExitStack) -> None:
        self.cfg = cfg
        self.folder = Path(cfg.logging.dir)
        self.checkpoints = Checkpoints(
            self.folder / "checkpoints", keep=cfg.logging.keep_checkpoints
        )
        saved = self.checkpoints.load(cfg)
        self.step = saved["step"] if saved else 0
        # What is wrong is found before servers are started, which takes minutes.
        check_logger(cfg)
        check_learner(cfg)
        path = find_model(cfg, self.folder)
        self.tokenizer = get_tokenizer(path)
        problems = load_problems(cfg, "train")
        self.held_out: list[Problem] = []
        if cfg.logging.eval_frequency is not None:
            self.held_out = load_problems(cfg, "test")[: cfg.logging.eval_problems]
        self.policy = stack.enter_context(
            get_inference_model(cfg, path, self.tokenizer)
        )
        self.engine = self.policy.model
        self.model = get_train_model(cfg, path)
        self.learner = Learner(
            cfg, self.model, self.tokenizer, get_ref_model(cfg, path)
        )
        if saved:
            self.learner.load_state_dict(saved["learner"])
        scheme = make_weight_sync_scheme(cfg, self.engine)
        stack.callback(scheme.shutdown)
        sender = scheme.create_sender()
        sender.register_model(self.model)
        # Trainer and servers have the same weights from the first token on.
        sender.update_weights()
        self.collector = make_collector(cfg, self.policy, scheme, problems)
        stack.callback(self.collector.shutdown)
        self.logger = self._make_logger(saved)
        self._rollouts = self._open_rollouts(stack)
        if saved:
            self.collector.load_state_dict(saved["collector"])
            set_random_state(saved["random"])
            print(f"goes on after step {self.step}", flush=True)
        self.clock = Clock()

    def _make_logger(self, saved: dict[str, Any] | None) -> Any:
        # A run that was killed before its first checkpoint begins again.
        scalars = (self.folder / "logs").rglob("*.csv")
        last = -1 if saved is None else self.step
        forget_later_steps(self.folder / "rollouts.jsonl", scalars, last)
        backend, state = self.cfg.logging.backend, None
        if saved is not None and saved["config"]["logging"]["backend"] == backend:
            state = saved["logger"]
        logger = make_logger(self.cfg, self.folder, state)
        if state is None and logger is not None:
            logger.log_hparams(flatten(self.cfg))
        return logger

    def _open_rollouts(self, stack: ExitStack) -> TextIO | None:
        if not self.cfg.logging.save_rollouts:
            return None
        return stack.enter_context((self.folder / "rollouts.jsonl").open("a"))

    def loop(self) -> None:
        """Collects, trains and sends weights until all prompts are done."""
        if self.step == 0 and self.held_out:
            self._log(self._evaluate(), 0)
        for batch in self.collector:
            self.clock.done("collect")
            self.step += 1
            metrics = describe(batch, self.collector.policy_version)
            OmegaConf.save(self.cfg, self.folder / "config.yaml", resolve=True)
            self._write_rollouts(batch)
            with memory_for_training(self.cfg, self.engine):
                metrics |= self.learner.train(batch, self.collector.policy_version)
            self.clock.done("train")
            if self._ends_an_update():
                self.collector.update_policy_weights_()
                self.engine.wake_up()
            self.clock.done("update")
            if self._is_due("eval_frequency") and self.held_out:
                metrics |= self._evaluate()
            self._log(metrics | self._times(metrics), self.step)
            if self._is_due("checkpoint_frequency"):
                self._save()

    def finish(self) -> None:
        """Saves what was learned, and says what bounded the run."""
        every = self.cfg.logging.checkpoint_frequency
        if every is not None and self.step % every:
            self._save()
        if self.cfg.logging.save_model:
            save_model(self.model, self.policy, self.folder / "model")
        line = summarize(
            self.clock.totals,
            self.collector.stats()["bottleneck"],
            sync=self.cfg.train.sync,
        )
        print(f"{self.step} steps, written to {self.folder}. {line}", flush=True)

    def _ends_an_update(self) -> bool:
        last = self.step >= len(self.collector)
        return last or self.step % self.cfg.train.weight_update_frequency == 0

    def _is_due(self, name: str) -> bool:
        frequency = self.cfg.logging[name]
        return frequency is not None and self.step % frequency == 0

    def _evaluate(self) -> dict[str, float]:
        sampling = {**sampling_parameters(self.cfg), "temperature": 0.0, "top_p": 1.0}
        greedy = self.policy.get_new_version(generate_kwargs=sampling)
        metrics = evaluate(self.cfg, greedy, self.held_out)
        self.clock.done("evaluate")
        return metrics

    def _times(self, metrics: dict[str, float]) -> dict[str, float]:
        seconds = {f"time/{name}": self.clock.last[name] for name in STEP}
        total = sum(seconds.values())
        return {**seconds, "time/tokens_per_second": metrics["batch/tokens"] / total}

    def _log(self, metrics: dict[str, float], step: int) -> None:
        if self.logger is not None:
            self.logger.log_metrics(metrics, step=step)
        shown = (
            ("reward", "batch/reward"),
            ("right", "batch/right"),
            ("accuracy", "eval/accuracy"),
            ("tokens/s", "time/tokens_per_second"),
        )
        words = [f"{name} {metrics[key]:.3g}" for name, key in shown if key in metrics]
        print(f"step {step}: {', '.join(words)}", flush=True)

    def _write_rollouts(self, batch: TensorDictBase) -> None:
        if self._rollouts is None:
            return
        columns = {
            "index": batch["index"].flatten().tolist(),
            "prompt": batch["query"],
            "response": batch["text"].response,
            "reward": batch["next", "reward"].flatten().tolist(),
            "policy_version": batch["next", "policy_version"].flatten().tolist(),
        }
        for values in zip(*columns.values(), strict=True):
            row = {"step": self.step, **dict(zip(columns, values, strict=True))}
            self._rollouts.write(f"{json.dumps(row)}\n")
        self._rollouts.flush()

    def _save(self) -> None:
        logger = None if self.logger is None else self.logger.state_dict()
        self.checkpoints.save(
            self.step,
            {
                "step": self.step,
                "learner": self.learner.state_dict(),
                "collector": self.collector.state_dict(),
                "random": random_state(),
                "logger": logger,
                "config": OmegaConf.to_container(self.cfg, resolve=True),
            },
        )
        self.clock.done("save")


def describe(batch: TensorDictBase, policy_version: int) -> dict[str, float]:
    """Returns metrics of a batch before it is trained on.

    Args:
        batch: as a collector yields it.
        policy_version: of the trainer's weights.
    """
    rewards = batch["next", "reward"].flatten()
    lengths = [len(each) for each in batch.get(("tokens", "response"), as_list=True)]
    ages = policy_version - batch["next", "policy_version"].flatten().float()
    return {
        "batch/reward": rewards.mean().item(),
        "batch/right": (rewards == RIGHT).float().mean().item(),
        "batch/tokens": float(sum(lengths)),
        "batch/response_tokens": sum(lengths) / len(lengths),
        "batch/age": ages.mean().item(),
        "batch/age_max": ages.max().item(),
    }


def train(cfg: DictConfig) -> None:
    """Trains as the configuration says.

    Args:
        cfg: the configuration, checked.
    """
    # From TorchRL, about its own use of PyTorch.
    warnings.filterwarnings("ignore", "size_average and reduce args", UserWarning)
    torchrl_logger.setLevel("WARNING")
    disable_progress_bar()
    torch.manual_seed(cfg.train.seed)
    if cfg.train_model.num_threads is not None:
        torch.set_num_threads(cfg.train_model.num_threads)
    with ExitStack() as stack:
        run = Run(cfg, stack)
        run.loop()
        run.finish()
