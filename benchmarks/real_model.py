"""Trains SmolLM2-135M-Instruct on tasks of reasoning-gym: what it learns, how fast.

Several runs side by side, on one GPU or on a CPU. Each worker has a server and its runs
one after the other, each for so many seconds; a run is a small JSON file:

    python benchmarks/real_model.py run --plan main --seconds 150 --output OUT
    python benchmarks/real_model.py run --plan try --device cpu --output OUT

and what `docs/source/results.rst` shows is made of all of them:

    python benchmarks/real_model.py report OUT [OUT ...]

The model is made once by `examples/grpo/smollm2.py`, and reasoning-gym is installed
by `pip install "torchrl-sglang[tasks]"`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "grpo"
MODEL = Path("runs/smollm2-135m-instruct")

SHORT = {"max_new_tokens": 12, "temperature": 1.0}
NUMBER_ONLY = " Answer with the number only."

TASKS: dict[str, dict[str, Any]] = {
    "sums": {
        "task": {
            "data": {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 2}},
            "answer": "number",
        },
        "generate_kwargs": SHORT,
    },
    "letters": {
        "task": {
            "data": {"letter_counting": {"min_words": 3, "max_words": 6}},
            "answer": "number",
            "suffix": NUMBER_ONLY,
        },
        "generate_kwargs": SHORT,
    },
    "syllogisms": {
        "task": {
            "data": {"syllogism": {}},
            "answer": "whole",
            "suffix": " Answer with one word only.",
        },
        "generate_kwargs": SHORT,
    },
    "haystack": {
        "task": {
            "data": {
                "needle_haystack": {"min_num_statements": 3, "max_num_statements": 5}
            },
            "answer": "whole",
        },
        "generate_kwargs": SHORT,
    },
    "family": {
        "task": {"data": {"family_relationships": {}}, "answer": "whole"},
        "generate_kwargs": SHORT,
    },
    "stories": {
        "task": {"data": {"gsm_symbolic": {}}, "answer": "number"},
        "generate_kwargs": {"max_new_tokens": 192, "temperature": 1.0},
    },
}
"""Name -> arguments of ``examples/grpo``."""

FULL = {"lr": 1e-5}
LORA = {"lora": {"r": 32, "lora_alpha": 64}, "lr": 2e-4}
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocated": {"colocated": True},
    "k1": {"max_staleness": 1, "correction": "decoupled_token_is"},
    "k2": {"max_staleness": 2, "correction": "decoupled_token_is"},
}

SEVERAL = {"minibatches": 4, "epochs_per_batch": 2}
SAMPLERS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.7},
    "warm": {"temperature": 1.3},
    "nucleus": {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
}
REPLAY: dict[str, dict[str, Any]] = {
    "model": {},
    "replayed": {"logprobs_mode": "behaviour"},
    "ignored": {"logprobs_mode": "behaviour", "loss": {"replay_sampling": False}},
}
# Several steps for each batch, and a sampler that is not the model: "cold-replayed"
# trains what is drawn from, "cold-model" the model, from its own log-probs, and
# "cold-ignored" the model, from those of the sampler.
ARRANGEMENTS |= {
    f"{sampler}-{mode}": {"sampling": given, **SEVERAL, **options}
    for sampler, given in SAMPLERS.items()
    for mode, options in REPLAY.items()
}

SHARED: dict[str, Any] = {
    "group_size": 16,
    "groups_per_batch": 16,
    "on_stale": "retry",
    "max_tokens_per_pass": 16_384,
    "steps": 1_000_000,
    "gradient_checkpointing": False,
    "show_samples": None,
    "logger": None,
}

# A worker's runs share a server: TASK/WEIGHTS/ARRANGEMENT/SEED.
PLANS: dict[str, list[list[str]]] = {
    # Two tiny runs, for a CPU.
    "try": [["sums/full/sync/0", "sums/full/k1/0"]],
    "try-lora": [["sums/lora/sync/0", "sums/lora/k1/0"]],
    "try-torchrl": [["sums/full/torchrl/0"]],
    # A GPU's first try: each kind of worker once.
    "first": [
        ["sums/full/sync/0", "sums/full/k2/0"],
        ["syllogisms/full/k1/0", "letters/full/sync/0"],
        ["sums/lora/sync/0"],
        ["sums/full/colocated/0"],
        ["sums/full/torchrl/0"],
    ],
    # Three seeds of three arrangements.
    "main": [
        [f"{task}/full/{kind}/{seed}" for kind in ("sync", "k1", "k2")]
        for task, seed in (
            ("sums", 0),
            ("sums", 1),
            ("sums", 2),
            ("syllogisms", 0),
            ("letters", 0),
        )
    ],
    # Sampler and trainer: SGLang 0.5.20 reports what top-p leaves, others only know
    # the temperature.
    "temperature": [
        [f"sums/full/{sampler}-{mode}/{seed}" for seed in range(3)]
        for sampler in ("cold", "warm")
        for mode in ("model", "replayed")
    ],
    # What was left to run on a GPU.
    "last": [
        *(
            [f"sums/full/{sampler}-{mode}/{seed}" for seed in range(3)]
            for sampler in ("cold", "warm")
            for mode in ("model", "replayed")
        ),
        ["sums/full/colocated/0", "family/full/colocated/0"],
        ["haystack/full/sync/0", "sums/full/torchrl/0"],
    ],
    # Servers that sleep, beside others.
    "beside": [
        ["sums/full/sync/1", "family/full/sync/0"],
        ["haystack/full/sync/0", "sums/full/torchrl/0"],
        ["sums/full/colocated/0", "family/full/colocated/0"],
        ["sums/full/colocated/1"],
    ],
    "nucleus": [
        [f"sums/full/nucleus-{mode}/{seed}" for seed in range(3)]
        for mode in ("model", "replayed")
    ],
    "try-replay": [["sums/full/cold-replayed/0", "sums/full/nucleus-replayed/0"]],
    "stories": [["stories/full/sync/0", "stories/full/k2/0"]],
    # All else.
    "rest": [
        ["syllogisms/full/sync/1", "syllogisms/full/k2/1", "syllogisms/lora/sync/0"],
        ["syllogisms/full/sync/2", "syllogisms/full/k2/2", "letters/lora/sync/0"],
        ["sums/lora/sync/0", "sums/lora/k1/0", "sums/lora/k2/0"],
        ["sums/full/colocated/0", "syllogisms/full/colocated/0"],
        ["sums/lora/colocated/0"],
        ["sums/full/torchrl/0"],
    ],
}

EVALUATIONS = 8
"""Held-out evaluations of a run, beside the one before it."""

SAMPLES = 4
"""Held-out problems of which a run keeps the answers."""

START_TIMEOUT = 420.0
"""Seconds for a server to start beside others."""


def parse_name(name: str) -> dict[str, Any]:
    """Returns the parts of a run's name.

    Examples:
        >>> parse_name("sums/full/k1/2")["seed"]
        2
    """
    task, weights, kind, seed = name.split("/")
    return {"task": task, "weights": weights, "kind": kind, "seed": int(seed)}


def arguments_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of ``GRPO`` of a run."""
    reasoning = importlib.import_module("reasoning")
    parts = parse_name(name)
    task = dict(TASKS[parts["task"]])
    held_out = {"held_out": options.held_out}
    prompts = reasoning.arguments_of({**task.pop("task"), **held_out, "size": 4000})
    weights = LORA if parts["weights"] == "lora" else FULL
    found = {**SHARED, **task, **weights, **ARRANGEMENTS[parts["kind"]], **prompts}
    found["generate_kwargs"] = found["generate_kwargs"] | found.pop("sampling", {})
    for change in options.set:
        key, _, value = change.partition("=")
        found[key] = json.loads(value)
    return {**found, "seed": parts["seed"]}


def server_of(names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of the server of a worker."""
    parts = [parse_name(name) for name in names]
    found: dict[str, Any] = {"max_model_len": 1024, "start_timeout": START_TIMEOUT}
    if any(ARRANGEMENTS.get(each["kind"], {}).get("logprobs_mode") for each in parts):
        # Log-probs after the temperature.
        found["environment"] = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    if any(each["weights"] == "lora" for each in parts):
        found |= {"enable_lora": True, "max_lora_rank": 32}
        found |= {"lora_target_modules": ["all"]}
    if options.device == "cpu":
        return {**found, "device": "cpu", "dtype": "float32", "max_model_len": 512}
    if any(each["kind"] == "colocated" for each in parts):
        found["enable_memory_saver"] = True
    from torchrl_sglang.cli.bench.measure import server_arguments

    return {
        **found,
        "dtype": "bfloat16",
        "cuda_devices": [0],
        # Of the memory that is free, of which others take their part meanwhile.
        "mem_fraction_static": 0.5,
        "max_total_tokens": 131_072,
        "max_running_requests": 256,
        **server_arguments(),
    }


class Watch:
    """Notes a run's steps, and says when to evaluate and to end."""

    def __init__(self, run: Any, seconds: float, deadline: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self._run, self._seconds, self._deadline = run, seconds, deadline
        self._next_evaluation = seconds / EVALUATIONS

    @property
    def elapsed(self) -> float:
        """Seconds so far, without evaluations and measurements."""
        totals = self._run.clock.totals
        return float(totals["collect"] + totals["train"] + totals["update"])

    def is_over(self) -> bool:
        """Returns whether the run's time is used up."""
        return self.elapsed >= self._seconds or time.time() >= self._deadline

    def is_due(self) -> bool:
        """Returns whether to evaluate after this step."""
        due = self.elapsed >= self._next_evaluation
        while self.elapsed >= self._next_evaluation:
            self._next_evaluation += self._seconds / EVALUATIONS
        return due

    def note(self) -> None:
        """Adds the metrics of the last step."""
        row = {"step": self._run.step, "seconds": self.elapsed, **self._run.metrics}
        self.rows.append({name: rounded(value) for name, value in row.items()})


def rounded(value: Any) -> Any:
    """Returns a number with six digits, as strict JSON has them."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def log_prob_gap(run: Any, batch: Any, rows: int = 32) -> dict[str, float]:
    """Compares log-probs of trainer and server, of responses of these very weights."""
    import torch

    from torchrl_sglang import replay_sampling
    from torchrl_sglang.objectives.columns import POLICY_VERSIONS
    from torchrl_sglang.objectives.support import SAMPLING_KEYS
    from torchrl_sglang.trainers.models import scorer

    now = run.collector.policy_version
    fresh = [
        row
        for row in batch.unbind(0)[:rows]
        if bool((row[POLICY_VERSIONS][row[POLICY_VERSIONS] >= 0] == now).all())
    ]
    if not fresh:
        return {}
    actor = scorer(run.model, run.learner.actor.tokenizer)
    device = next(run.model.parameters()).device
    gaps = []
    with (
        torch.no_grad(),
        torch.autocast(
            device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"
        ),
        replay_sampling(actor),
    ):
        for row in fresh:
            one = row.unsqueeze(0)
            one = one.select("tokens", "masks", *SAMPLING_KEYS, strict=False).to(device)
            (found,) = actor(one).get(("log_probs", "full"), as_list=True)
            engine = row["log_probs", "full"]
            known = engine.isfinite()
            gaps.append((found.cpu().float() - engine.cpu())[known].abs())
    gap = torch.cat(gaps)
    return {"gap/mean": gap.mean().item(), "gap/max": gap.max().item()}


def train(name: str, engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Trains for so many seconds, and returns what was measured."""
    from torchrl_sglang import GRPO

    given = arguments_of(name, options)
    folder = Path(options.output) / "scratch" / name.replace("/", "_")
    run = GRPO(str(options.model), engine=engine, output=folder, **given)
    answer = importlib.import_module("reasoning").greedy_answers
    shown, system = given["eval_prompts"][:SAMPLES], given["system_prompt"]

    def answers() -> list[dict[str, str]]:
        found: list[dict[str, str]] = answer(engine, shown, system, run.sampling)
        return found

    with run:
        run.begin()
        # Nothing is saved: no model is better than this.
        run.best = math.inf
        watch = Watch(run, options.seconds, options.deadline)
        watch.note()
        before = answers()
        for batch in run.batches():
            run.step += 1
            gap = log_prob_gap(run, batch) if (due := watch.is_due()) else {}
            run.clock.done("evaluate")
            with run.memory_for_training():
                metrics = run.learner.train(batch, run.collector.policy_version)
            run.clock.done("train")
            run.update_weights()
            run.clock.done("update")
            if due or watch.is_over():
                metrics |= run.evaluate()
            run.report(metrics | gap)
            watch.note()
            if watch.is_over():
                break
        after = answers()
    import torch

    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return {
        "rows": watch.rows,
        "samples": [
            {**old, "after": new["said"]}
            for old, new in zip(before, after, strict=True)
        ],
        "gigabytes": round(peak / 1e9, 2),
        "arguments": {k: v for k, v in run.hyperparameters.items() if v is not None},
    }


def run_worker(options: argparse.Namespace) -> None:
    """Starts a server, and trains one run after the other with it."""
    sys.path.insert(0, str(EXAMPLES))
    import torch

    from torchrl_sglang import AsyncSGLang

    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    output = Path(options.output)
    begin = time.perf_counter()
    engine = AsyncSGLang.from_pretrained(
        str(options.model), **server_of(options.names, options)
    )
    started = time.perf_counter() - begin
    print(f"{options.names[0]}: the server is ready in {started:.0f} s", flush=True)
    with engine:
        for number, name in enumerate(options.names):
            left = options.until - time.time()
            # Evaluations and the end of a run take their time, too.
            share = left / (len(options.names) - number) - 10
            options.deadline = time.time() + share
            options.seconds = min(options.seconds_wanted, share - 15)
            found: dict[str, Any] = {"name": name, **parse_name(name)}
            found |= {"server_start_seconds": round(started, 1)}
            try:
                if options.seconds < 10:
                    raise TimeoutError(f"{left:.0f} s are left for it")
                function = torchrl_run if found["kind"] == "torchrl" else train
                found |= function(name, engine, options)
            except BaseException as error:
                found["error"] = "".join(traceback.format_exception(error))[-6000:]
                print(f"{name}: {error!r}", flush=True)
                if not isinstance(error, Exception):
                    raise
            finally:
                path = output / f"{name.replace('/', '_')}.json"
                path.write_text(json.dumps(found))


def torchrl_run(name: str, engine: Any, options: argparse.Namespace) -> dict[str, Any]:
    """The same run with TorchRL's own parts."""
    module = importlib.import_module("real_model_torchrl")
    found: dict[str, Any] = module.run(name, engine, options, arguments_of)
    return found


def run_plan(options: argparse.Namespace) -> int:
    """Starts the workers of a plan side by side, and waits for them."""
    plan = PLANS[options.plan]
    output = Path(options.output)
    output.mkdir(parents=True, exist_ok=True)
    until = time.time() + options.limit
    workers = []
    for number, names in enumerate(plan):
        command = [sys.executable, __file__, "worker", *names, "--until", str(until)]
        for key in ("device", "seconds", "output", "model", "threads", "held_out"):
            flag = key.replace("_", "-")
            command += [f"--{flag}", str(getattr(options, key))]
        for change in options.set:
            command += ["--set", change]
        log = (output / f"worker{number}.log").open("w")
        workers.append(
            subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": str(options.threads)},
            )
        )
    failed = 0
    for number, worker in enumerate(workers):
        try:
            failed += worker.wait(timeout=max(until + 20 - time.time(), 1)) != 0
        except subprocess.TimeoutExpired:
            # It ends its server, which SIGKILL would leave to itself.
            worker.terminate()
            failed += 1
            print(f"worker {number} did not come to its end", flush=True)
    for worker in workers:
        try:
            worker.wait(timeout=20)
        except subprocess.TimeoutExpired:
            worker.kill()
    files = sorted(output.glob("*_*.json"))
    bundle = [json.loads(file.read_text()) for file in files]
    (output / "runs.json").write_text(
        json.dumps({"plan": options.plan, "runs": bundle})
    )
    for file in files:
        file.unlink()
    for found in bundle:
        print(one_line(found), flush=True)
    return failed


def one_line(found: Mapping[str, Any]) -> str:
    """Returns the result of a run in a line."""
    rows = found.get("rows", [])
    held_out = [r["eval_reward/right"] for r in rows if "eval_reward/right" in r]
    said = f"{found['name']:28} {len(rows) - 1:5} steps"
    if held_out:
        said += f", {held_out[0]:.3f} -> {held_out[-1]:.3f} (best {max(held_out):.3f})"
    if "error" in found:
        said += f", error: {found['error'].strip().splitlines()[-1][:300]}"
    return said


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="train the runs of a plan")
    worker = verbs.add_parser("worker", help="what run starts")
    for each in (runs, worker):
        each.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        each.add_argument("--seconds", type=float, default=150.0, help="of each run")
        each.add_argument("--output", default="runs/real_model")
        each.add_argument("--model", type=Path, default=MODEL)
        each.add_argument("--threads", type=int, default=2, help="of each trainer")
        each.add_argument("--held-out", type=int, default=200)
        each.add_argument("--set", action="append", default=[], metavar="NAME=JSON")
    runs.add_argument("--plan", choices=PLANS, default="main")
    runs.add_argument("--limit", type=float, default=560.0, help="seconds in all")
    worker.add_argument("names", nargs="+")
    worker.add_argument("--until", type=float, required=True)
    report = verbs.add_parser("report", help="tables and plots of the documentation")
    report.add_argument("folders", nargs="+", type=Path)
    report.add_argument("--docs", type=Path, default=ROOT / "docs" / "source")
    demo = verbs.add_parser("demo", help="table and plot of a run of make demo-real")
    demo.add_argument("folder", type=Path, help="that it wrote to")
    demo.add_argument("--docs", type=Path, default=ROOT / "docs" / "source")
    options = parser.parse_args()
    if options.verb == "run":
        return run_plan(options)
    if options.verb == "worker":
        options.seconds_wanted = options.seconds
        run_worker(options)
        return 0
    module = importlib.import_module("real_model_report")
    if options.verb == "demo":
        module.write_demo(options.folder, options.docs)
    else:
        module.write(options.folders, options.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
