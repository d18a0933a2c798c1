"""``gateway``: an endpoint for agents, beside new or running servers."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_sglang.cli.interrupts import Interrupted, uninterrupted
from torchrl_sglang.cli.options import (
    Parser,
    add_metrics_option,
    add_start_options,
    check_free,
    check_metrics_port,
    check_nothing_starts,
    metrics,
    positive_float,
    positive_int,
    read_key,
    read_keys,
    start_arguments,
)
from torchrl_sglang.cli.serve import receiver_arguments, wait
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.garbage import collect_rarely_from_now_on
from torchrl_sglang.support.urls import LOOPBACK, is_loopback

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.gateway.gateway import Gateway

GATEWAY_KEY_VARIABLE = "TORCHRL_SGLANG_GATEWAY_KEY"
"""Environment variable with the gateway's key."""

_OPTIONS = (
    *("host", "port", "tool_call_parser", "reasoning_parser", "request_timeout"),
    *("max_sessions", "max_turns", "max_tokens", "session_seconds", "path"),
    *("tool_choice", "ignored_params", "trained", "public_url", "key_seconds"),
    *("logprobs_mode", "token_columns"),
)
"""Options with the names of the gateway's arguments."""

LOGPROBS_MODES = ("model", "sampling", "behaviour")
"""Values of ``LogProbsMode``, whose module imports torch."""

DESCRIPTION = """\
Serves OpenAI's and Anthropic's protocols for agents, and records every token, until
SIGINT (Ctrl-C) or SIGTERM. It starts SGLang servers for MODEL, or uses running ones.

When it listens, its address is printed on standard output, and then its key, which
makes sessions: POST /sessions answers with a session's own key and base URL."""

EPILOG = """\
With MODEL, every other --name value is an argument of SGLang's server, as for serve.
Servers listen on 127.0.0.1; --host and --port are the gateway's.

examples:
  %(prog)s Qwen/Qwen3-0.6B --tool-call-parser qwen25 --reasoning-parser qwen3
  %(prog)s --url http://127.0.0.1:30000 --path sessions.sqlite --json"""


def add_command(commands: Any) -> Parser:
    """Adds the command to the command line, and returns its parser."""
    parser: Parser = commands.add_parser(
        "gateway",
        help="serve an endpoint for agents that records their tokens",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add = parser.add_argument
    text = "folder or hub name of the model to start servers for"
    add("model", metavar="MODEL", nargs="?", help=text)
    text = "use a running server; repeat it for several"
    add("--url", action="append", help=text)
    add("--router-url", metavar="URL", help="use the running servers behind a router")
    add_start_options(parser)
    text = "address to listen on (default: 127.0.0.1; any other one needs a key)"
    add("--host", help=text)
    add("--port", type=int, help="port to listen on (default: a free one)")
    text = "address by which agents reach it, as behind a proxy (default: its own)"
    add("--public-url", metavar="URL", help=text)
    text = (
        f"file with the gateway's own key (default: the variable "
        f"{GATEWAY_KEY_VARIABLE}, or else a random key)"
    )
    add("--gateway-key-file", metavar="FILE", help=text)
    text = "SGLang's name of the format of tool calls, like qwen25 (default: none)"
    add("--tool-call-parser", metavar="NAME", help=text)
    text = "SGLang's name of the format of reasoning, like qwen3 (default: none)"
    add("--reasoning-parser", metavar="NAME", help=text)
    text = "hold responses to a choice of tools by a grammar, or not (default: grammar)"
    add("--tool-choice", choices=("grammar", "auto"), help=text)
    repeated: dict[str, Any] = {"metavar": "NAME", "action": "append"}
    text = "a field of requests without effect, instead of refusing it; repeat it"
    add("--ignored-param", dest="ignored_params", help=text, **repeated)
    text = "regular expression for the models whose turns are trained (default: all)"
    add("--trained", metavar="PATTERN", help=text)
    text = "log-probs that are recorded (default: model, the model's own)"
    add("--logprobs-mode", choices=LOGPROBS_MODES, help=text)
    text = "a further quantity of each token, like routed_experts; repeat it"
    add("--token-column", dest="token_columns", help=text, **repeated)
    text = "file with a Jinja template (default: the tokenizer's)"
    add("--chat-template", metavar="FILE", help=text)
    text = "SQLite file that keeps the sessions (default: in memory only)"
    add("--path", metavar="FILE", help=text)
    seconds: dict[str, Any] = {"type": positive_float, "metavar": "SECONDS"}
    add("--request-timeout", help="timeout of a response (default: 600)", **seconds)
    text = "how long a session takes turns (default: no limit)"
    add("--session-seconds", help=text, **seconds)
    text = "how long a session's key opens it (default: no limit)"
    add("--key-seconds", help=text, **seconds)
    number: dict[str, Any] = {"type": positive_int, "metavar": "N"}
    add("--max-sessions", help="most sessions at once (default: 10000)", **number)
    add("--max-turns", help="most turns of a session (default: 1000)", **number)
    text = "most generated tokens of a session (default: no limit)"
    add("--max-tokens", help=text, **number)
    add(
        "--api",
        choices=("agents", "vllm"),
        default="agents",
        help="protocols of clients: agents', or vLLM's for trainers (default: agents)",
    )
    add_metrics_option(parser)
    add("--json", action="store_true", help="print one line with a JSON object instead")
    parser.set_defaults(run=run, takes_engine_options=True)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Starts or connects to servers, serves, and waits for an interrupt."""
    options = gateway_arguments(arguments)
    check_metrics_port(arguments.metrics_port)
    connects = bool(arguments.url or arguments.router_url)
    if connects == (arguments.model is not None):
        raise ConfigurationError(
            "Give either MODEL, which servers are started for, or the --url or "
            "--router-url of running ones."
        )
    check_free(arguments.host, arguments.port)
    engine = connect(arguments) if connects else _start(arguments)
    try:
        from torchrl_sglang.gateway.gateway import Gateway

        if arguments.api == "vllm":
            from torchrl_sglang.gateway.vllm.dialect import VLLM

            options["dialects"] = [VLLM(engine)]
        gateway = Gateway(engine, **options)
        try:
            gateway.start()
            collect_rarely_from_now_on()
            with metrics(arguments.metrics_port, engine=engine, gateway=gateway):
                announce(gateway, engine, arguments, given="api_key" in options)
                print("Serving. Stop it with Ctrl-C.", file=sys.stderr, flush=True)
                wait(engine)
        finally:
            with uninterrupted():
                gateway.shutdown()
    except Interrupted:
        print("Stopping.", file=sys.stderr, flush=True)
    finally:
        with uninterrupted():
            engine.shutdown()
    return 0


def gateway_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of ``Gateway`` for these options."""
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    key = read_key(arguments.gateway_key_file, variable=GATEWAY_KEY_VARIABLE)
    options["api_key"] = key
    if (file := arguments.chat_template) is not None:
        try:
            options["chat_template"] = Path(file).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"The chat template cannot be read: {error}."
            ) from None
    address = options["public_url"] or options["host"] or LOOPBACK
    if key is None and (options["public_url"] or not is_loopback(address)):
        raise ConfigurationError(
            f"{address} can be reached from other machines; put a key "
            f"into a file and give --gateway-key-file FILE, or set "
            f"{GATEWAY_KEY_VARIABLE}."
        )
    return {name: value for name, value in options.items() if value is not None}


def _start(arguments: argparse.Namespace) -> AsyncSGLang:
    options = start_arguments(arguments)
    if arguments.api == "vllm":
        options |= receiver_arguments(options)
    print(f"Starting SGLang for {arguments.model} ...", file=sys.stderr, flush=True)
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    return AsyncSGLang.from_pretrained(arguments.model, **options)


def connect(arguments: argparse.Namespace) -> AsyncSGLang:
    """Returns an engine of running servers."""
    check_nothing_starts(arguments)
    from torchrl_sglang.backends.async_sglang import AsyncSGLang

    return AsyncSGLang.connect(
        urls=arguments.url,
        router_url=arguments.router_url,
        **read_keys(arguments),
    )


def announce(
    gateway: Gateway,
    engine: AsyncSGLang,
    arguments: argparse.Namespace,
    *,
    given: bool,
) -> None:
    """Prints the address, and the key unless it was ``given`` by the user."""
    key = None if given else gateway.api_key
    about = {
        "url": gateway.url,
        "public_url": gateway.public_url,
        "api_key": key,
        "sessions": len(gateway.sessions),
        "urls": list(engine.control.urls),
        "model": engine.capabilities.model_path,
        "version": engine.capabilities.version,
        "pid": os.getpid(),
    }
    lines = (
        [json.dumps(about)] if arguments.json else [gateway.url, *filter(None, [key])]
    )
    print("\n".join(lines), flush=True)
