"""``serve``: starts an engine in a separate process, for other processes to use."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from torchrl_sglang.cli.interrupts import Interrupted, uninterrupted
from torchrl_sglang.cli.options import (
    Parser,
    add_metrics_option,
    add_start_options,
    check_free,
    check_metrics_port,
    metrics,
    start_arguments,
)
from torchrl_sglang.errors import ConfigurationError, ServerDiedError
from torchrl_sglang.support.garbage import collect_rarely_from_now_on
from torchrl_sglang.support.urls import LOOPBACK, is_loopback

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.gateway.gateway import Gateway

DESCRIPTION = """\
Starts SGLang servers for MODEL and keeps them until SIGINT (Ctrl-C) or SIGTERM.

When they are ready, their addresses are printed on standard output, one per line, with
the router's first if there are several. Connect to one server with
AsyncSGLang.connect(URL), and to several with AsyncSGLang.connect(router_url=URL).

On a Ray cluster (--launcher ray), servers ask for a key, unless all is on loopback. If
you give none, one is made and printed as the last line."""

EPILOG = """\
Every other --name value is an argument of SGLang's server, under its own name or
vLLM's, like --mem-fraction-static 0.8, --tensor-parallel-size 2 or
--disable-radix-cache. Arguments of AsyncSGLang.from_pretrained can be given in the same
way, like --max-restarts 0. MODEL stands before them.

examples:
  %(prog)s Qwen/Qwen2.5-0.5B --context-length 4096
  %(prog)s ./model --device cpu --port 30000 --json
  %(prog)s ./model --launcher ray --num-replicas 8 --ray-strategy SPREAD"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "serve",
        help="start servers for a model, and keep them until interrupted",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub name of the model")
    add_start_options(parser)
    text = "address to listen on (default: 127.0.0.1; any other one needs a key)"
    add("--host", help=text)
    add("--port", type=int, help="port to listen on (default: a free one)")
    add_metrics_option(parser)
    text = "protocol of the address: SGLang's, or vLLM's for trainers (default: sglang)"
    add("--api", choices=("sglang", "vllm"), default="sglang", help=text)
    add("--json", action="store_true", help="print one line with a JSON object instead")
    parser.set_defaults(run=run, takes_engine_options=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Starts servers and waits for an interrupt."""
    options = start_arguments(arguments)
    check_metrics_port(arguments.metrics_port)
    address = {name: getattr(arguments, name) for name in ("host", "port")}
    address = {name: value for name, value in address.items() if value is not None}
    is_vllm = arguments.api == "vllm"
    options |= _vllm_options(arguments, options) if is_vllm else address
    print(f"Starting SGLang for {arguments.model} ...", file=sys.stderr, flush=True)
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    engine = AsyncSGLang.from_pretrained(arguments.model, **options)
    try:
        with (
            metrics(arguments.metrics_port, engine=engine) as url,
            _vllm_api(engine, options, address) if is_vllm else nullcontext() as api,
        ):
            announce(
                engine,
                as_json=arguments.json,
                key_given="api_key" in options,
                metrics_url=url,
                api_url=None if api is None else api.url,
            )
            print("Serving. Stop it with Ctrl-C.", file=sys.stderr, flush=True)
            wait(engine)
    except Interrupted:
        print("Stopping.", file=sys.stderr, flush=True)
    finally:
        with uninterrupted():
            engine.shutdown()
    return 0


def _vllm_options(
    arguments: argparse.Namespace, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns further options of the servers; refuses an address for their gateway."""
    host = arguments.host or LOOPBACK
    if not is_loopback(host) and "api_key" not in options:
        raise ConfigurationError(
            f"{host} can be reached from other machines; put a key into a file and "
            f"give --api-key-file FILE."
        )
    check_free(host, arguments.port)
    return receiver_arguments(options)


def receiver_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of servers that receive weights from vLLM's trainers."""
    from torchrl_sglang.gateway.vllm.broadcasts import LOADER, NCCL_DEFAULTS

    loaders = options.get("custom_weight_loader") or []
    loaders = [loaders] if isinstance(loaders, str) else loaders
    # A value of this process is inherited.
    unset = {k: v for k, v in NCCL_DEFAULTS.items() if k not in os.environ}
    return {
        "weight_loader": "traced",
        "custom_weight_loader": [*loaders, LOADER],
        "environment": {**unset, **(options.get("environment") or {})},
    }


@contextmanager
def _vllm_api(
    engine: AsyncSGLang, options: Mapping[str, Any], address: Mapping[str, Any]
) -> Iterator[Gateway]:
    """Serves vLLM's protocol in front of an engine in a block."""
    from torchrl_sglang.gateway.gateway import Gateway
    from torchrl_sglang.gateway.vllm.dialect import VLLM

    routed = options.get("enable_return_routed_experts") is True
    with Gateway(
        engine,
        dialects=[VLLM(engine)],
        sessionless=True,
        api_key=engine.api_key,
        tool_call_parser=options.get("tool_call_parser"),
        reasoning_parser=options.get("reasoning_parser"),
        token_columns=["routed_experts"] if routed else [],
        **address,
    ) as gateway:
        collect_rarely_from_now_on()
        yield gateway


def announce(
    engine: AsyncSGLang,
    *,
    as_json: bool,
    key_given: bool = True,
    metrics_url: str | None = None,
    api_url: str | None = None,
) -> None:
    """Prints the addresses of the engine, and its key if it has made a key."""
    urls = list(engine.control.urls)
    router = None if engine.server_url in urls else engine.server_url
    about = {
        "url": engine.server_url,
        "urls": urls,
        "router_url": router,
        "model": engine.capabilities.model_path,
        "version": engine.capabilities.version,
        "weight_version": engine.weight_version,
        "pid": os.getpid(),
    }
    if api_url is not None:
        about |= {"url": api_url, "server_url": engine.server_url}
    if metrics_url is not None:
        about["metrics_url"] = metrics_url
    lines = [api_url] if api_url else [*filter(None, [router]), *urls]
    if not key_given and engine.api_key is not None:
        about["api_key"] = engine.api_key
        lines.append(engine.api_key)
    lines = [json.dumps(about)] if as_json else lines
    print("\n".join(lines), flush=True)


def wait(engine: AsyncSGLang) -> NoReturn:
    """Waits for an interrupt; raises when all servers are lost."""
    while True:
        time.sleep(1.0)
        # A server whose restart failed was stopped.
        ended_states = ("dead", "stopped")
        if any(server.state not in ended_states for server in engine.servers):
            continue
        servers = engine.stats().servers
        if all(server.state == "lost" for server in servers):
            reasons = "\n".join(server.reason for server in servers)
            raise ServerDiedError(f"No server runs any more. {reasons}")
