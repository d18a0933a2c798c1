"""SmolLM2-135M-Instruct teaches a smaller student to add, beside GRPO for as long.

    python distil.py --output runs/distil
    python distil.py --seconds 120 --drop 3 4 5 25 26

The student is the teacher without some of its layers. One copy learns from the teacher
alone and one from rewards alone, each for so many seconds of generating, training and
sending weights. It exits with 1 if the first agrees no more with its teacher than
before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, AutoTokenizer

from gsm8k import last_number
from smollm2 import FOLDER, smollm2
from torchrl_sglang import GRPO, AsyncSGLang
from torchrl_sglang.errors import ConfigurationError

HELD_OUT = 24
"""Sums that nothing is trained on, of 100."""
DROPPED = (3, 4, 5, 6, 7, 9, 17, 19, 25, 26)
"""Layers of the teacher that the student lacks: each changes the teacher's answers to a
few sums little if it is missing alone."""
SAMPLING = {"max_new_tokens": 8}
CURVES = {
    "agreement": "tokens as the teacher's, greedy, held out",
    "right": "right answers, greedy, held out",
}
"""Held-out figure -> the name of its axis."""
LEAST_GAIN = 0.1
"""Gain of agreement that counts as learned."""

Rows = list[dict[str, Any]]


def make_sums() -> tuple[Rows, Rows]:
    """Returns sums of two digits for training, and held-out ones."""
    sums = [
        {
            "query": f"What is {a} + {b}? Answer with the number only.",
            "answer": str(a + b),
        }
        for a in range(10)
        for b in range(10)
    ]
    Random(0).shuffle(sums)
    return sums[HELD_OUT:], sums[:HELD_OUT]


def save_student(source: Path, folder: Path, dropped: Sequence[int]) -> Path:
    """Writes a model without some of the layers of another one."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    layers, config = model.model.layers, model.config
    kept = [number for number in range(len(layers)) if number not in dropped]
    if not kept or len(kept) + len(set(dropped)) > len(layers):
        raise ConfigurationError(
            f"--drop={[*dropped]} must be some of the layers 0 to {len(layers) - 1}."
        )
    model.model.layers = torch.nn.ModuleList(layers[number] for number in kept)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


def answer(engine: AsyncSGLang, tasks: Rows) -> dict[str, list[int]]:
    """Returns the tokens of a model's greedy answer to each question."""
    tokenizer = engine.get_tokenizer()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task["query"]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for task in tasks
    ]
    sampling = {**SAMPLING, "temperature": 0.0}
    responses = engine.generate(input_ids=prompts, sampling_params=sampling)
    pairs = zip(tasks, responses, strict=True)
    return {task["query"]: list(response.token_ids) for task, response in pairs}


def right(conversation: Any, task: Any) -> float:
    """Reward 1 if the last number of a response is the sum."""
    return float(last_number(conversation.response) == task["answer"])


def common_share(tokens: list[int], expected: list[int]) -> float:
    """Returns the share of expected tokens before the first other token.

    Examples:
        >>> common_share([5, 6, 7], [5, 6, 8, 9])
        0.5
    """
    pairs = enumerate(zip(tokens, expected, strict=False))
    common = min(len(tokens), len(expected))
    first = next((n for n, (a, b) in pairs if a != b), common)
    return first / len(expected)


def learn(seconds: float, **arguments: Any) -> Rows:
    """Trains for so many seconds, without evaluation; returns metrics of each step."""
    with GRPO(**arguments) as run:
        run.begin()
        rows: Rows = [{"step": 0, "seconds": 0.0, **run.metrics}]
        spent, begin = 0.0, time.perf_counter()
        for batch in run.batches():
            run.step += 1
            metrics = run.learner.train(batch, run.collector.policy_version)
            run.clock.done("train")
            run.update_weights()
            run.clock.done("update")
            spent += time.perf_counter() - begin
            is_last = spent > seconds
            if is_last or run.is_due(run.eval_every):
                metrics |= run.evaluate()
            run.report(metrics)
            rows.append({"step": run.step, "seconds": spent, **run.metrics})
            if is_last:
                break
            begin = time.perf_counter()
    return rows


def compare(given: argparse.Namespace, source: Path) -> tuple[dict[str, Rows], float]:
    """Trains two students; returns their metrics, and the teacher's accuracy."""
    student = save_student(source, given.output / "student", given.drop)
    training, held_out = make_sums()

    def start(path: Path) -> AsyncSGLang:
        return AsyncSGLang.from_pretrained(
            path, device="cpu", dtype="float32", max_model_len=128, router_policy=None
        )

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        engines = pool.map(start, (source, student))
        teacher, engine = map(stack.enter_context, engines)
        expected = answer(teacher, held_out)

        def agreement(conversation: Any, task: Any) -> float:
            wanted = expected.get(task["query"])
            tokens = conversation.turns[-1].token_ids
            return common_share(list(tokens), wanted) if wanted else 0.0

        common = {
            "model": str(student),
            "engine": engine,
            "prompts": training,
            "eval_prompts": held_out,
            "generate_kwargs": SAMPLING,
            "steps": 1000,
            "eval_every": given.eval_every,
            "lr": given.lr,
            "packing": "tree",
            "seed": given.seed,
            "show_samples": None,
        }
        runs = {
            "distillation": learn(
                given.seconds,
                **common,
                # Measured, and not trained on.
                rewards={"right": (right, 0.0), "agreement": (agreement, 0.0)},
                teacher=teacher,
                distillation={"divergence": "forward"},
                group_size=2,
                groups_per_batch=8,
                output=given.output / "distillation",
            ),
            "GRPO": learn(
                given.seconds,
                **common,
                rewards={"right": (right, 1.0), "agreement": (agreement, 0.0)},
                group_size=8,
                groups_per_batch=2,
                output=given.output / "grpo",
            ),
        }
        tokenizer = teacher.get_tokenizer()
    texts = {
        q: tokenizer.decode(t, skip_special_tokens=True) for q, t in expected.items()
    }
    hits = [last_number(texts[task["query"]]) == task["answer"] for task in held_out]
    return runs, sum(hits) / len(hits)


def plot(runs: dict[str, Rows], accuracy: float, path: Path) -> None:
    """Draws held-out agreement and accuracy of both students over seconds."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (curve, label) in zip(figure.subplots(1, 2), CURVES.items(), strict=True):
        for name, rows in runs.items():
            held_out = [row for row in rows if f"eval_reward/{curve}" in row]
            seconds = [row["seconds"] for row in held_out]
            values = [row[f"eval_reward/{curve}"] for row in held_out]
            axes.plot(seconds, values, "o-", label=name)
        if curve == "right":
            axes.axhline(accuracy, color="gray", linestyle=":", label="teacher")
        axes.set(xlabel="seconds of training", ylabel=label, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def report(runs: dict[str, Rows], accuracy: float) -> bool:
    """Prints the result; returns whether the student has learned from the teacher."""
    print(f"\nHeld out, {HELD_OUT} sums; the teacher has {accuracy:.2f} of them right.")
    gains = []
    for name, rows in runs.items():
        ends = [row for row in rows if "eval_reward/right" in row]
        parts = []
        for curve in CURVES:
            before, after = (row[f"eval_reward/{curve}"] for row in (ends[0], ends[-1]))
            parts.append(f"{curve} {before:.2f} -> {after:.2f}")
            gains.append(after - before)
        print(
            f"{name + ':':14}{', '.join(parts)}, in {len(rows) - 1} steps and "
            f"{rows[-1]['seconds']:.0f} s"
        )
    flat = [row["batch/flat_groups"] for row in runs["GRPO"][1:]]
    print(
        f"{sum(flat) / len(flat):.0%} of GRPO's groups had equal rewards, which teach "
        f"nothing."
    )
    return gains[0] >= LEAST_GAIN


def main() -> None:
    """Reads the command line, trains both students and compares them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/distil"))
    parser.add_argument("--model", type=Path, help="teacher; default: SmolLM2")
    parser.add_argument("--seconds", type=float, default=50.0, help="for each student")
    parser.add_argument(
        "--drop", type=int, nargs="+", default=DROPPED, help="layers of the teacher"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--eval-every", type=int, default=4, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    begin = time.perf_counter()
    # Threads that wait for each other are slow beside servers on the same cores.
    torch.set_num_threads(1)
    try:
        source = given.model or smollm2(folder=FOLDER)
        runs, accuracy = compare(given, source)
    except ConfigurationError as problem:
        sys.exit(f"distil.py: {problem}")
    lines = [json.dumps({"run": n, **row}) for n, rows in runs.items() for row in rows]
    (given.output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    plot(runs, accuracy, given.output / "comparison.png")
    has_learned = report(runs, accuracy)
    print(f"{(time.perf_counter() - begin) / 60:.1f} minutes in all. Written:")
    for name in ("metrics.jsonl", "comparison.png"):
        print(f"  {given.output / name}")
    if not has_learned:
        sys.exit("distil.py: the student agrees no more with its teacher than before.")


if __name__ == "__main__":
    main()
