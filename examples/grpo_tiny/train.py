"""GRPO on two CPU cores: from a mediocre to a good policy in a few minutes.

TorchRL runs the loop (environment, collector, advantage, buffer, loss), SGLang
generates, and after every iteration the server receives the new weights:

    python examples/grpo_tiny/train.py --seed 0 --output runs/grpo_tiny

Trainer and server hold the same float32 weights, so the log-probs that SGLang reports
have to equal the ones that the trainer computes. Every iteration measures the gap.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

import torch
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from torchrl import logger as torchrl_logger
from torchrl.envs import EnvBase
from torchrl.modules.llm import TransformersWrapper
from tqdm import trange
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from task import Problem, make_env, split_problems
from torchrl_sglang import (
    AsyncSGLang,
    CorrectedGRPOLoss,
    GroupAdvantage,
    Learner,
    SGLangLLMCollector,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.testing.tiny_model import make_tiny_model, make_tiny_tokenizer
from warmup import warm_up


@dataclass
class Config:
    """What can be set, here or on the command line."""

    seed: int = 0
    output: Path = Path("runs/grpo_tiny")
    # The model: two layers can find the digits to add and add them.
    hidden_size: int = 64
    num_layers: int = 2
    initializer_range: float = 0.05
    # The warm-up, with a teacher who forgets three carries in five.
    carry_probability: float = 0.4
    warmup_steps: int = 1000
    warmup_batch_size: int = 64
    warmup_learning_rate: float = 2e-3
    # GRPO: groups of answers to one problem, each of which is compared with its group.
    iterations: int = 15
    groups: int = 64
    group_size: int = 8
    # Optimizer steps of an iteration.
    minibatches: int = 4
    learning_rate: float = 3e-4
    clip_epsilon: float = 0.2
    max_grad_norm: float = 1.0
    # Three digits, the end of the turn, and one more to be wrong.
    max_new_tokens: int = 5
    # Iterations between two evaluations on held-out problems.
    evaluate_every: int = 5
    # The server needs the other core.
    num_threads: int = 1


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What one iteration measures: a row of ``metrics.csv``."""

    iteration: int
    """Number of the iteration, 0 for the state before the first."""
    seconds: float = 0.0
    """Since the start of the first iteration."""
    held_out_accuracy: float | None = None
    """Share of the held-out problems solved, greedily, after the weight update."""
    reward: float | None = None
    """Mean reward of the sampled answers: the share that is right."""
    tokens_per_second: float | None = None
    """Generated tokens per second of collection, environment included."""
    train_seconds: float | None = None
    """Advantages, losses and optimizer steps."""
    sync_seconds: float | None = None
    """From the call until the server holds the new weights."""
    log_prob_gap_max: float | None = None
    """Largest |log-prob from SGLang - log-prob from the trainer| of a token."""
    log_prob_gap_mean: float | None = None
    """Mean of the same over all response tokens."""


def evaluate(env: EnvBase, policy: SGLangWrapper) -> float:
    """Return the share of the environment's problems that the policy solves."""
    return env.rollout(1, policy)["next", "reward"].mean().item()


def log_prob_gap(actor: TransformersWrapper, batch: TensorDictBase) -> torch.Tensor:
    """Return |engine's log-prob - trainer's log-prob| for every response token.

    Args:
        actor: The trainer's model, with the weights that sampled the batch.
        batch: Fresh data.
    """
    with torch.no_grad():
        scored = actor(batch.select("tokens", "masks"))
    engine = torch.cat(batch.get(("log_probs", "full"), as_list=True))
    trainer = torch.cat(scored.get(("log_probs", "full"), as_list=True))
    # The engine was not asked for the log-probs of the prompts: they are NaN.
    return (engine - trainer)[engine.isfinite()].abs()


def make_policies(
    config: Config, engine: AsyncSGLang, tokenizer: PreTrainedTokenizerBase
) -> tuple[SGLangWrapper, SGLangWrapper]:
    """Return a policy that samples, for training, and a greedy one, for evaluation."""
    sampling = {"max_new_tokens": config.max_new_tokens, "temperature": 1.0}
    policy = SGLangWrapper(
        engine,
        tokenizer=tokenizer,
        input_mode="history",
        generate=True,
        generate_kwargs=sampling,
        return_log_probs=True,
    )
    greedy = policy.get_new_version(generate_kwargs={**sampling, "temperature": 0.0})
    return policy, greedy


def make_learner(
    config: Config, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Learner:
    """Return what trains a model with GRPO on batches of responses with advantages.

    Args:
        config: The settings.
        model: The model, trained in place.
        tokenizer: Its tokenizer.
    """
    # The trainer scores the very tokens that SGLang generated.
    actor = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False
    )
    return Learner(
        CorrectedGRPOLoss(actor, clip_epsilon=config.clip_epsilon, entropy_bonus=False),
        torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=0.0
        ),
        minibatches=config.minibatches,
        clip_grad_norm=config.max_grad_norm,
    )


def grpo(
    config: Config,
    engine: AsyncSGLang,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    held_out_problems: list[Problem],
) -> list[Metrics]:
    """Train a model on answers that an engine samples from it.

    Args:
        config: The settings.
        engine: An engine that serves the model.
        model: The model, trained in place.
        tokenizer: Its tokenizer.
        problems: The problems to train on.
        held_out_problems: The problems to evaluate on.

    Returns:
        One row for the state before training and one for every iteration.
    """
    num_dialogs = config.groups * config.group_size
    policy, greedy = make_policies(config, engine, tokenizer)
    held_out_env = make_env(held_out_problems, tokenizer, len(held_out_problems))
    env = make_env(
        problems, tokenizer, num_dialogs, repeats=config.group_size, seed=config.seed
    )
    scheme = SGLangWeightSyncScheme(engine, model)
    collector = SGLangLLMCollector(
        env,
        policy=policy,
        dialog_turns_per_batch=num_dialogs,
        flatten_data=True,
        weight_sync_schemes={"policy": scheme},
    )
    advantage = GroupAdvantage(config.group_size)
    learner = make_learner(config, model, tokenizer)

    accuracy = evaluate(held_out_env, greedy)
    rows = [Metrics(iteration=0, held_out_accuracy=accuracy)]
    rollouts = iter(collector)
    start = time.perf_counter()
    progress = trange(1, config.iterations + 1, desc="GRPO")
    for iteration in progress:
        rollout_start = time.perf_counter()
        batch = next(rollouts)
        rollout_seconds = time.perf_counter() - rollout_start
        gap = log_prob_gap(learner.actor, batch)

        train_start = time.perf_counter()
        # So many weight updates were sent.
        learner.train(advantage(batch), iteration - 1)
        train_seconds = time.perf_counter() - train_start

        sync_start = time.perf_counter()
        collector.update_policy_weights_()
        sync_seconds = time.perf_counter() - sync_start

        num_tokens = sum(map(len, batch.get(("tokens", "response"), as_list=True)))
        held_out_accuracy = None
        if iteration % config.evaluate_every == 0 or iteration == config.iterations:
            held_out_accuracy = accuracy = evaluate(held_out_env, greedy)
        row = Metrics(
            iteration=iteration,
            seconds=time.perf_counter() - start,
            held_out_accuracy=held_out_accuracy,
            reward=batch["next", "reward"].mean().item(),
            tokens_per_second=num_tokens / rollout_seconds,
            train_seconds=train_seconds,
            sync_seconds=sync_seconds,
            log_prob_gap_max=gap.max().item(),
            log_prob_gap_mean=gap.mean().item(),
        )
        rows.append(row)
        progress.set_postfix(
            {
                "reward": f"{row.reward:.2f}",
                "accuracy": f"{accuracy:.2f}",
                "tokens/s": f"{row.tokens_per_second:.0f}",
                "sync": f"{row.sync_seconds:.2f}s",
                "log-prob gap": f"{gap.max():.0e} (mean {gap.mean():.0e})",
            }
        )
    collector.shutdown()
    scheme.shutdown()
    return rows


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Path:
    """Save a model with its tokenizer and return the folder."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_metrics(rows: list[Metrics], path: Path) -> Path:
    """Write the metrics as CSV and return the path."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Metrics)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    return path


def plot_learning_curve(rows: list[Metrics], path: Path) -> Path:
    """Plot training reward and held-out accuracy, and return the image's path."""
    evaluated = [row for row in rows if row.held_out_accuracy is not None]
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [row.iteration for row in rows[1:]],
        [row.reward for row in rows[1:]],
        label="training reward (sampled)",
    )
    axes.plot(
        [row.iteration for row in evaluated],
        [row.held_out_accuracy for row in evaluated],
        marker="o",
        label="held-out accuracy (greedy)",
    )
    axes.set(xlabel="iteration", ylabel="share of right answers", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    return path


C = TypeVar("C", bound=Config)


def parse_config(kind: type[C]) -> C:
    """Read the settings from the command line."""
    parser = argparse.ArgumentParser(description=kind.__doc__)
    for field in fields(kind):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help="default: %(default)s",
        )
    return kind(**vars(parser.parse_args()))


def prepare(
    config: Config,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[Problem], list[Problem]]:
    """Warm a model up.

    Args:
        config: The settings.

    Returns:
        The model, its tokenizer, the training problems and the held-out problems.
    """
    # From TorchRL, about its own use of PyTorch and about its next version.
    warnings.filterwarnings("ignore", "size_average and reduce args", UserWarning)
    missing = "The env passed to SGLangLLMCollector is missing"
    warnings.filterwarnings("ignore", missing, FutureWarning)
    disable_progress_bar()
    # The progress bar tells what the log would tell of each update, on one line.
    torchrl_logger.setLevel("WARNING")
    config.output.mkdir(parents=True, exist_ok=True)
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.num_threads)
    problems, held_out_problems = split_problems()
    tokenizer = make_tiny_tokenizer()
    model = make_tiny_model(
        tokenizer,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        initializer_range=config.initializer_range,
        seed=config.seed,
    )
    warm_up(
        model,
        tokenizer,
        problems,
        carry_probability=config.carry_probability,
        steps=config.warmup_steps,
        batch_size=config.warmup_batch_size,
        learning_rate=config.warmup_learning_rate,
    )
    return model, tokenizer, problems, held_out_problems


def main() -> None:
    """Warm a model up, train it with GRPO, and report."""
    config = parse_config(Config)
    model, tokenizer, problems, held_out_problems = prepare(config)
    checkpoint = save(model, tokenizer, config.output / "warm_up_model")

    print("Starting SGLang ...", flush=True)
    with AsyncSGLang.from_pretrained(
        checkpoint, device="cpu", random_seed=config.seed
    ) as engine:
        rows = grpo(config, engine, model, tokenizer, problems, held_out_problems)
    written = [
        write_metrics(rows, config.output / "metrics.csv"),
        plot_learning_curve(rows, config.output / "learning_curve.png"),
        checkpoint,
        save(model, tokenizer, config.output / "model"),
    ]
    before, after = rows[0].held_out_accuracy, rows[-1].held_out_accuracy
    print(f"held-out accuracy: {before:.2f} -> {after:.2f}")
    print("Written:", *written, sep="\n  ")


if __name__ == "__main__":
    main()
