"""SmolLM2-135M-Instruct learns a task, with samples before and after, and a plot.

    python demo.py --output runs/demo_real
    python demo.py --minutes 20 task=reasoning_gym/gcd task.answer=number

It trains as ``train.py smollm2.yaml`` does, for so many minutes at most.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from reasoning import greedy_answers
from torchrl_sglang import GRPO
from torchrl_sglang.errors import ConfigurationError
from train import read_arguments

FILE = Path(__file__).with_name("smollm2.yaml")

HELD_OUT = "eval_reward/right"
REWARD = "batch/reward"


def train(
    arguments: dict[str, Any], *, minutes: float, samples: int
) -> list[dict[str, Any]]:
    """Trains as :meth:`GRPO.train` does, until it is done or the time is over.

    Args:
        arguments: of ``GRPO``.
        minutes: for the steps; the last one ends later.
        samples: held-out problems of which the first and last row have the answers.

    Returns:
        list: metrics of each step, with its ``seconds`` since the first one began.
    """
    tasks = arguments["eval_prompts"][:samples]
    system = arguments.get("system_prompt")
    with GRPO(**arguments) as run:

        def answers() -> list[dict[str, str]]:
            return greedy_answers(run.engine, tasks, system, run.sampling)

        run.begin()
        rows = [{"step": 0, "seconds": 0.0, **run.metrics, "answers": answers()}]
        begin = time.perf_counter()
        for batch in run.batches():
            run.step += 1
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
            run.clock.done("train")
            run.update_weights()
            run.clock.done("update")
            seconds = time.perf_counter() - begin
            is_last = seconds > 60 * minutes or run.step == run.steps
            if run.is_due(run.eval_every) or is_last:
                metrics |= run.evaluate()
            run.report(metrics)
            rows.append({"step": run.step, "seconds": seconds, **run.metrics})
            if is_last:
                break
        rows[-1]["answers"] = answers()
        run.finish()
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws reward and held-out accuracy over minutes."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps = [row for row in rows if REWARD in row]
    minutes = [row["seconds"] / 60 for row in steps]
    axes.plot(minutes, [row[REWARD] for row in steps], label="reward, sampled")
    held_out = [row for row in rows if HELD_OUT in row]
    minutes = [row["seconds"] / 60 for row in held_out]
    accuracy = [row[HELD_OUT] for row in held_out]
    axes.plot(minutes, accuracy, "o-", label="held-out accuracy, greedy")
    axes.set_xlabel("minutes of training")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def tell(rows: list[dict[str, Any]]) -> None:
    """Prints answers before and after, and the result."""
    print("\nHeld-out problems, before -> after:")
    for old, new in zip(rows[0]["answers"], rows[-1]["answers"], strict=True):
        print(f"  {old['question'][-90:]!r}, right: {old['right']}")
        print(f"    {old['said'][:90]!r} -> {new['said'][:90]!r}")
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    print(
        f"\nheld-out accuracy: {held_out[0]:.2f} -> {held_out[-1]:.2f}, in "
        f"{rows[-1]['step']} steps and {rows[-1]['seconds'] / 60:.1f} minutes"
    )


def main() -> None:
    """Reads the command line, trains and tells."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/demo_real"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0, help="for the steps")
    parser.add_argument("--samples", type=int, default=5, help="answers to print")
    parser.add_argument("changes", nargs="*", metavar="NAME=VALUE")
    given = parser.parse_args()
    changes = [f"output={given.output}", f"seed={given.seed}", *given.changes]
    begin = time.perf_counter()
    try:
        arguments = read_arguments([str(FILE), *changes])
        rows = train(arguments, minutes=given.minutes, samples=given.samples)
    except ConfigurationError as problem:
        sys.exit(f"demo.py: {problem}")
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (given.output / "metrics.jsonl").write_text(lines, encoding="utf-8")
    plot(rows, given.output / "learning_curve.png")
    tell(rows)
    print(f"{(time.perf_counter() - begin) / 60:.1f} minutes in all. Written:")
    for name in ("metrics.jsonl", "learning_curve.png", "rollouts.jsonl", "model"):
        print(f"  {given.output / name}")


if __name__ == "__main__":
    main()
