"""``bench``: how fast an engine is, next to what is possible in the same run.

``generation.py`` and ``transfer.py`` measure; this decides on what, and prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.bench.shapes import BUILT_IN, save_model
from torchrl_sglang.cli.bench.tables import Report, to_json, to_lines
from torchrl_sglang.cli.interrupts import uninterrupted
from torchrl_sglang.cli.options import (
    add_start_options,
    read_key,
    start_arguments,
)
from torchrl_sglang.cli.parser import Parser, positive_int
from torchrl_sglang.errors import ConfigurationError

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

__all__ = ["add_command"]

ACTIONS = ("throughput", "latency", "weights")

MODELS = {"throughput": "tiny", "latency": "tiny", "weights": "35m"}
"""What is measured by default: a link shows its rate with a large model only."""

START_OPTIONS = (
    "num_replicas",
    "device",
    "cuda_devices",
    "python",
    "router_policy",
    "start_timeout",
)

DESCRIPTION = f"""\
Measures an engine, and in the same run what it is to be compared with.

  throughput  tokens per second of whole batches, and of a raw HTTP client
  latency     percentiles of single requests, and of a raw HTTP client
  weights     bandwidth of weight updates, and of the link
  all         the three of them

MODEL is a folder, a hub name, or a built-in one that needs no download:
{", ".join(BUILT_IN)}."""

EPILOG = """\
Where a server is started, every other --name value is an argument of it, as with the
command serve.

examples:
  python -m torchrl_sglang bench all
  python -m torchrl_sglang bench latency --concurrency 4 --json
  python -m torchrl_sglang bench throughput --url http://127.0.0.1:30000"""


def add_command(commands: Any) -> Parser:
    """Adds the command to those of a parser, and returns its own."""
    parser: Parser = commands.add_parser(
        "bench",
        help="measure throughput, latency and weight updates",
        description=DESCRIPTION,
        epilog=EPILOG,
        engine_options=True,
    )
    parser.add_argument(
        "action",
        metavar="MEASUREMENT",
        choices=(*ACTIONS, "all"),
        help="throughput, latency, weights or all",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="what to serve (default: tiny, and 35m for weights)",
    )
    parser.add_argument(
        "--url",
        action="append",
        help="measure a server that runs, instead of starting one; several times for "
        "several",
    )
    parser.add_argument(
        "--router-url", metavar="URL", help="the same, with a router and its servers"
    )
    for option, default, text in (
        ("--prompts", 64, "prompts of one round"),
        ("--prompt-tokens", 64, "length of a prompt"),
        ("--new-tokens", 64, "length of a response"),
        ("--concurrency", 1, "callers at a time"),
        ("--repeats", 5, "rounds that count, after one that does not"),
        ("--bucket-bytes", 2 << 30, "size of a transfer of weights"),
    ):
        parser.add_argument(
            option,
            type=positive_int,
            default=default,
            metavar="N",
            help=f"{text} (default: %(default)s)",
        )
    parser.add_argument(
        "--replace-weights",
        action="store_true",
        help="with --url, let the weights of that server be replaced by random ones",
    )
    add_start_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )
    parser.set_defaults(run=run, own_options=tuple(parser.own_options()))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints."""
    chosen: tuple[str, ...]
    chosen = ACTIONS if arguments.action == "all" else (arguments.action,)
    reports = []
    runs = _runs(arguments)
    if runs:
        chosen = _spare_weights(chosen, arguments)
    for model, actions in plan(chosen, arguments.model, runs=bool(runs)):
        with _engine(arguments, model, actions) as engine:
            reports.append(_measure(engine, model, actions, arguments))
    if arguments.json:
        rows = [to_json(report) for report in reports]
        print(json.dumps({"reports": rows}, indent=2))
    else:
        print("\n\n".join("\n".join(to_lines(report)) for report in reports))
    return 0


def _runs(arguments: argparse.Namespace) -> list[str]:
    """Returns the addresses that were given."""
    router = arguments.router_url
    return [*(arguments.url or ()), *([router] if router is not None else ())]


def plan(
    actions: tuple[str, ...], model: str | None, *, runs: bool
) -> list[tuple[str | None, tuple[str, ...]]]:
    """Returns which measurements are made on which model. Pure.

    Examples:
        >>> plan(("throughput", "latency", "weights"), None, runs=False)
        [('tiny', ('throughput', 'latency')), ('35m', ('weights',))]
        >>> plan(("weights",), "7b", runs=False)
        [('7b', ('weights',))]
    """
    if model is not None or runs:
        return [(model, actions)]
    groups: dict[str | None, tuple[str, ...]] = {}
    for action in actions:
        groups[MODELS[action]] = (*groups.get(MODELS[action], ()), action)
    return list(groups.items())


def _spare_weights(
    actions: tuple[str, ...], arguments: argparse.Namespace
) -> tuple[str, ...]:
    if arguments.replace_weights or "weights" not in actions:
        return actions
    what = (
        f"Measuring weights replaces those of the server at "
        f"{' and '.join(_runs(arguments))} by random ones; give --replace-weights if "
        f"nobody needs them."
    )
    if len(actions) == 1:
        raise ConfigurationError(what)
    print(f"Weights are left out. {what}", file=sys.stderr)
    return tuple(action for action in actions if action != "weights")


@contextlib.contextmanager
def _engine(
    arguments: argparse.Namespace, model: str | None, actions: tuple[str, ...]
) -> Iterator[AsyncSGLang]:
    """Connects to the server that was named, or starts one."""
    if _runs(arguments):
        _check_unused(arguments)
    print("Loading ...", file=sys.stderr, flush=True)
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    with tempfile.TemporaryDirectory(prefix="torchrl_sglang_bench_") as folder:
        if _runs(arguments):
            engine = AsyncSGLang.connect(
                urls=arguments.url,
                router_url=arguments.router_url,
                model=model,
                api_key=read_key(arguments.api_key_file),
            )
        else:
            assert model is not None  # The plan names one.
            options = start_arguments(arguments)
            path, needed = _prepare(model, folder, options, actions)
            print(f"Starting SGLang for {model} ...", file=sys.stderr, flush=True)
            engine = AsyncSGLang.from_pretrained(path, **{**needed, **options})
        try:
            yield engine
        finally:
            with uninterrupted():
                engine.shutdown()


def _check_unused(arguments: argparse.Namespace) -> None:
    given = [
        "--" + name.replace("_", "-")
        for name in START_OPTIONS
        if getattr(arguments, name) not in (None, 1)
    ]
    given += [word for word in arguments.engine_words if word.startswith("--")]
    if given:
        raise ConfigurationError(
            f"{given[0].partition('=')[0]} is for a server that is started here, and "
            f"--url names one that runs; leave one of them out."
        )


def _prepare(
    model: str, folder: str, options: dict[str, Any], actions: tuple[str, ...]
) -> tuple[str, dict[str, Any]]:
    """Returns where the model is, and arguments that its server needs for this."""
    from torchrl_sglang.backends.launch.plan import default_device

    device = options.get("device") or default_device()
    needed: dict[str, Any] = {"device": device}
    path = model
    if model in BUILT_IN and not os.path.isdir(model):
        path, more = save_model(model, folder, half=device == "cuda")
        needed.update(more)
    alone = options["num_replicas"] == 1 and "cuda_devices" not in options
    if device == "cuda" and "weights" in actions and alone:
        # The first GPU sends, and buckets need room beside the server's weights.
        needed["base_gpu_id"] = 1
        if "gpu_memory_utilization" not in options:
            needed["mem_fraction_static"] = 0.5
    return path, needed


def _measure(
    engine: AsyncSGLang,
    model: str | None,
    actions: tuple[str, ...],
    arguments: argparse.Namespace,
) -> Report:
    import torch

    from torchrl_sglang.cli.bench.generation import (
        Load,
        measure_latency,
        measure_throughput,
    )

    load = Load(
        prompts=arguments.prompts,
        prompt_tokens=arguments.prompt_tokens,
        new_tokens=arguments.new_tokens,
        concurrency=arguments.concurrency,
        repeats=arguments.repeats,
    )
    key = read_key(arguments.api_key_file)
    results: dict[str, Any] = {}
    for action in actions:
        print(f"Measuring {action} ...", file=sys.stderr, flush=True)
        if action == "throughput":
            results[action] = measure_throughput(engine, load, api_key=key)
        elif action == "latency":
            results[action] = measure_latency(engine, load, api_key=key)
        else:
            from torchrl_sglang.cli.bench.transfer import measure_weights

            results[action] = measure_weights(
                engine, repeats=load.repeats, bucket_bytes=arguments.bucket_bytes
            )
    return Report(
        model=model or engine.capabilities.model_path,
        sglang=engine.capabilities.version,
        torch=torch.__version__,
        device=str(engine.capabilities.server_args.get("device", "unknown")),
        cores=len(os.sched_getaffinity(0)),
        servers=len(engine.control.urls),
        load=load,
        **results,
    )
