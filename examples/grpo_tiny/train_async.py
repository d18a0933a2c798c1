"""The same training with the asynchronous collector, and a plot of both.

The engine generates the next batches while the trainer trains, ``max_staleness`` weight
updates ahead at most:

    python examples/grpo_tiny/train_async.py --seed 0 --output runs/grpo_async

Both runs begin with the same model, the same prompts and the same server. The
asynchronous one is recorded:

    torchrl-sglang view runs/grpo_async
"""

from __future__ import annotations

import copy
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from task import Problem, make_env
from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    GroupAdvantage,
    RunRecorder,
    SGLangWeightSyncScheme,
)
from train import (
    Config,
    Metrics,
    evaluate,
    grpo,
    make_learner,
    make_policies,
    parse_config,
    prepare,
    save,
    write_metrics,
)


@dataclass
class AsyncConfig(Config):
    """Settings of the asynchronous run, beside those of the synchronous one."""

    output: Path = Path("runs/grpo_async")
    # Weight updates between generating a token and training on it.
    max_staleness: int = 2


async def exact_match(conversation: Any, task: dict[str, str]) -> float:
    """Reward 1 for the right answer followed by the end of turn."""
    turn = conversation.turns[-1]
    return float(turn.is_complete and conversation.response == task["answer"])


def grpo_async(
    config: AsyncConfig,
    engine: AsyncSGLang,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    held_out_problems: list[Problem],
) -> list[Metrics]:
    """Train a model while an engine samples from its last versions.

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
    policy, greedy = make_policies(config, engine, tokenizer)
    # Of this run alone, as all that it writes.
    shutil.rmtree(config.output / "record", ignore_errors=True)
    recorder = RunRecorder(config.output / "record")
    held_out_env = make_env(held_out_problems, tokenizer, len(held_out_problems))
    scheme = SGLangWeightSyncScheme(engine, model)
    collector = AsyncLLMCollector(
        policy=policy,
        prompts=[{"query": each.query, "answer": each.answer} for each in problems],
        rewards=exact_match,
        group_size=config.group_size,
        groups_per_batch=config.groups,
        max_staleness=config.max_staleness,
        total_groups=config.iterations * config.groups,
        shuffle=True,
        seed=config.seed,
        weight_sync_schemes={"policy": scheme},
        recorder=recorder,
    )
    advantage = GroupAdvantage(config.group_size)
    learner = make_learner(config, model, tokenizer)
    accuracy = evaluate(held_out_env, greedy)
    rows = [Metrics(iteration=0, held_out_accuracy=accuracy)]
    start = time.perf_counter()
    progress = tqdm(collector, desc="GRPO, asynchronous", total=config.iterations)
    for iteration, batch in enumerate(progress, start=1):
        train_start = time.perf_counter()
        with_advantages = advantage(batch)
        recorder.trained(with_advantages, step=iteration)
        with recorder.phase("train"):
            metrics = learner.train(with_advantages, collector.policy_version)
        recorder.log(metrics, step=iteration)
        sync_start = time.perf_counter()
        report = collector.update_policy_weights_()
        held_out_accuracy = None
        if iteration % config.evaluate_every == 0 or iteration == config.iterations:
            with recorder.phase("evaluate"):
                held_out_accuracy = accuracy = evaluate(held_out_env, greedy)
        row = Metrics(
            iteration=iteration,
            seconds=time.perf_counter() - start,
            held_out_accuracy=held_out_accuracy,
            reward=batch["next", "reward"].mean().item(),
            train_seconds=sync_start - train_start,
            sync_seconds=report.seconds,
        )
        rows.append(row)
        age = (collector.policy_version - 1 - batch["policy_version"]).float()
        progress.set_postfix(
            {
                "reward": f"{row.reward:.2f}",
                "accuracy": f"{accuracy:.2f}",
                "age": f"{age.mean():.1f}",
            }
        )
    print(collector.stats()["bottleneck"])
    collector.shutdown()
    scheme.shutdown()
    recorder.close()
    return rows


def plot_over_time(runs: dict[str, list[Metrics]], path: Path) -> Path:
    """Plot the training reward of each run over time, and return the image's path."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, rows in runs.items():
        axes.plot(
            [row.seconds for row in rows[1:]],
            [row.reward for row in rows[1:]],
            marker=".",
            label=name,
        )
    axes.set(xlabel="seconds", ylabel="training reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Train the same model synchronously and asynchronously, and report."""
    config = parse_config(AsyncConfig)
    model, tokenizer, problems, held_out_problems = prepare(config)
    checkpoint = save(model, tokenizer, config.output / "warm_up_model")
    arguments = tokenizer, problems, held_out_problems
    print("Starting SGLang ...", flush=True)
    with AsyncSGLang.from_pretrained(
        checkpoint, device="cpu", random_seed=config.seed
    ) as engine:
        synchronous = grpo(config, engine, copy.deepcopy(model), *arguments)
        # The server goes back to the warm-up.
        SGLangWeightSyncScheme(engine).create_sender().update_weights(model)
        asynchronous = grpo_async(config, engine, model, *arguments)
    runs = {
        "synchronous": synchronous,
        f"asynchronous, max_staleness={config.max_staleness}": asynchronous,
    }
    written = [
        write_metrics(synchronous, config.output / "synchronous.csv"),
        write_metrics(asynchronous, config.output / "asynchronous.csv"),
        plot_over_time(runs, config.output / "reward_over_time.png"),
        save(model, tokenizer, config.output / "model"),
    ]
    for name, rows in runs.items():
        before, after = rows[0].held_out_accuracy, rows[-1].held_out_accuracy
        print(
            f"{name}: held-out accuracy {before:.2f} -> {after:.2f} "
            f"in {rows[-1].seconds:.0f} s"
        )
    print("Written:", *written, sep="\n  ")


if __name__ == "__main__":
    main()
