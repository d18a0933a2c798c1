r"""One GRPO job by this package and by TRL: seconds of the parts of a step, and memory.

Each side has an environment of its own, and reads the same model from a folder:

    python benchmarks/peers.py model models/0.5b --shapes 0.5b
    python benchmarks/peers.py ours models/0.5b --json ours.json

    python -m venv peer && peer/bin/pip install trl vllm peft nvidia-ml-py
    peer/bin/python benchmarks/peers.py trl models/0.5b --json trl.json
    peer/bin/python benchmarks/peers.py trl-sleep models/0.5b --json trl-sleep.json
    peer/bin/python benchmarks/peers.py trl-hf models/0.5b --json trl-hf.json

    python benchmarks/peers.py compare ours.json trl.json trl-sleep.json trl-hf.json

Without a GPU: `--shapes tiny`, `ours` and `trl-hf`, each with `--device cpu --groups 2
--new-tokens 48 --mean-tokens 24 --pass-rows 8`.

The same on all sides: random weights, the prompts' tokens, 32 prompts with 8 responses
each, temperature 1, the reward, the learning rate, AdamW without weight decay,
gradients clipped at 1, one optimizer step a batch, float32 weights, passes in bfloat16,
recomputed activations. Responses end at random: the saved model has as many ends of
text as `--mean-tokens` takes. vLLM compares each token with all of them, which takes it
milliseconds of a decode step; with `--lengths fixed` all responses have `--new-tokens`.
All else is the side's default, and TRL's can be changed:

    --trl '{"vllm_importance_sampling_correction": false}'    no pass for old log-probs
    --pass-rows 32 --engine-memory 0.5             responses of a pass, share of the GPU
    --vllm '{"async_scheduling": false}'           arguments of vLLM's LLM
    --sampling '{"detokenize": false, "flat_logprobs": true}'      its SamplingParams
    --freeze              old objects are not collected, as this package has it

Generation of `ours` includes rewards and the batch. `score` is what TRL does beside
generation, extra pass, update and sleep until the batch is there, and the rest of its
step is training. Tokens are those of responses; the gap is the mean distance of the
sampler's and the trainer's log-probs. Figures are median, least and most after the
warm-up.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from peer_steps import LR, Steps, adapter, queries, reward_of, synchronize

SIDES = {
    "ours": "torchrl_sglang, colocated SGLang",
    "trl": "TRL, colocated vLLM",
    "trl-sleep": "TRL, colocated vLLM that sleeps",
    "trl-hf": "TRL, generation by transformers",
}
COLUMNS = {
    "step": "step, s",
    "step_speed": "tokens/s of the step",
    "generate": "generation, s",
    "speed": "generation, tokens/s",
    "score": "score, s",
    "old_log_probs": "extra pass, s",
    "train": "training, s",
    "sleep": "sleep, s",
    "update": "update, s",
    "memory": "most memory, GiB",
    "gap": "gap",
}
FIRST_END = 200
"""Tokens from here on end a response; the tokenizer knows none of them."""


def read_options() -> argparse.Namespace:
    """Reads the command line; `script.py` imports this package."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("side", choices=(*SIDES, "model", "compare"))
    parser.add_argument("paths", nargs="+", help="the model's folder, or JSON files")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", choices=("random", "fixed"), default="random")
    for name, default in (
        *(("shapes", "0.5b"), ("groups", 32), ("group-size", 8), ("lora", 0)),
        *(("new-tokens", 1024), ("mean-tokens", 512), ("steps", 8), ("warmup", 2)),
        *(("engine-memory", 0.3), ("pass-tokens", 16_384), ("pass-rows", 16)),
        ("json", ""),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    for name in ("trl", "vllm", "sampling"):
        parser.add_argument(f"--{name}", type=json.loads, default={})
    parser.add_argument("--freeze", action="store_true")
    return parser.parse_args()


def save_model(options: argparse.Namespace) -> None:
    """Saves a model of random weights with many ends of text."""
    from transformers import AutoConfig, GenerationConfig

    from recipe import make_model

    torch.manual_seed(0)
    folder = make_model(options.shapes, options.paths[0])
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    count = max(vocabulary // options.mean_tokens, 1)
    first = min(FIRST_END, vocabulary - count)
    ends = [*range(first, first + count)]
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)


class Scores:
    """Keeps the trainer's log-probs of a step, and passes them to the recorder."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder
        self._parts: Any = ()

    def scored(self, parts: Any) -> None:
        self._parts = parts
        self._recorder.scored(parts)

    def gap(self) -> float:
        """Returns their mean distance to the sampler's."""
        from torchrl_sglang.objectives.columns import read

        gaps = []
        for rows, known in self._parts:
            sampled = read(rows, ("log_probs", "full"), float("nan"))
            gap = (known - sampled.to(known)).abs()
            gaps.append(gap[~gap.isnan()])
        return torch.cat(gaps).mean().item()


def make_run(options: argparse.Namespace, folder: str) -> Any:
    """Returns a GRPO run of this package."""
    from torchrl_sglang import GRPO
    from torchrl_sglang.cli.bench.models import server_arguments

    on_gpu = options.device == "cuda"
    engine = {"dtype": "bfloat16", "gpu_memory_utilization": options.engine_memory}
    engine = engine | server_arguments() if on_gpu else {"device": "cpu"}
    # Without SGLang's router, which has a process of its own.
    engine |= {"max_model_len": options.new_tokens + 512, "router_policy": None}
    return GRPO(
        options.paths[0],
        prompts=[{"query": query} for query in queries(options)],
        rewards=lambda conversation, task: reward_of(conversation.turns[-1].token_ids),
        generate_kwargs={
            "max_new_tokens": options.new_tokens,
            "ignore_eos": options.lengths == "fixed",
        },
        group_size=options.group_size,
        groups_per_batch=options.groups,
        steps=options.steps,
        lr=LR,
        lora=adapter(options.lora),
        max_tokens_per_pass=options.pass_tokens,
        colocated=on_gpu,
        engine=engine,
        output=folder,
        logger=None,
        show_samples=None,
    )


def ours(options: argparse.Namespace, folder: str) -> None:
    """Takes the steps of a run of this package."""
    from tensordict import set_list_to_stack

    set_list_to_stack(True).set()
    steps, responses = Steps(options), options.groups * options.group_size
    with make_run(options, folder) as run:
        run.begin()
        run.learner.recorder = scores = Scores(run.recorder)
        steps.begun = time.perf_counter()
        for batch in run.batches():
            run.step += 1
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
                synchronize()
            run.clock.done("train")
            run.update_weights()
            run.clock.done("update")
            run.report(metrics)
            for part in ("train", "update", "sleep"):
                steps.seconds[part] = run.metrics.get(f"time/{part}", 0.0)
            steps.seconds["generate"] = run.metrics["time/collect"]
            tokens = responses * run.metrics["batch/response_tokens"]
            steps.end(tokens, gap=scores.gap())


def grpo_config(options: argparse.Namespace, folder: str) -> Any:
    """Returns TRL's arguments."""
    from trl import GRPOConfig

    with_vllm, fixed = options.side != "trl-hf", {}
    if options.lengths == "fixed":
        fixed = {"min_new_tokens": options.new_tokens}
        fixed = {"ignore_eos": True} if with_vllm else fixed
    responses = options.groups * options.group_size
    arguments = {
        "output_dir": folder,
        "model_init_kwargs": {"dtype": "float32"},
        "per_device_train_batch_size": options.pass_rows,
        "gradient_accumulation_steps": responses // options.pass_rows,
        "num_generations": options.group_size,
        "max_completion_length": options.new_tokens,
        "generation_kwargs": {**options.sampling, **fixed},
        "max_steps": options.steps,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "use_vllm": with_vllm,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": options.side == "trl-sleep",
        "vllm_gpu_memory_utilization": options.engine_memory,
        "vllm_max_model_length": options.new_tokens + 512,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": options.device == "cpu",
        "bf16": options.device == "cuda",
    }
    return GRPOConfig(**{**arguments, **options.trl})


def make_trainer(options: argparse.Namespace, folder: str, **more: Any) -> Any:
    """Returns TRL's trainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    if options.side != "trl-hf":
        from trl.generation import vllm_generation

        make = vllm_generation.LLM
        vllm_generation.LLM = lambda **given: make(**{**given, **options.vllm})
    if options.lora:
        from peft import LoraConfig

        lora = LoraConfig(**adapter(options.lora), task_type="CAUSAL_LM")
        more["peft_config"] = lora
    chats = [[{"role": "user", "content": query}] for query in queries(options)]
    [model] = options.paths
    return GRPOTrainer(
        model=model,
        args=grpo_config(options, folder),
        train_dataset=Dataset.from_dict({"prompt": chats}),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        **more,
    )


def count_parts(trainer: Any, steps: Steps) -> None:
    """Counts the parts of a step of TRL."""
    steps.timed(trainer, "_generate_and_score_completions", "score")
    log_probs = "_get_per_token_logps_and_entropies"
    steps.timed(trainer, log_probs, "old_log_probs", training=False)
    if not trainer.use_vllm:
        steps.timed(trainer, "_generate_single_turn", "generate")
        return
    steps.timed(trainer.vllm_generation, "generate", "generate")
    steps.timed(trainer.vllm_generation, "sync_weights", "update")
    for name in ("sleep", "wake_up"):
        steps.timed(trainer.vllm_generation.llm, name, "sleep")


def trl(options: argparse.Namespace, folder: str) -> None:
    """Takes the steps of TRL's trainer."""
    from transformers import TrainerCallback

    torch.set_float32_matmul_precision("high")
    steps, counts = Steps(options), [0]

    def rewards(completion_ids: list[list[int]], **_: Any) -> list[float]:
        counts.append(sum(map(len, completion_ids)))
        return [reward_of(token_ids) for token_ids in completion_ids]

    class Ends(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            if options.freeze:
                gc.collect()
                gc.freeze()
            steps.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            steps.end(counts[-1])

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            name = "sampling/sampling_logp_difference/mean"
            if name in logs:
                steps.found[-1]["gap"] = float(logs[name])
                steps.write()

    trainer = make_trainer(options, folder, reward_funcs=rewards, callbacks=[Ends()])
    count_parts(trainer, steps)
    trainer.train()


def cell(name: str, found: dict[str, Any]) -> str:
    """Returns median, least and most of a figure after the warm-up."""
    counted = found["steps"][found["options"]["warmup"] :]
    values = [step[name] for step in counted if name in step]
    if not any(values):
        return "-"
    form = ",.0f" if max(values) >= 1000 else ".3g"
    three = (statistics.median(values), min(values), max(values))
    return "{} ({} to {})".format(*(format(value, form) for value in three))


def compare(paths: list[str]) -> None:
    """Prints a table of files, and in which options and versions they differ."""
    files = [json.loads(Path(path).read_text()) for path in paths]
    print("|", " | ".join(["", "steps", *COLUMNS.values()]), "|")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for path, found in zip(paths, files, strict=True):
        options = found["options"]
        cells = [f"{SIDES[options['side']]} (`{path}`)"]
        cells += [str(len(found["steps"]) - options["warmup"])]
        print("|", " | ".join(cells + [cell(name, found) for name in COLUMNS]), "|")
    for kind in ("options", "versions"):
        for name in sorted({name for found in files for name in found[kind]}):
            values = [json.dumps(found[kind].get(name)) for found in files]
            if len({*values}) > 1 and name not in ("side", "json"):
                print(f"\n{name}: {', '.join(values)}")


def main() -> None:
    """Measures a side, or compares what was measured."""
    options = read_options()
    if options.side == "compare":
        compare(options.paths)
    elif options.side == "model":
        save_model(options)
    else:
        with tempfile.TemporaryDirectory(prefix="peers_") as folder:
            (ours if options.side == "ours" else trl)(options, folder)


if __name__ == "__main__":
    main()
