r"""Held-out accuracy over steps and seconds, by this package and by TRL with vLLM.

Problems are reasoning-gym's, written to a file that both sides read. Each side has an
environment of its own, as for `peers.py`, with `pip install reasoning-gym`:

    python benchmarks/learning.py tasks sums.json \
        '{"data": {"chain_sum": {"min_terms": 2, "max_terms": 2}}, "answer": "number"}'
    python benchmarks/learning.py ours sums.json MODEL --seed 0 --json ours.json
    peer/bin/python benchmarks/learning.py trl sums.json MODEL --seed 0 --json trl.json
    python benchmarks/learning.py show ours.json trl.json --plot curves.png

A task is that of `examples/grpo/reasoning.py`, where the last number or all of a
response is the answer.

The same on both sides: problems, rewards, prompts' tokens, groups, temperature 1, the
learning rate, one optimizer step a batch, float32 weights. Evaluation is greedy, and
its seconds are not counted, nor is the start.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

WITHOUT_WHEELS = ("cellpylib", "pycosat", "zss")
"""Needs of a few data sets of reasoning-gym."""


def read_options() -> argparse.Namespace:
    """Reads the command line; `script.py` imports this package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=("tasks", "ours", "trl", "trl-hf", "show"))
    parser.add_argument("paths", nargs="+", help="files, the model, or the task")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    for name, default in (
        *(("groups", 16), ("group-size", 16), ("steps", 40), ("every", 4)),
        *(("new-tokens", 12), ("lr", 1e-5), ("seed", 0), ("seconds", 3600.0)),
        *(("engine-memory", 0.3), ("json", ""), ("plot", "")),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return parser.parse_args()


def write_tasks(path: str, task: str) -> None:
    """Writes the problems of a task, a JSON text."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "grpo"))
    from reasoning import arguments_of

    given = arguments_of(json.loads(task))
    found = {name: value for name, value in given.items() if name != "rewards"}
    Path(path).write_text(json.dumps(found))


def score(response: str, task: Mapping[str, Any]) -> float:
    """Returns reasoning-gym's score of the last number of a response, or of all."""
    for name in WITHOUT_WHEELS:
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
    import reasoning_gym

    name = task["metadata"]["source_dataset"]
    is_number = NUMBER.fullmatch(str(task["answer"])) is not None
    numbers = NUMBER.findall(response)
    answer = (numbers or [None])[-1] if is_number else response.strip()
    return float(reasoning_gym.get_score_answer_fn(name)(answer, entry=dict(task)))


class Curve:
    """Held-out accuracy, which a file has as soon as it is there."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._begun, self._away = options, 0.0, 0.0
        self._rows: list[dict[str, float]] = []

    def begin(self, evaluate: Callable[[], float]) -> None:
        """Begins with the untrained model."""
        self._begun = time.perf_counter()
        self.add(0, evaluate)

    def add(self, step: int, evaluate: Callable[[], float]) -> None:
        """Evaluates after a step."""
        begun = time.perf_counter()
        seconds = begun - self._begun - self._away if step else 0.0
        right = evaluate()
        self._away += time.perf_counter() - begun
        self._rows.append({"step": step, "seconds": seconds, "right": right})
        print({name: round(value, 4) for name, value in self._rows[-1].items()})
        if self._options.json:
            found = {"options": vars(self._options), "curve": self._rows}
            Path(self._options.json).write_text(json.dumps(found, indent=1))

    @property
    def is_over(self) -> bool:
        """Whether its seconds are used up."""
        spent = time.perf_counter() - self._begun - self._away
        return bool(spent > self._options.seconds)


def ours(options: argparse.Namespace, tasks: dict[str, Any], folder: str) -> None:
    """Takes the steps of a run of this package."""
    from torchrl_sglang import GRPO
    from torchrl_sglang.cli.bench.models import server_arguments

    def right(conversation: Any, task: Mapping[str, Any]) -> float:
        return score(conversation.response, task)

    on_gpu = options.device == "cuda"
    engine: dict[str, Any] = {"max_model_len": 1024, "router_policy": None}
    engine |= {"dtype": "bfloat16", **server_arguments()} if on_gpu else {}
    engine |= {"gpu_memory_utilization": options.engine_memory} if on_gpu else {}
    engine |= {} if on_gpu else {"device": "cpu", "dtype": "float32"}
    curve = Curve(options)
    with GRPO(
        options.paths[1],
        **tasks,
        rewards={"right": right},
        generate_kwargs={"max_new_tokens": options.new_tokens},
        group_size=options.group_size,
        groups_per_batch=options.groups,
        steps=options.steps,
        lr=options.lr,
        seed=options.seed,
        colocated=on_gpu,
        engine=engine,
        output=folder,
        logger=None,
        show_samples=None,
    ) as run:

        def evaluate() -> float:
            return run.evaluate()["eval_reward/right"]

        run.begin()
        curve.begin(evaluate)
        for batch in run.batches():
            run.step += 1
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
            run.update_weights()
            run.report(metrics)
            if run.step % options.every == 0 or curve.is_over:
                curve.add(run.step, evaluate)
            if curve.is_over:
                break


def trl(options: argparse.Namespace, tasks: dict[str, Any], folder: str) -> None:
    """Takes the steps of TRL's trainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.paths[1], padding_side="left")
    content = tasks["system_prompt"]
    system = [{"role": "system", "content": content}] if content else []

    def chat(task: Mapping[str, Any]) -> list[dict[str, str]]:
        return [*system, {"role": "user", "content": task["query"]}]

    def rewards(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        said = [completion[-1]["content"] for completion in completions]
        return list(map(score, said, map(json.loads, task)))

    @torch.no_grad()
    def evaluate() -> float:
        problems, model = tasks["eval_prompts"], trainer.model
        given = tokenizer.apply_chat_template(
            [chat(task) for task in problems],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
        ).to(model.device)
        model.eval()
        kind = model.device.type
        with torch.autocast(kind, torch.bfloat16, kind != "cpu"):
            ids = model.generate(
                **given, max_new_tokens=options.new_tokens, do_sample=False
            )
        model.train()
        begin = given["input_ids"].shape[1]
        said = tokenizer.batch_decode(ids[:, begin:], skip_special_tokens=True)
        return sum(map(score, said, problems)) / len(problems)

    curve = Curve(options)

    class Evaluation(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            curve.begin(evaluate)

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> Any:
            if state.global_step % options.every == 0 or curve.is_over:
                curve.add(state.global_step, evaluate)
            control.should_training_stop = curve.is_over
            return control

    responses = options.groups * options.group_size
    arguments = {
        "output_dir": folder,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": responses,
        "num_generations": options.group_size,
        "max_completion_length": options.new_tokens,
        "max_steps": options.steps,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "seed": options.seed,
        "use_vllm": options.side == "trl",
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": options.engine_memory,
        "vllm_max_model_length": 1024,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": options.device == "cpu",
        "bf16": options.device == "cuda",
    }
    rows = [
        {"prompt": chat(task), "task": json.dumps(task)} for task in tasks["prompts"]
    ]
    trainer = GRPOTrainer(
        model=options.paths[1],
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        reward_funcs=rewards,
        callbacks=[Evaluation()],
    )
    trainer.train()


def show(paths: list[str], plot: str) -> None:
    """Prints curves, and draws them over steps and over seconds."""
    files = {Path(path).stem: json.loads(Path(path).read_text()) for path in paths}
    for name, found in files.items():
        curve = found["curve"]
        marks = (f"{r['step']}: {r['right']:.3f} ({r['seconds']:.0f} s)" for r in curve)
        print(f"{name:24}", ", ".join(marks))
    if not plot:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2), ("step", "seconds"), strict=True):
        for name, found in files.items():
            rows = found["curve"]
            x, y = ([row[part] for row in rows] for part in (key, "right"))
            axes.plot(x, y, "-o", markersize=3, label=name)
        axes.set_xlabel(key)
        axes.set_ylabel("held-out accuracy, greedy")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(plot, dpi=110)


def main() -> None:
    """Measures a side, or shows what was measured."""
    options = read_options()
    if options.side == "tasks":
        write_tasks(*options.paths)
    elif options.side == "show":
        show(options.paths, options.plot)
    else:
        tasks = json.loads(Path(options.paths[0]).read_text())
        side = ours if options.side == "ours" else trl
        with tempfile.TemporaryDirectory(prefix="learning_") as folder:
            side(options, tasks, folder)


if __name__ == "__main__":
    main()
