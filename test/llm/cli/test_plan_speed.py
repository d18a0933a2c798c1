"""``plan``: its seconds of a step are those of measured runs."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3MoeConfig

from torchrl_sglang.cli import main
from torchrl_sglang.cli.bench.models import FIELDS, SHAPES
from torchrl_sglang.cli.plan.arrange import Arrangement, Cluster, arrange
from torchrl_sglang.cli.plan.memory import GIB, Workload
from torchrl_sglang.cli.plan.shapes import read_shape
from torchrl_sglang.cli.plan.show import to_text
from torchrl_sglang.cli.plan.speed import (
    CARDS,
    FAR,
    MATMUL_SHARE,
    NEAR,
    UPDATE_FACTOR,
    collect_seconds,
    estimate,
    find_card,
    interpolate,
    train_flop,
)

REPOSITORY = Path(__file__).parents[3]
ROWS = json.loads((REPOSITORY / "benchmarks" / "table.json").read_text())
NOT_PLANNED = {"fp8-1"}
"""Rows of a kind that ``plan`` does not know: servers in FP8."""

CONFIGS = {
    name: Qwen2Config(**dict(zip(FIELDS, SHAPES[name], strict=True))) for name in SHAPES
} | {
    "smollm2-135m-instruct": LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        vocab_size=49_152,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
}
shape_of = functools.cache(lambda name: read_shape(CONFIGS[name]))
STALENESS = {"synchronous": 0, "colocated": 0, "asynchronous-1": 1, "asynchronous-2": 2}
PROMPT = 59
"""Tokens of a prompt of ``benchmarks/recipe.py`` in the tiny tokenizer's template."""


def arrangement(name, card, work, *, ranks=1, replicas=1, **options):
    """Returns an arrangement with so many GPUs of each side."""
    memory = CARDS[card].memory[0] * GIB
    cluster = Cluster(gpus=ranks + replicas, memory=memory, card=card)
    found = arrange(shape_of(name), cluster, work, **options)
    assert isinstance(found, Arrangement)
    return replace(found, ranks=ranks, replicas=replicas)


def speed_of(row):
    """Returns the seconds that ``plan`` has for a row of the table."""
    work = Workload(
        sequence=PROMPT + 2048,
        prompt=PROMPT,
        mean_response=round(row["batch/response_tokens"]),
        group_size=8,
        groups_per_batch=32,
    )
    colocated = row["row"] == "colocated"
    found = arrangement(
        row["model"],
        row["hardware"].split()[2],
        work,
        ranks=row["ranks"],
        replicas=row["ranks"] if colocated else 1,
        place="colocated" if colocated else "separate",
        tokens=8192 if row["model"] == "7b" else 16_384,
    )
    shape = shape_of(row["model"])
    return estimate(shape, found, staleness=STALENESS[row["row"]])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=f"{row['model']}-{row['row']}-{row['hardware']}")
        for row in ROWS
        if row["row"] not in NOT_PLANNED
    ],
)
def test_rows_of_the_table(row):
    """The ranges of ``plan`` have each measured median in them, and are narrow."""
    speed = speed_of(row)
    assert not speed.unmeasured
    measured = {name: row[name][0] for name in ("train", "step")}
    measured["update"] = row["update"][0] + row["sleep"][0]
    if STALENESS[row["row"]] == 0:
        # In asynchronous rows, the trainer waits for the remainder alone.
        measured["collect"] = row["collect"][0]
    for name, seconds in measured.items():
        expected, least, most = speed.ranges[name]
        assert least < seconds < most, name
        assert most / expected <= (UPDATE_FACTOR if name == "update" else NEAR) + 1e-9


def test_rows_are_known():
    kinds = {row["row"] for row in ROWS}
    assert kinds <= {*STALENESS, *NOT_PLANNED}
    assert {row["model"] for row in ROWS} <= set(CONFIGS)


@pytest.mark.parametrize(
    ("model", "prompt", "tokens", "responses", "rate", "factor"),
    [
        # benchmarks/modes.py fp8 7b, of which constants were taken.
        pytest.param("7b", 64, 256, 32, 5681, NEAR, id="modes-32"),
        pytest.param("7b", 64, 256, 256, 22_383, NEAR, id="modes-256"),
        # Rows of RESULTS.md that no constant was taken of: the processor decides.
        pytest.param("0.5b", 128, 256, 256, 64_495, 1.45, id="bench-throughput"),
        pytest.param("0.5b", 64, 256, 128, 28_945, 1.45, id="modes-deterministic"),
        pytest.param("0.5b", 520, 1024, 256, 262_144 / 4.98, 1.45, id="recipe"),
    ],
)
def test_servers_alone(model, prompt, tokens, responses, rate, factor):
    """Responses of equal length, on one H200."""
    work = Workload(
        sequence=prompt + tokens,
        prompt=prompt,
        mean_response=tokens,
        group_size=1,
        groups_per_batch=responses,
    )
    found = arrangement(model, "H200", work)
    shape = shape_of(model)
    seconds = collect_seconds(shape, found, CARDS["H200"], 0)
    expected = responses * tokens / seconds
    assert rate / factor < expected < rate * factor


@pytest.mark.parametrize(
    ("size", "mfu"),
    [(0.1, 0.1), (1, 0.1), (2, 0.15), (4, 0.2), (128, 0.4), (999, 0.4)],
)
def test_mfu_between_and_beyond_measured_sizes(size, mfu):
    assert interpolate({1: 0.1, 4: 0.2, 128: 0.4}, size) == pytest.approx(mfu, abs=1e-9)


def test_prefill():
    """benchmarks/distillation.py 7b: 45,014 tokens/s of raw prefill."""
    shape = shape_of("7b")
    rate = MATMUL_SHARE * CARDS["H200"].flops / 2 / (shape.matrices + shape.head)
    assert rate == pytest.approx(45_014, rel=0.05)


def test_flop_are_those_of_the_benchmark():
    """The count of ``benchmarks/training.py``, for responses of equal length."""
    shape = shape_of("0.5b")
    prompt, length, rows = 128, 896, 32
    matrices = shape.layers * (896 * (896 + 2 * 128) + 896 * 896 + 3 * 896 * 4864)
    forward = rows * (
        2 * matrices * (prompt + length)
        + 2 * 24 * 896 * (prompt + length) ** 2
        + 2 * 151_936 * 896 * length
    )
    work = Workload(
        sequence=prompt + length,
        prompt=prompt,
        mean_response=length,
        group_size=4,
        groups_per_batch=rows // 4,
    )
    assert train_flop(shape, work) == pytest.approx(3 * forward, rel=0.001)


def test_shared_prompts_are_trained_once():
    shape = shape_of("0.5b")
    work = Workload(sequence=2048, prompt=1024)
    long, none = train_flop(shape, work), Workload(sequence=1024)
    assert long < 2 * train_flop(shape, none)


@pytest.mark.parametrize(
    ("changes", "longer"),
    [
        ({"mean_response": 1024}, ("collect", "train")),
        ({"sequence": 4096, "mean_response": 512}, ("collect",)),
        ({"groups_per_batch": 64}, ("collect", "train")),
        ({"reference": True}, ("train",)),
        ({"prompt": 1024, "sequence": 3072}, ("collect", "train")),
    ],
)
def test_a_larger_load_takes_longer(changes, longer):
    shape, work = shape_of("3b"), Workload()
    speeds = [
        estimate(shape, arrangement("3b", "H200", each))
        for each in (work, replace(work, **changes))
    ]
    for name in ("collect", "train", "step"):
        before, after = (getattr(each, name) for each in speeds)
        assert after > before * 1.01 if name in longer else after >= before * 0.99


def test_a_full_cache_makes_responses_wait():
    shape, work = shape_of("7b"), Workload(groups_per_batch=64)
    found = arrangement("7b", "H200", work)
    tight = replace(found, server=replace(found.server, cache=found.server.cache / 50))
    wide, narrow = (
        collect_seconds(shape, each, CARDS["H200"], 0) for each in (found, tight)
    )
    assert narrow > 1.2 * wide


def test_far_from_measured_runs_the_range_is_wide():
    shape = shape_of("7b")
    cluster = Cluster(gpus=8, memory=80 * GIB, card="H100")
    found = arrange(shape, cluster, Workload(lora=8, checkpointing=False))
    speed = estimate(shape, found)
    assert speed.unmeasured[:3] == (
        "7.62B parameters",
        "4 trainer ranks",
        "4 servers",
    )
    step, least, most = speed.ranges["step"]
    assert (most / step, step / least) == pytest.approx((FAR, FAR))
    text = to_text(shape, found)
    assert "The range is wide: no measured run on H100s had 7.62B parameters" in text
    # An update is of the adapter alone.
    assert speed.update == pytest.approx(0.1, rel=0.02)


@pytest.mark.parametrize(
    ("config", "cluster", "reason"),
    [
        ("0.5b", Cluster(gpus=2, memory=24 * GIB), "a GPU of 24 GiB"),
        ("0.5b", Cluster(gpus=2, card="A100"), "no run on A100 was measured"),
        ("0.5b", Cluster(gpus=16, card="H100"), "no run on several machines"),
        ("moe", Cluster(gpus=2, card="H100"), "no run of a mixture of experts"),
    ],
)
def test_what_was_not_measured_has_no_seconds(config, cluster, reason):
    mixture = Qwen3MoeConfig(num_hidden_layers=2, num_experts=8)
    shape = read_shape({**CONFIGS, "moe": mixture}[config])
    found = arrange(shape, cluster, Workload())
    assert reason in estimate(shape, found)
    assert "Seconds of a step are unknown: no run" in to_text(shape, found)


def test_cards_by_their_memory():
    sizes = {24: None, 48: None, 80: "H100", 96: None, 139.8: "H200", 141: "H200"}
    assert {size: find_card(size) for size in sizes} == sizes


def test_the_command_prints_seconds(tmp_path, capsys):
    CONFIGS["0.5b"].save_pretrained(tmp_path)
    words = ["plan", "--model", str(tmp_path), "--gpus", "2", "--gpu-memory", "140"]
    words += ["--mean-response", "600"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert (
        "Seconds of a step, if these are H200s (--card), for responses of 600" in text
    )
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    speed, margin = found["speed"], found["margin"]
    expected, least, most = speed["step"]
    assert f"  {'a step':36} {expected:8.2f}   {least:.2f} to {most:.2f}" in text
    assert speed["step"][0] == pytest.approx(
        max(speed["collect"][0], speed["train"][0]) + speed["update"][0]
    )
    assert speed["steps_an_hour"] == pytest.approx(3600 / speed["step"][0])
    assert margin > 100 * GIB
    assert main([*words, "--json", "--card", "a100"]) == 0
    speed = json.loads(capsys.readouterr().out)["speed"]
    assert speed["unknown"].startswith("no run on A100")
    assert main([*words, "--mean-response", "3000"]) == 2
    assert "--mean-response 3000 is more than the 2048" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "seconds"),
    [
        (["NVIDIA H200"], "if these are H200s"),
        (["NVIDIA H100 80GB HBM3"] * 2, "if these are H100s"),
        (["NVIDIA A100-SXM4-80GB"], "no run on NVIDIA A100-SXM4-80GB was measured"),
    ],
)
def test_the_card_of_this_machine(names, seconds, tmp_path, capsys, monkeypatch):
    """An A100 has the memory of an H100, and another speed."""
    CONFIGS["0.5b"].save_pretrained(tmp_path)
    gpus = [SimpleNamespace(name=each, total_memory=79 * GIB) for each in names]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert main(["plan", "--model", str(tmp_path), "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert seconds in text
    assert "2 GPUs of 79.0 GiB" in text


def test_the_guide_has_the_figures_of_today():
    guide = (REPOSITORY / "docs/source/guides/arrangements.rst").read_text()
    shape = shape_of("7b")
    found = arrange(shape, Cluster(gpus=8, card="H100"), Workload())
    lines = to_text(shape, found).splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("Seconds of"))
    assert lines[first : first + 7] == [
        line.removeprefix("   ")
        for line in guide[guide.index("   Seconds of a step, if") :].splitlines()[:7]
    ]
    rates = " ".join(guide.split())
    for card in CARDS.values():
        assert ", ".join(f"{size}B" for size in card.mfu) in rates
        assert ", ".join(f"{mfu:.3f}" for mfu in card.mfu.values()) in rates
