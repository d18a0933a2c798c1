"""Reports of a run: metrics of a batch, a line for each step, and rollouts."""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_sglang.errors import CheckpointError
from torchrl_sglang.objectives.advantages import (
    DONE,
    REWARD,
    TrajectoryReturn,
    conversation_returns,
    groups_of_agents,
    row_rewards,
)
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.private_files import for_owner
from torchrl_sglang.trainers.samples import count_written, plain, rows_of, said_in

SECRETS, HIDDEN = ("api_key", "admin_api_key", "ssl_keyfile_password"), "***"
"""Arguments whose values no logger is told, and what it is told in their place."""

ENVIRONMENT = "environment"
"""Mapping of variables, whose names alone a logger is told: values may be keys."""

SHOWN = (
    ("reward", "batch/reward", "{:.3f}"),
    ("eval", "eval/reward", "{:.3f}"),
    ("tokens", "batch/response_tokens", "{:.0f}"),
    ("cut off", "batch/truncated", "{:.0%}"),
    ("flat", "batch/flat_groups", "{:.0%}"),
    ("age", "batch/age", "{:.1f}"),
    ("tokens/s", "time/tokens_per_second", "{:,.0f}"),
    ("collect", "time/collect", "{:.1f}s"),
    ("score", "time/score", "{:.1f}s"),
    ("train", "time/train", "{:.1f}s"),
    ("sleep", "time/sleep", "{:.1f}s"),
    ("update", "time/update", "{:.1f}s"),
)
"""Words of a step's line: name, metric, format."""


PHASES = {
    "collect": ("collecting", "Generation"),
    "score": ("scoring by the teacher", "Scoring by the teacher"),
    "train": ("training", "Training"),
    "sleep": (
        "putting servers to sleep or waking them up",
        "Putting servers to sleep and waking them up",
    ),
    "update": ("sending weights", "Sending weights"),
    "evaluate": ("evaluating", "Evaluation"),
    "save": ("saving", "Writing checkpoints"),
}
"""Phase of the trainer -> its words in a status, and as the bottleneck of a run."""

TOLD_BY_COLLECTOR = ("collect", "update")
"""Phases that the collector tells a recorder of, in its own words."""


class PhaseClock:
    """Measures the phases of a step, and records those that no collector records."""

    def __init__(self, recorder: RunRecorder | None = None) -> None:
        self._recorder = recorder
        self.seconds: dict[str, float] = {}
        # Others are of runs with a teacher, and of colocated ones.
        self.totals = {name: 0.0 for name in PHASES if name not in ("score", "sleep")}
        self._start = time.perf_counter()

    def done(self, phase: str) -> None:
        """Counts the time since the last call as a phase, of this step."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._start
        self.totals[phase] = self.totals.get(phase, 0.0) + now - self._start
        if self._recorder is not None and phase not in TOLD_BY_COLLECTOR:
            end = time.time()
            self._recorder.add_phase(phase, end - (now - self._start), end)
        self._start = now

    def take(self) -> dict[str, float]:
        """Returns the seconds of each phase, and begins a new step."""
        times = {f"time/{name}": value for name, value in self.seconds.items()}
        self.seconds = {}
        return times


def describe(
    batch: TensorDictBase,
    *,
    policy_version: int,
    group_size: int,
    max_tokens: int | None = None,
    trajectory_return: TrajectoryReturn = "sum",
) -> dict[str, float]:
    """Returns metrics of a whole batch before it is trained on.

    ``batch/reward`` and ``reward_std`` of conversations, ``reward/NAME`` of each named
    reward, ``metrics/NAME`` of agents, ``response_tokens`` that the policy wrote of a
    response, ``truncated``, the share of responses that were cut off, where it is
    known, ``flat_groups``, the share of groups without variance, ``turns`` of a
    conversation, ``tokens`` that the policy wrote, ``age`` and ``age_max`` in weight
    updates. A response of ``max_tokens`` was
    cut off, unless its ``generation_info`` differs.
    """
    returns, conversation = conversation_returns(batch, trajectory_return)
    groups = returns.view(-1, group_size)
    flat = (groups.max(-1).values - groups.min(-1).values) < 1e-9
    if trajectory_return == "mean":
        # Agents that differ in a session are compared one by one.
        spreads: dict[int, float] = defaultdict(float)
        for number, _, values in groups_of_agents(batch, conversation, group_size):
            spread = (values.max() - values.min()).item()
            spreads[number] = max(spreads[number], spread)
        for number, spread in spreads.items():
            flat[number] = spread < 1e-9
    rows = batch.unbind(0)
    lengths = [count_written(row) for row in rows]
    ages = [
        policy_version - versions[versions >= 0].float()
        for versions in (row[POLICY_VERSIONS] for row in rows)
    ]
    age = torch.cat(ages) if ages else torch.zeros(1)
    age = age if len(age) else torch.zeros(1)
    return {
        "batch/reward": returns.mean().item(),
        "batch/reward_std": groups.std(-1).mean().item() if group_size > 1 else 0.0,
        **_named_rewards(batch),
        **_metrics(batch),
        "batch/response_tokens": sum(lengths) / len(lengths),
        **_truncated(rows, lengths, max_tokens),
        "batch/flat_groups": flat.float().mean().item(),
        "batch/turns": len(lengths) / len(returns),
        "batch/tokens": float(sum(lengths)),
        "batch/age": age.mean().item(),
        "batch/age_max": age.max().item(),
    }


def describe_held_out(
    batch: TensorDictBase,
    *,
    policy_version: int,
    max_tokens: int | None = None,
    trajectory_return: TrajectoryReturn = "sum",
) -> dict[str, float]:
    """Returns metrics of responses to held-out prompts, one to each.

    ``eval/reward``, ``eval/response_tokens``, ``eval/truncated`` where it is known, and
    ``eval_reward/NAME`` and ``eval_metrics/NAME``.
    """
    metrics = describe(
        batch,
        policy_version=policy_version,
        group_size=1,
        max_tokens=max_tokens,
        trajectory_return=trajectory_return,
    )
    prefixes = ("reward/", "metrics/")
    named = {f"eval_{k}": v for k, v in metrics.items() if k.startswith(prefixes)}
    names = ("reward", "response_tokens", "truncated")
    rewards = {f"eval/{name}": metrics.get(f"batch/{name}") for name in names}
    return {name: value for name, value in rewards.items() if value is not None} | named


def _truncated(
    rows: Sequence[TensorDictBase], lengths: Sequence[int], max_tokens: int | None
) -> dict[str, float]:
    """Returns the share of responses that were cut off, if that is known of all."""
    truncated = [row.get(("generation_info", "truncated"), None) for row in rows]
    if all(flag is not None for flag in truncated):
        cut = [bool(flag) for flag in truncated]
    elif max_tokens is not None:
        cut = [length >= max_tokens for length in lengths]
    else:
        return {}
    return {"batch/truncated": sum(cut) / len(cut)}


def _named_rewards(batch: TensorDictBase) -> dict[str, float]:
    """Returns the mean of each reward function that has a name."""
    ends = [row for row in batch.unbind(0) if row[DONE].any()]
    figures = {}
    for name, value in ends[0]["next"].items() if ends else ():
        # One number for each conversation, as rewards are written.
        if (
            isinstance(value, torch.Tensor)
            and value.dtype == torch.float32
            and value.shape == (1, 1)
            and name != "reward"
        ):
            values = [row["next", name].item() for row in ends]
            figures[f"reward/{name}"] = sum(values) / len(values)
    return figures


def _metrics(batch: TensorDictBase) -> dict[str, float]:
    """Returns the mean of each metric over the sessions that have it."""
    values = defaultdict(list)
    for row in batch.unbind(0):
        metrics = row.get(("next", "metrics"), None)
        if metrics is not None and row[DONE].any():
            for name, value in metrics.items():
                values[f"metrics/{name}"].append(value.item())
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def summarize(
    totals: Mapping[str, float], bottleneck: str | None, *, in_turn: bool
) -> str:
    """Returns a sentence with the bottleneck of a run.

    ``totals`` are seconds of each phase of the trainer, and ``bottleneck`` is the
    collector's sentence. ``in_turn``, one phase waits for the other, and the longest
    counts.

    Examples:
        >>> totals = {"collect": 6.0, "train": 3.0, "update": 1.0}
        >>> summarize(totals, "Training bounds the run.", in_turn=True)
        'Generation bounds the run (collect 60%, train 30%, update 10%).'
        >>> summarize({**totals, "save": 10.0}, None, in_turn=False)
        'Writing checkpoints bounds the run (collect 30%, train 15%, update 5%, \
    save 50%).'
    """
    total = sum(totals.values()) or 1.0
    shares = ", ".join(
        f"{name} {seconds / total:.0%}" for name, seconds in totals.items()
    )
    sentence, longest = bottleneck or "", max(totals, key=lambda phase: totals[phase])
    # The collector does not know what else the trainer does.
    elsewhere = longest not in ("collect", "train", "update")
    in_turn = in_turn and not sentence.startswith("The environment")
    if elsewhere or in_turn or not sentence:
        sentence = f"{PHASES[longest][1]} bounds the run."
    return f"{sentence.rstrip('.')} ({shares})."


def flatten(arguments: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted names and values as every logger takes them, without keys.

    Examples:
        >>> flatten({"lr": 1e-6, "lora": {"r": 8}, "rewards": len, "env": None})
        {'lr': 1e-06, 'lora.r': 8, 'rewards': 'len'}
    """
    flat: dict[str, Any] = {}
    for key, value in arguments.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = flatten(value, f"{name}.")
            flat |= dict.fromkeys(inner, HIDDEN) if key == ENVIRONMENT else inner
        elif isinstance(value, (bool, int, float)):
            flat[name] = value
        elif value is not None:
            text = getattr(value, "__qualname__", None) or hide_passwords(value)
            flat[name] = HIDDEN if key in SECRETS else text
    return flat


def line_of(step: int, steps: int | None, metrics: Mapping[str, float]) -> str:
    """Returns the line that a step prints.

    Examples:
        >>> line_of(3, 10, {"batch/reward": 0.5, "time/train": 1.25})
        'step 3/10: reward 0.500, train 1.2s'
    """
    words = [
        f"{name} {form.format(metrics[key])}"
        for name, key, form in SHOWN
        if key in metrics
    ]
    of = "" if steps is None else f"/{steps}"
    return f"step {step}{of}: {', '.join(words)}"


def status_of(step: int, phase: str, seconds: float, stats: Mapping[str, Any]) -> str:
    """Returns the progress of a step after ``seconds``, with the collector's stats.

    Examples:
        >>> status_of(4, "collect", 65.2, {"groups_ready": 9, "groups_running": 7})
        'step 4, 65 s: collecting, 9 groups are complete, 7 run'
        >>> status_of(4, "train", 70.4, {"groups_ready": 0, "groups_running": 0})
        'step 4, 70 s: training'
    """
    words = [f"step {step}, {seconds:.0f} s: {PHASES[phase][0]}"]
    ready, running = stats.get("groups_ready", 0), stats.get("groups_running", 0)
    if ready or running or (phase == "collect" and "groups_ready" in stats):
        words.append(f"{ready} groups are complete, {running} run")
        if rate := stats.get("lately", {}).get("tokens_per_second"):
            words.append(f"{rate:,.0f} tokens/s")
    return ", ".join(words)


class Rollouts:
    """Appends the responses of each step to a JSON-lines file.

    A row is one of :func:`.rows_of`, with null in place of a number that is NaN or
    infinite, which JSON has none of.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(  # noqa: SIM115
            path, "a", encoding="utf-8", errors="backslashreplace", opener=for_owner
        )

    def write(self, step: int, batch: TensorDictBase, query_key: str) -> None:
        """Writes the rows of a batch with advantages."""
        lines = [_line(row) for row in rows_of(step, batch, query_key)]
        try:
            self._file.writelines(lines)
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._file.name} cannot be written: {error}. Make room; "
                f"resume='auto' goes on after the newest checkpoint."
            ) from error

    def close(self) -> None:
        """Closes the file, of which each step was written out."""
        with suppress(OSError):
            self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON; a number that is not finite is null."""
    finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
    return json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n"


def sample_of(batch: TensorDictBase, query_key: str) -> str:
    """Returns the best response of a batch with its prompt, shortened, for a reader."""
    rewards = row_rewards(batch)
    row = batch[int(rewards.argmax())]
    text = str(said_in(row) or "")
    prompt = str(plain(row.get(query_key, "")))
    return f"  {prompt[-200:]!r} -> {text[:400]!r} (reward {float(rewards.max()):g})"


def describe_rows(rows: TensorDictBase, query_key: str = "query") -> str:
    """Says which responses a step was to be made of, those with bad numbers first."""
    if REWARD not in rows.keys(True):
        return f"It was to train on {len(rows)} responses without rewards."
    rewards = row_rewards(rows).tolist()
    queries = [plain(row.get(query_key, "")) for row in rows.unbind(0)]
    lines = [
        (math.isfinite(reward), f"{str(query)[:80]!r} (reward {reward:g})")
        for query, reward in zip(queries, rewards, strict=True)
    ]
    # Of a group, once; not finite ones first.
    texts = list(dict.fromkeys(text for _, text in sorted(lines, key=lambda x: x[0])))
    end = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return f"It was to train on {len(rows)} responses to {', '.join(texts[:5])}{end}."
