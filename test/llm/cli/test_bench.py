"""Measuring, on the test session's server."""

from __future__ import annotations

import dataclasses
import importlib
import json
import random
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.forked_starts import trainer_python

from torchrl_sglang.cli import main
from torchrl_sglang.cli.bench import plan, to_lines
from torchrl_sglang.cli.bench.collectors import default_in_flight
from torchrl_sglang.cli.bench.generation import (
    long_tailed,
    make_prompts,
    measure_throughput,
)
from torchrl_sglang.cli.bench.models import BUILT_IN, SMALL_MODELS, Load, save_model
from torchrl_sglang.cli.bench.timing import percentile
from torchrl_sglang.cli.bench.transfer import limit_of_gloo
from torchrl_sglang.errors import ConfigurationError, ServerUnavailableError

SMALL = ["--prompts=6", "--prompt-tokens=8", "--new-tokens=4", "--repeats=2"]


@pytest.fixture(autouse=True)
def quick_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank of a measured broadcast is forked."""
    monkeypatch.setattr(sys, "executable", trainer_python())


SCRIPTS = Path(__file__).parents[3] / "benchmarks"


def bench(capsys, *words: str) -> dict:
    assert main(["bench", *words, *SMALL, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    return report


def test_throughput_of_a_running_server(engine, capsys):
    report = bench(capsys, "throughput", "--url", engine.server_url)
    found = report["throughput"]
    assert found["raw"] > 0
    assert found["ratio"] == pytest.approx(found["engine"] / found["raw"])
    assert report["latency"] is None
    assert report["weights"] is None
    assert report["sglang"] == engine.capabilities.version
    assert report["device"] == "cpu"
    assert engine.health()


@pytest.mark.parametrize("callers", [1, 4, 9])
def test_latency_of_a_running_server(engine, capsys, callers):
    words = ("latency", "--url", engine.server_url, "--concurrency", str(callers))
    found = bench(capsys, *words)["latency"]
    # All prompts of both rounds that count, and none twice.
    assert found["requests"] == 12
    for client in ("raw", "engine"):
        assert 0 < found[client]["p50"] <= found[client]["p90"] <= found[client]["p99"]


def test_overhead_of_a_running_server(engine, capsys):
    report = bench(capsys, "overhead", "--url", engine.server_url)
    assert report["overhead"]["tokens"] >= 6
    assert report["overhead"]["shortest"] >= 1
    found = report["overhead"]["clients"]
    assert {*found} == {"raw_each", "raw", "each", "engine", "batches"}
    assert max(found[name]["ratio"] for name in ("raw_each", "raw")) == 1
    assert all(row["processor_ms"] > 0 for row in found.values())


@pytest.mark.slow
def test_tokens_that_arrive_through_collectors(engine, capsys):
    report = bench(capsys, "collectors", "--url", engine.server_url)
    found = report["collectors"]
    # Whole groups of eight.
    assert found["turns"] == 8
    own = {"functions", "recorded", "environments"}
    assert {*found["clients"]} == {"raw_each", "raw", *own}
    assert {*found["equal"]["clients"]} == {"raw_each", "raw", "collector"}
    for part, tokens in ((found, found["tokens"]), (found["equal"], None)):
        rows = part["clients"]
        assert {row["tokens"] for row in rows.values()} == {
            tokens or part["turns"] * part["length"]
        }
        assert max(rows[name]["ratio"] for name in ("raw_each", "raw")) == 1
        assert all(row["processor_ms"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("most", "servers", "expected"),
    [(None, 1, 256), (64, 2, 256), (512, 1, 512), (512, 2, 1024)],
)
def test_collectors_keep_servers_as_busy_as_raw_clients(most, servers, expected):
    engine = SimpleNamespace(
        capabilities=SimpleNamespace(server_args={"max_running_requests": most}),
        control=SimpleNamespace(urls=["http://h"] * servers),
    )
    assert default_in_flight(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["continue", "in_place"])
def test_tokens_that_arrive_while_weights_are_updated(restored_engine, mode, capsys):
    words = ["collectors", "--url", restored_engine.server_url, "--replace-weights"]
    words += ["--update-every=0.01", "--prompts=8", "--new-tokens=64", "--repeats=1"]
    words += ["--pause-mode", mode]
    assert main(["bench", *words, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    found = report["collectors"]
    assert found["pause_mode"] == mode
    assert "equal" not in found
    for name in ("functions", "recorded", "environments"):
        assert found["clients"][name]["updates"] >= 1
        assert found["clients"][name]["tokens"] == found["tokens"]


def test_lengths_are_long_tailed():
    lengths = long_tailed(Load(prompts=1024, new_tokens=2048))
    assert min(lengths) == 32
    assert max(lengths) == 2048
    assert 350 < statistics.mean(lengths) < 500
    assert lengths == long_tailed(Load(prompts=1024, new_tokens=2048))


def test_throughput_of_the_wrapper_with_more_callers_than_prompts(engine, capsys):
    words = ["throughput", "--url", engine.server_url, "--wrapper"]
    found = bench(capsys, *words, "--concurrency=9")["throughput"]
    assert found["engine"] > 0
    assert found["wrapper_ratio"] == pytest.approx(found["wrapper"] / found["raw"])


def test_a_password_is_not_shown(engine, capsys):
    url = engine.server_url.replace("http://", "http://me:secret@")
    assert main(["bench", "weights", "--url", url]) == 2
    assert main(["bench", "latency", "--url", "http://me:secret@127.0.0.1:1"]) == 1
    shown = capsys.readouterr()
    assert "--replace-weights" in shown.err
    assert "secret" not in shown.out + shown.err


def test_weights_are_replaced_on_request(restored_engine, capsys):
    words = ("weights", "--url", restored_engine.server_url, "--replace-weights")
    found = bench(capsys, *words)["weights"]
    assert found["num_tensors"] == len(restored_engine.get_model_metadata())
    assert 0 < found["send"] <= found["update"]
    assert found["ratio"] == pytest.approx(found["limit"] / found["update"])
    assert found["gb_per_second"] == pytest.approx(
        found["num_bytes"] / found["send"] / 1e9
    )


@pytest.mark.slow
def test_weights_are_spared(engine, capsys):
    before = engine.generate(input_ids=[[5, 6]], sampling_params={"temperature": 0})
    assert main(["bench", "all", "--url", engine.server_url, *SMALL]) == 0
    shown = capsys.readouterr()
    assert "Weights are left out" in shown.err
    assert "throughput: 6 prompts of 8 prompt tokens" in shown.out
    assert "collectors: 8 turns of 1 to 4 new tokens" in shown.out
    assert "latency: 12 requests" in shown.out
    assert "weights" not in shown.out
    after = engine.generate(input_ids=[[5, 6]], sampling_params={"temperature": 0})
    assert after[0].token_ids == before[0].token_ids


def test_sizes_that_do_not_fit_are_refused(engine, capsys):
    words = ["bench", "latency", "--url", engine.server_url, "--new-tokens", "2048"]
    assert main(words) == 2
    assert "do not fit into the 2048 tokens" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="prompt-tokens"):
        measure_throughput(engine, Load(prompt_tokens=2047, new_tokens=1, prompts=1))


@pytest.mark.slow
def test_a_server_of_its_own(capsys):
    words = ("all", "tiny", "--device", "cpu", "--context-length", "128")
    report = bench(capsys, *words)
    assert report["model"] == "tiny"
    assert report["servers"] == 1
    assert all(
        report[name]
        for name in ("throughput", "latency", "overhead", "collectors", "weights")
    )


def test_prompts_are_of_the_served_vocabulary(engine):
    load = Load(prompts=20, prompt_tokens=50)
    prompts = make_prompts(engine, load, random.Random(0))
    assert [len(prompt) for prompt in prompts] == [50] * 20
    assert max(map(max, prompts)) == engine.capabilities.vocab_size - 1
    assert min(map(min, prompts)) == 5


def test_the_raw_client_fails_like_the_engine(engine):
    nowhere = SimpleNamespace(
        capabilities=engine.capabilities,
        control=engine.control,
        server_url="http://127.0.0.1:1",
    )
    with pytest.raises(ServerUnavailableError, match="raw client"):
        measure_throughput(nowhere, Load(prompts=1, repeats=1))


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0], 50, 1.0),
        ([1.0], 99, 1.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([float(n) for n in range(1, 101)], 50, 50.0),
        ([float(n) for n in range(1, 101)], 90, 90.0),
        ([float(n) for n in range(1, 101)], 99, 99.0),
        ([float(n) for n in range(1, 102)], 99, 100.0),
    ],
)
def test_percentile(values, percent, expected):
    assert percentile(values, percent) == expected


def test_plan():
    assert plan(("weights",), None, connect=False) == [("35m", ("weights",))]
    assert plan(("latency",), None, connect=True) == [(None, ("latency",))]
    assert plan(("latency", "weights"), "m", connect=False) == [
        ("m", ("latency", "weights"))
    ]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_models(tmp_path, name):
    from transformers import AutoConfig, AutoTokenizer

    path, needed = save_model(name, tmp_path, device="cuda")
    assert needed == ({} if name in SMALL_MODELS else {"load_format": "dummy"})
    assert str(AutoConfig.from_pretrained(path).dtype) == "torch.bfloat16"
    assert AutoTokenizer.from_pretrained(path).chat_template


def test_the_limit_leaves_no_process():
    assert limit_of_gloo(1000, 2) > 0


def test_tables():
    row = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    report = {
        "model": "m",
        "sglang": "1",
        "torch": "2",
        "device": "cpu",
        "cores": 1,
        "servers": 2,
        "load": dataclasses.asdict(Load(prompts=1)),
        "throughput": {"raw": 2000.0, "engine": 1900.0, "ratio": 0.95},
        "latency": {"raw": row, "engine": row, "requests": 3, "ratio": 1.0},
        "overhead": {
            "clients": {
                "each": {"tokens_per_second": 900.0, "ratio": 0.9, "processor_ms": 0.5}
            },
            "tokens": 10,
            "shortest": 1,
        },
        "collectors": {
            "clients": {
                "functions": {
                    "tokens_per_second": 800.0,
                    "ratio": 0.8,
                    "processor_ms": 0.7,
                    "updates": 3.0,
                    "stale": 0.25,
                }
            },
            "equal": {
                "clients": {
                    "collector": {
                        "tokens_per_second": 700.0,
                        "ratio": 0.7,
                        "processor_ms": 0.6,
                    }
                },
                "turns": 16,
                "length": 5,
            },
            "turns": 8,
            "shortest": 1,
        },
        "weights": {
            "transport": "broadcast",
            "num_bytes": 10**9,
            "num_tensors": 9,
            "num_buckets": 1,
            "limit": 0.5,
            "send": 1.0,
            "update": 2.0,
            "extra_bytes": 3 * 10**9,
        },
    }
    text = "\n".join(to_lines(report))
    for words in (
        "m: SGLang 1 on cpu, 2 servers, torch 2, 1 core\n",
        "throughput: 1 prompt of",
        "1,900 tokens/s, 0.950 of the raw client",
        "100.00     200.00     300.00",
        "1 request of 1 to 64 new tokens",
        "900 tokens/s, 0.900 of the best raw client, 0.500 ms of",
        "8 turns of 1 to 64 new tokens",
        "0.700 ms of processor time, 3 updates, 0.25 stale\n",
        "16 turns of 5 new tokens",
        "1.000 GB in 9 tensors and 1 bucket by broadcast, 3.00 GB of further memory\n",
        "2.0000 s     0.50 GB/s  0.250 of the limit",
    ):
        assert words in text


def test_options_of_a_script(monkeypatch, capsys):
    monkeypatch.syspath_prepend(SCRIPTS)
    read_options = importlib.import_module("script").read_options
    words = ["0.5b", "--device", "cuda", "--staleness", "0", "2", "--sessions", "4"]
    monkeypatch.setattr(sys, "argv", ["script.py", *words, "--limit", "7", "--fast"])
    found = read_options(
        "Measures something.",
        model="tiny",
        device="cpu|cuda",
        staleness=(0, 1),
        sessions=256,
        new_tokens=128,
        limit=int,
        url=str,
        fast=False,
    )
    assert (found.model, found.device, found.staleness) == ("0.5b", "cuda", [0, 2])
    assert (found.sessions, found.new_tokens, found.limit) == (4, 128, 7)
    assert found.url is None
    assert found.fast is True
    assert "cores" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["script.py", "--device", "tpu"])
    with pytest.raises(SystemExit):
        read_options("Measures something.", device="cpu|cuda")
