"""What replay of sampling changes: rewards over steps, several steps for each batch.

The task of `examples/grpo_tiny` on a CPU, with top-p and top-k, and at a temperature,
from one warm-up model for each seed. It is a small JSON file:

    python benchmarks/sampling.py run --output OUT

The real model is trained by `benchmarks/real_model.py run --plan temperature` (any
server) and `--plan nucleus` (SGLang 0.5.20), and all are drawn and put in a table by

    python benchmarks/sampling.py report OUT [OUT ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLERS: dict[str, dict[str, Any]] = {
    "nucleus": {
        "lr": 3e-4,
        "generate_kwargs": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
    },
    "warm": {"lr": 1e-3, "generate_kwargs": {"temperature": 1.5, "top_k": 4096}},
}
"""What tokens are drawn with, and a learning rate."""
MODES: dict[str, dict[str, Any]] = {
    "replayed": {"logprobs_mode": "behaviour"},
    "model": {"logprobs_mode": "model"},
    "ignored": {"logprobs_mode": "behaviour", "loss": {"replay_sampling": False}},
}
SAID = {
    "replayed": "sampler's distribution trained (replay)",
    "model": "the model trained, from its own log-probs",
    "ignored": "the model trained, from the sampler's log-probs",
}
COLORS = {"replayed": "#2ca02c", "model": "#1f77b4", "ignored": "#d62728"}
SHOWN = {
    "batch/reward": "reward of sampled answers",
    "eval/reward": "held-out, greedy",
    "train/kl_approx": "log(sampled / trained), nats a token",
    "train/entropy": "entropy, nats a token",
}


def right(conversation: Any, task: Any) -> float:
    """Rewards the right number alone."""
    said: str = conversation.response
    return float(said.removesuffix("<|im_end|>").strip() == task["answer"])


def train(seed: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Trains one warm-up model in each mode, on one server."""
    sys.path.insert(0, str(ROOT / "examples" / "grpo_tiny"))
    import train as demo
    from torchrl_sglang import GRPO, AsyncSGLang

    output = Path(options.output) / f"seed{seed}"
    sampler = SAMPLERS[options.sampler]
    config = demo.Config(seed=seed, output=output)
    model, tokenizer, problems, held_out = demo.prepare(config)
    path = demo.save(model, tokenizer, output / "warm_up_model")
    prompts, held_out = (
        [{"query": each.query, "answer": each.answer} for each in part]
        for part in (problems, held_out)
    )
    found = []
    with AsyncSGLang.from_pretrained(path, device="cpu", random_seed=seed) as engine:
        for mode, given in MODES.items():
            rows: list[dict[str, Any]] = []
            with GRPO(
                str(path),
                prompts=prompts,
                rewards=right,
                eval_prompts=held_out,
                engine=engine,
                generate_kwargs={"max_new_tokens": 5, **sampler["generate_kwargs"]},
                group_size=8,
                groups_per_batch=options.groups,
                steps=options.steps,
                lr=sampler["lr"],
                minibatches=4,
                epochs_per_batch=2,
                logger=None,
                show_samples=None,
                output=output / mode,
                seed=seed,
                **{
                    **given,
                    "loss": {"entropy_bonus": True, "entropy_coeff": 0.0}
                    | given.get("loss", {}),
                },
            ) as run:
                run.begin()
                for batch in run.batches():
                    run.step += 1
                    reward = float(batch["next", "reward"].sum(1).mean())
                    metrics = run.learner.train(batch, run.collector.policy_version)
                    run.update_weights()
                    if run.step % 5 == 0:
                        metrics |= run.evaluate()
                    rows.append({"step": run.step, "batch/reward": reward, **metrics})
                    if run.step == options.steps:
                        break
            found.append(
                {"name": f"tiny/{options.sampler}-{mode}/{seed}", "rows": rows}
            )
            print(found[-1]["name"], rows[0]["batch/reward"], rows[-1], flush=True)
    return found


def read(folders: list[Path]) -> dict[tuple[str, str], list[Any]]:
    """Returns (task and sampler, mode) -> runs."""
    found = defaultdict(list)
    for folder in folders:
        for run in json.loads((folder / "runs.json").read_text())["runs"]:
            *task, kind, _ = run["name"].split("/")
            sampler, _, mode = kind.rpartition("-")
            if mode in MODES and run.get("rows"):
                found[" ".join([task[0], sampler]).strip(), mode].append(run)
    return dict(found)


def curve(runs: list[Any], name: str) -> tuple[list[int], list[list[float]]]:
    """Returns steps, and the values of all runs that have them."""
    values = defaultdict(list)
    for run in runs:
        for row in run["rows"]:
            if isinstance(row.get(name), (int, float)):
                values[row["step"]].append(row[name])
    steps = sorted(step for step, each in values.items() if len(each) == len(runs))
    return steps, [values[step] for step in steps]


def report(folders: list[Path], docs: Path) -> None:
    """Draws each task, and prints a table."""
    from matplotlib.figure import Figure

    runs = read(folders)
    tasks = list(dict.fromkeys(task for task, _ in runs))
    figure = Figure(figsize=(13, 3.2 * len(tasks)), layout="constrained")
    grid = figure.subplots(len(tasks), len(SHOWN), squeeze=False)
    for line, task in zip(grid, tasks, strict=True):
        for axes, (name, said) in zip(line, SHOWN.items(), strict=True):
            for mode in MODES:
                steps, values = curve(runs.get((task, mode), []), name)
                if steps:
                    means = [fmean(each) for each in values]
                    axes.plot(steps, means, color=COLORS[mode], label=SAID[mode])
                    low, high = map(min, values), map(max, values)
                    axes.fill_between(
                        steps, list(low), list(high), color=COLORS[mode], alpha=0.15
                    )
            axes.set(title=f"{task}: {said}", xlabel="step")
            axes.grid(alpha=0.3)
    grid[0][0].legend(fontsize=7)
    figure.savefig(docs / "images" / "sampling.svg")
    for (task, mode), each in runs.items():
        ends = []
        for name in SHOWN:
            steps, values = curve(each, name)
            last = [fmean(column) for column in zip(*values[-5:], strict=True)]
            ends.append(
                f"{name} {fmean(last):.4g} ({min(last):.4g} to {max(last):.4g})"
                if steps
                else ""
            )
        print(task, mode, f"{len(each)} seeds:", "; ".join(ends))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run")
    runs.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    runs.add_argument("--sampler", choices=SAMPLERS, default="nucleus")
    runs.add_argument("--steps", type=int, default=20)
    runs.add_argument("--groups", type=int, default=16)
    runs.add_argument("--output", type=Path, default=Path("runs/sampling"))
    drawn = verbs.add_parser("report")
    drawn.add_argument("folders", nargs="+", type=Path)
    drawn.add_argument("--docs", type=Path, default=ROOT / "docs" / "source")
    options = parser.parse_args()
    if options.verb == "report":
        report(options.folders, options.docs)
        return
    found = []
    for seed in options.seeds:
        found += train(seed, options)
        text = json.dumps({"plan": "tiny", "runs": found})
        (options.output / "runs.json").write_text(text)


if __name__ == "__main__":
    main()
