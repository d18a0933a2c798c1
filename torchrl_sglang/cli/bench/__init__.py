"""``bench``: measures an engine beside its reference.

``models.py`` starts the engine; ``generation.py``, ``collectors.py`` and
``transfer.py`` measure it, with the clock and the medians of ``timing.py``; this module
selects the measurements, and prints the results. The scripts in ``benchmarks/`` use the
same code.

A measurement is a row of ``ACTIONS`` if users may run it, and otherwise a script in
``benchmarks/``; its figures are in ``benchmarks/RESULTS.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.bench.models import BUILT_IN, Load, start_engine
from torchrl_sglang.cli.options import (
    Parser,
    add_start_options,
    check_nothing_starts,
    positive_float,
    positive_int,
    read_key,
    read_keys,
    start_arguments,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.passwords import hide_passwords

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

ACTIONS = ("throughput", "latency", "overhead", "collectors", "weights")
MODELS = {**dict.fromkeys(ACTIONS, "tiny"), "weights": "35m"}
"""Default models: only a large model shows the bandwidth of a link."""

DESCRIPTION = f"""\
Measures an engine, and the values for comparison in the same run.

  throughput  tokens per second of whole batches, and of a raw HTTP client
  latency     percentiles of single requests, and of a raw HTTP client
  overhead    tokens per second and processor time of single requests and of batches
              whose responses differ in length, and of raw HTTP clients
  collectors  tokens per second that arrive in a replay buffer through each collector,
              and of raw HTTP clients
  weights     bandwidth of weight updates, and of the link
  all         all of them

MODEL is a folder, a hub name, or a built-in one that needs no download:
{", ".join(BUILT_IN)}."""

EPILOG = """\
Where a server is started, every other --name value is an argument of it, as with the
command serve.

examples:
  %(prog)s all
  %(prog)s latency --concurrency 4 --json
  %(prog)s overhead 0.5b --prompts 1024 --new-tokens 2048 --max-running-requests 256
  %(prog)s collectors 0.5b --prompts 1024 --new-tokens 2048 --repeats 3 \\
      --max-running-requests 256
  %(prog)s throughput --url http://127.0.0.1:30000"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "bench",
        help="measure throughput, latency and weight updates",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    text = "throughput, latency, overhead, collectors, weights or all"
    add("action", metavar="MEASUREMENT", choices=(*ACTIONS, "all"), help=text)
    text = "served model (default: tiny, and 35m for weights)"
    add("model", metavar="MODEL", nargs="?", help=text)
    text = "measure a running server instead of starting one; repeat it for several"
    add("--url", action="append", help=text)
    text = "measure the running servers behind a router"
    add("--router-url", metavar="URL", help=text)
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    for field in dataclasses.fields(Load):
        text = f"{field.metadata['help']} (default: %(default)s)"
        name = "--" + field.name.replace("_", "-")
        add(name, default=field.default, help=text, **number)
    text = "size of one transfer of weights (default: %(default)s)"
    add("--bucket-bytes", default=2 << 30, help=text, **number)
    text = "throughput of SGLangWrapper, too"
    add("--wrapper", action="store_true", help=text)
    text = "conversations that AsyncLLMCollector runs at once (default: "
    text += "max_running_requests of all servers together, at least 256)"
    add("--in-flight", help=text, **number)
    text = "update the weights while AsyncLLMCollector collects, this often"
    add("--update-every", type=positive_float, metavar="SECONDS", help=text)
    text = "treatment of running requests in these updates (default: %(default)s)"
    modes = ("continue", "in_place")
    add("--pause-mode", choices=modes, default="continue", help=text)
    text = "how the measurement of weights sends them (default: %(default)s)"
    choices = ("broadcast", "cuda_ipc")
    add("--transport", choices=choices, default="broadcast", help=text)
    text = "how servers that are started load weights (default: sglang)"
    choices = ("sglang", "traced")
    add("--weight-loader", choices=choices, help=text)
    text = "with --url, let that server's weights be replaced by random ones"
    add("--replace-weights", action="store_true", help=text)
    add_start_options(parser)
    text = "print one JSON object instead of tables"
    add("--json", action="store_true", help=text)
    parser.set_defaults(run=run, takes_engine_options=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    every = arguments.action == "all"
    actions: tuple[str, ...] = ACTIONS if every else (arguments.action,)
    urls = [*(arguments.url or ()), *filter(None, [arguments.router_url])]
    if urls:
        check_nothing_starts(arguments)
        if arguments.weight_loader is not None:
            raise ConfigurationError(
                "--weight-loader is for a server that is started here, and --url names "
                "one that runs; leave one of them out."
            )
        if not arguments.replace_weights:
            sends = {"weights", "collectors"} if arguments.update_every else {"weights"}
            actions = _spare_weights(actions, urls, sends)
    reports = []
    for model, group in plan(actions, arguments.model, connect=bool(urls)):
        with _open_engine(arguments, model, group) as engine:
            reports.append(_measure(engine, model, group, arguments))
    if arguments.json:
        print(json.dumps({"reports": reports}, indent=2))
    else:
        print("\n\n".join("\n".join(to_lines(report)) for report in reports))
    return 0


def plan(
    actions: tuple[str, ...], model: str | None, *, connect: bool
) -> list[tuple[str | None, tuple[str, ...]]]:
    """Returns the measurements, and their model."""
    if model is not None or connect:
        return [(model, actions)]
    groups = itertools.groupby(actions, MODELS.__getitem__)
    return [(name, tuple(group)) for name, group in groups]


def _spare_weights(
    actions: tuple[str, ...], urls: list[str], sends: set[str]
) -> tuple[str, ...]:
    """Removes the measurements of weight updates."""
    if sends.isdisjoint(actions):
        return actions
    message = (
        f"Measuring weight updates replaces the weights of the server at "
        f"{' and '.join(map(hide_passwords, urls))} by random ones; give "
        f"--replace-weights if nobody needs them."
    )
    remaining = tuple(action for action in actions if action not in sends)
    if not remaining:
        raise ConfigurationError(message)
    names = " and ".join(action for action in actions if action in sends)
    print(f"{names.capitalize()} are left out. {message}", file=sys.stderr)
    return remaining


@contextlib.contextmanager
def _open_engine(
    arguments: argparse.Namespace, model: str | None, actions: tuple[str, ...]
) -> Iterator[AsyncSGLang]:
    """Connects to the given server, or starts a server."""
    print("Loading ...", file=sys.stderr, flush=True)
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.backends.launch.gpus import default_device

    if arguments.url or arguments.router_url:
        with AsyncSGLang.connect(
            urls=arguments.url,
            router_url=arguments.router_url,
            model=model,
            **read_keys(arguments),
        ) as engine:
            yield engine
        return
    assert model is not None  # The plan names a model.
    options = {"device": default_device(), **start_arguments(arguments)}
    if arguments.weight_loader is not None:
        options["weight_loader"] = arguments.weight_loader
    alone = options["num_replicas"] == 1 and "cuda_devices" not in options
    updates = "collectors" in actions and arguments.update_every is not None
    if options["device"] == "cuda" and alone and ("weights" in actions or updates):
        # The first GPU sends, and buckets need space beside the server's weights.
        gpu = int("weights" in actions and arguments.transport == "broadcast")
        options = {"base_gpu_id": gpu, **options}
        if "gpu_memory_utilization" not in options:
            options = {"mem_fraction_static": 0.5, **options}
    print(f"Starting SGLang for {model} ...", file=sys.stderr, flush=True)
    with start_engine(model, **options) as engine:
        yield engine


def _measure(
    engine: AsyncSGLang,
    model: str | None,
    actions: tuple[str, ...],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Returns a report: seconds, bytes, tokens per second, and ratios."""
    import torch

    from torchrl_sglang.cli.bench import collectors, generation, transfer

    sizes = [field.name for field in dataclasses.fields(Load)]
    load = Load(**{name: getattr(arguments, name) for name in sizes})
    key = read_key(arguments.api_key_file)
    report: dict[str, Any] = {
        "model": model or engine.capabilities.model_path,
        "sglang": engine.capabilities.version,
        "torch": torch.__version__,
        "device": engine.capabilities.args.device or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "servers": len(engine.control.urls),
        "load": dataclasses.asdict(load),
        **dict.fromkeys(ACTIONS),
    }
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "throughput": lambda: generation.measure_throughput(
            engine,
            load,
            api_key=key,
            wrapper=arguments.wrapper,
        ),
        "latency": lambda: generation.measure_latency(engine, load, api_key=key),
        "overhead": lambda: generation.measure_overhead(engine, load, api_key=key),
        "collectors": lambda: collectors.measure_collectors(
            engine,
            load,
            api_key=key,
            in_flight=arguments.in_flight,
            update_every=arguments.update_every,
            pause_mode=arguments.pause_mode,
        ),
        "weights": lambda: transfer.measure_weights(
            engine,
            repeats=load.repeats,
            bucket_bytes=arguments.bucket_bytes,
            transport=arguments.transport,
        ),
    }
    for action in actions:
        print(f"Measuring {action} ...", file=sys.stderr, flush=True)
        report[action] = measures[action]()
    return report


def to_lines(report: dict[str, Any]) -> Iterator[str]:
    """Yields a report as lines of text."""
    servers = _count(report["servers"], "server")
    about = f"{report['model']}: SGLang {report['sglang']} on {report['device']}"
    cores = _count(report["cores"], "core")
    yield f"{about}, {servers}, torch {report['torch']}, {cores}"
    load = report["load"]
    kind = (
        f"{load['prompt_tokens']} prompt tokens, {load['new_tokens']} new tokens, "
        f"log-probs, {_count(load['concurrency'], 'caller')}"
    )
    clients = {"raw": "raw client", "engine": "engine", "wrapper": "wrapper"}
    if result := report["throughput"]:
        yield f"\nthroughput: {_count(load['prompts'], 'prompt')} of {kind}"
        for key, name in clients.items():
            if key in result:
                ratio = f"{result[key] / result['raw']:.3f} of the raw client"
                yield f"  {name:10} {result[key]:10,.0f} tokens/s, {ratio}"
    if result := report["latency"]:
        yield f"\nlatency: {_count(result['requests'], 'request')} of {kind}"
        yield f"  {'':10} {'p50':>10} {'p90':>10} {'p99':>10}   milliseconds"
        for key in ("raw", "engine"):
            row = " ".join(f"{1e3 * value:10.2f}" for value in result[key].values())
            yield f"  {clients[key]:10} {row}"
    if result := report["overhead"]:
        lengths = f"{result['shortest']} to {load['new_tokens']} new tokens, log-probs"
        yield f"\noverhead: {_count(load['prompts'], 'request')} of {lengths}"
        yield from _compared(result["clients"])
    if result := report["collectors"]:
        yield from _arrived(result, load["new_tokens"])
    if result := report["weights"]:
        yield from _sent(result)


def _sent(found: dict[str, Any]) -> Iterator[str]:
    size, extra = found["num_bytes"] / 1e9, found["extra_bytes"]
    memory = f", {extra / 1e9:.2f} GB of further memory" if extra else ""
    yield (
        f"\nweights: {size:.3f} GB in {_count(found['num_tensors'], 'tensor')} and "
        f"{_count(found['num_buckets'], 'bucket')} by {found['transport']}{memory}"
    )
    for key in ("limit", "send", "update"):
        seconds, share = found[key], found["limit"] / found[key]
        rate = f"{size / seconds:8.2f} GB/s {share:6.3f} of the limit"
        yield f"  {key:10} {seconds:10.4f} s {rate}"
    for key, seconds in (found.get("own_loader") or {}).items():
        rate = f"{size / seconds:8.2f} GB/s, by the model's own loader"
        yield f"  {key:10} {seconds:10.4f} s {rate}"


def _arrived(found: dict[str, Any], longest: int) -> Iterator[str]:
    lengths = f"{found['shortest']} to {longest} new tokens, log-probs"
    yield f"\ncollectors: {_count(found['turns'], 'turn')} of {lengths}, in groups"
    yield from _compared(found["clients"])
    if equal := found.get("equal"):
        yield f"\n{_count(equal['turns'], 'turn')} of {equal['length']} new tokens"
        yield from _compared(equal["clients"])


def _compared(clients: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, cost in clients.items():
        ratio = f"{cost['ratio']:.3f} of the best raw client"
        speed = f"{cost['tokens_per_second']:10,.0f} tokens/s, {ratio}"
        spent = f"{cost['processor_ms']:.3f} ms of processor time"
        updates = cost.get("updates")
        about = f", {updates:.0f} updates, {cost['stale']:.2f} stale" if updates else ""
        yield f"  {name:12} {speed}, {spent}{about}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
