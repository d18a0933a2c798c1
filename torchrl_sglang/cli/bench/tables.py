"""What was measured, as text: pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_sglang.cli.bench.generation import Latency, Load, Throughput
    from torchrl_sglang.cli.bench.transfer import Transfer

__all__ = ["Report", "to_json", "to_lines"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All measurements on one model."""

    model: str
    """Path or name of the model."""
    sglang: str
    """Version of SGLang."""
    torch: str
    """Version of PyTorch in this process."""
    device: str
    """What the servers run on."""
    cores: int
    """Processors of this process."""
    servers: int
    """Number of servers."""
    load: Load
    """What was generated."""
    throughput: Throughput | None = None
    """Whole batches."""
    latency: Latency | None = None
    """Single requests."""
    weights: Transfer | None = None
    """Weight updates."""


def to_json(report: Report) -> dict[str, Any]:
    """Returns a report as plain values: seconds, bytes, tokens per second, ratios."""
    values = asdict(report)
    for name in ("throughput", "latency", "weights"):
        found = getattr(report, name)
        if found is not None:
            values[name]["ratio"] = found.ratio
    if report.weights is not None:
        rate = report.weights.gb_per_second(report.weights.send)
        values["weights"]["gb_per_second"] = rate
    return values


def to_lines(report: Report) -> list[str]:
    """Returns a report as lines of text."""
    title = (
        f"{report.model}: SGLang {report.sglang} on {report.device}, "
        f"{_count(report.servers, 'server')}, torch {report.torch}, "
        f"{_count(report.cores, 'core')}"
    )
    lines = [title]
    load = report.load
    what = (
        f"{load.prompt_tokens} prompt tokens, {load.new_tokens} new tokens, log-probs, "
        f"{_count(load.concurrency, 'caller')}"
    )
    if report.throughput is not None:
        lines += ["", f"throughput: {_count(load.prompts, 'prompt')} of {what}"]
        lines += _throughput(report.throughput)
    if report.latency is not None:
        lines += [
            "",
            f"latency: {_count(report.latency.requests, 'request')} of {what}",
        ]
        lines += _latency(report.latency)
    if report.weights is not None:
        lines += ["", *_weights(report.weights)]
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _throughput(found: Throughput) -> Iterator[str]:
    yield f"  {'raw client':10} {found.raw:10,.0f} tokens/s"
    yield (
        f"  {'engine':10} {found.engine:10,.0f} tokens/s, {found.ratio:.3f} of the raw "
        f"client"
    )


def _latency(found: Latency) -> Iterator[str]:
    yield f"  {'':10} {'p50':>10} {'p90':>10} {'p99':>10}   milliseconds"
    for name, row in (("raw client", found.raw), ("engine", found.engine)):
        yield (
            f"  {name:10} {1e3 * row.p50:10.2f} {1e3 * row.p90:10.2f} "
            f"{1e3 * row.p99:10.2f}"
        )


def _weights(found: Transfer) -> Iterator[str]:
    yield (
        f"weights: {found.num_bytes / 1e9:.3f} GB in "
        f"{_count(found.num_tensors, 'tensor')} and "
        f"{_count(found.num_buckets, 'bucket')}"
    )
    for name in ("limit", "send", "update"):
        seconds = getattr(found, name)
        yield (
            f"  {name:10} {seconds:10.4f} s {found.gb_per_second(seconds):8.2f} GB/s "
            f"{found.limit / seconds:6.3f} of the limit"
        )
