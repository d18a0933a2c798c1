"""Command-line options of new servers, and a parser that suggests names.

The own options of ``serve`` and ``bench`` determine the place and kind of servers;
every other ``--name value`` is an argument of the server, as for SGLang or vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import check_port, nearest
from torchrl_sglang.support.urls import ADMIN_KEY_VARIABLE, KEY_VARIABLE, LOOPBACK

START_OPTIONS = (
    *("num_replicas", "device", "cuda_devices", "python"),
    *("start_timeout", "router_policy", "launcher", "ray_strategy"),
)
RAY_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
TYPO_CUTOFF = 0.85
"""Similarity of an unknown name to an own option, to count as a typo; a test checks
that no argument of SGLang's server is as similar."""
SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


class Parser(argparse.ArgumentParser):
    """argparse whose errors suggest the nearest name."""

    required_hint = ""
    _words: Sequence[str] = ()

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def own_options(self) -> dict[str, bool]:
        """Returns the options of this parser, and whether each takes a value."""
        actions = self._option_string_actions
        return {name: action.nargs != 0 for name, action in actions.items()}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses words, and keeps them for the messages of :meth:`error`."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Prints the mistake, with the nearest valid name, and exits with status 2."""
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)", message)
        guess = None
        if choice:
            guess = nearest(choice[1], re.findall(r"[\w-]+", choice[2]))
        elif unknown:
            guess = nearest(unknown[1], self.own_options())
        hint = f"; did you mean {guess}?" if guess else "."
        if "required: " in message:
            hint = self._misspelt() or hint + self.required_hint
        super().error(message + hint)

    def _misspelt(self) -> str:
        """Returns a hint on an option whose name is similar to a word."""
        options = self.own_options()
        for word in self._words:
            name = word.partition("=")[0]
            if (
                name.startswith("--")
                and name not in options
                and (guess := nearest(name, options))
            ):
                return f"; did you mean {guess} instead of {name}?"
        return ""


def positive_int(text: str) -> int:
    """Reads an integer above 0, for argparse."""
    if not re.fullmatch(r"[0-9]+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def positive_float(text: str) -> float:
    """Reads a finite number above 0, for argparse."""
    if not re.fullmatch(r"[0-9]*\.?[0-9]+", text) or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return float(text)


def add_start_options(parser: Parser) -> None:
    """Adds the options for the start of servers."""
    parser.required_hint = " Write it before the options of the server."
    add = parser.add_argument
    text = "number of servers (default: %(default)s)"
    add("--num-replicas", type=int, default=1, metavar="N", help=text)
    text = "where the model runs (default: cuda where there is a GPU)"
    add("--device", choices=("cpu", "cuda"), help=text)
    text = "GPUs that the servers may use, like 2,3"
    add("--cuda-devices", type=_devices, metavar="LIST", help=text)
    text = "interpreter that has SGLang (default: this one; on CPU the environment's)"
    add("--python", metavar="PATH", help=text)
    text = "how a router chooses, or none for no router (default: cache_aware)"
    add("--router-policy", metavar="NAME", help=text)
    text = "start them here, or on the Ray cluster of RAY_ADDRESS (default: local)"
    add("--launcher", choices=("local", "ray"), help=text)
    text = "how Ray spreads them over its nodes (default: PACK)"
    add("--ray-strategy", choices=RAY_STRATEGIES, help=text)
    text = "timeout of the start (default: 600)"
    add("--start-timeout", type=float, metavar="SECONDS", help=text)
    text = f"file with the servers' API key (default: the variable {KEY_VARIABLE})"
    add("--api-key-file", metavar="FILE", help=text)
    text = (
        f"file with their key for weight updates and other control calls, if that is "
        f"another one (default: the variable {ADMIN_KEY_VARIABLE})"
    )
    add("--admin-api-key-file", metavar="FILE", help=text)


def add_metrics_option(parser: Parser) -> None:
    """Adds the option of metrics for Prometheus."""
    text = "port on this machine for Prometheus, or 0 for a free one (default: none)"
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help=text)


@contextmanager
def metrics(port: int | None, **parts: Any) -> Iterator[str | None]:
    """Serves the metrics of parts in a block, if there is a port; yields their URL."""
    if port is None:
        yield None
        return
    from torchrl_sglang.telemetry.server import serve_metrics

    with serve_metrics(port=port, **parts) as endpoint:
        print(f"Metrics are at {endpoint.url}", file=sys.stderr, flush=True)
        yield endpoint.url


def check_metrics_port(port: int | None) -> None:
    """Refuses a wrong port or a missing package before servers start."""
    if port is not None:
        if port != 0:
            check_port("--metrics-port", port)
        from torchrl_sglang.telemetry.prometheus import check_installed

        check_installed()


def check_free(host: str | None, port: int | None) -> None:
    """Refuses a port of the gateway that is taken, before servers start."""
    if port:
        from torchrl_sglang.backends.launch.ports import lease_port

        lease_port(host or LOOPBACK, port, name="--port").release()


def start_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of ``from_pretrained`` for these options."""
    options = {name: getattr(arguments, name) for name in START_OPTIONS}
    options = {name: value for name, value in options.items() if value is not None}
    options |= read_keys(arguments)
    if options.get("router_policy") == "none":
        options["router_policy"] = None
    strategy = options.pop("ray_strategy", None)
    if strategy is not None:
        options["launcher"] = _ray_launcher(options.get("launcher"), strategy)
    words, own_options = arguments.engine_words, arguments.own_options
    return {**options, **engine_arguments(words, own_options)}


def _ray_launcher(launcher: str | None, strategy: Any) -> Any:
    if launcher != "ray":
        raise ConfigurationError(
            f"--ray-strategy {strategy} is for --launcher ray; add that, or leave it "
            f"out."
        )
    from torchrl_sglang.backends.launch.ray_launcher import RayLauncher

    return RayLauncher(strategy=strategy)


def check_nothing_starts(arguments: argparse.Namespace) -> None:
    """Refuses options for new servers if a running server is used."""
    used = [n for n in START_OPTIONS if getattr(arguments, n) not in (None, 1)]
    flags = ["--" + name.replace("_", "-") for name in used]
    engine_arguments(arguments.engine_words, arguments.own_options)
    flags += [word for word in arguments.engine_words if word.startswith("--")]
    if flags:
        raise ConfigurationError(
            f"{flags[0].partition('=')[0]} is for a server that is started here, and "
            f"--url names one that runs; leave one of them out."
        )


def read_keys(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the existing keys of the servers, by the engine's arguments."""
    keys = {
        "api_key": read_key(arguments.api_key_file),
        "admin_api_key": read_key(
            arguments.admin_api_key_file, variable=ADMIN_KEY_VARIABLE
        ),
    }
    return {name: key for name, key in keys.items() if key is not None}


def read_key(
    file: str | None,
    environment: Mapping[str, str] = os.environ,
    *,
    variable: str = KEY_VARIABLE,
) -> str | None:
    """Returns an API key from a file, or else from a variable of the environment."""
    if file is None:
        return environment.get(variable) or None
    try:
        key = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The key cannot be read: {error}.") from None
    if not key:
        raise ConfigurationError(f"The file {file} has no key in it.")
    return key


def split(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Splits a command line into the command's own words and the server's.

    A word after an option of the server is its value. ``own`` are the command's
    options, and whether each takes a value.
    """
    command, engine = list[str](), list[str]()
    target, value_follows = command, False
    for word in words:
        name, equals, _ = word.partition("=")
        if value_follows:
            value_follows = False
        elif name in own:
            target = command
            value_follows = own[name] and not equals
        elif word.startswith("--") and len(word) > 2:
            target = engine
        elif re.match(r"-[A-Za-z]", word):
            target = command  # The parser reports it as unknown.
        target.append(word)
    return command, engine


def engine_arguments(words: Iterable[str], own: Iterable[str] = ()) -> dict[str, Any]:
    """Parses ``--name value``, ``--name=value`` and ``--name`` of a server.

    Integers, simple fractions, ``true``, ``false`` and JSON objects are converted,
    everything else stays text. An option without a value is ``True``, an option with
    several is a list, and ``--no-name`` without a value is ``name=False``. ``own`` are
    options of the command, for suggestions.
    """
    by_name: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if not word.startswith("--"):
            values.append(word)
            continue
        flag, equals, value = word.partition("=")
        _check_engine_option(flag, own)
        name = flag.removeprefix("--").replace("-", "_")
        if name in by_name:
            raise ConfigurationError(f"{flag} is given twice; give it once.")
        values = by_name[name] = [value] if equals else []
    arguments: dict[str, Any] = {}
    for name, texts in by_name.items():
        if not texts:
            arguments[name.removeprefix("no_")] = not name.startswith("no_")
        else:
            converted = [_value(text) for text in texts]
            arguments[name] = converted if len(texts) > 1 else converted[0]
    return arguments


def _check_engine_option(flag: str, own: Iterable[str]) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    dashed = flag.replace("_", "-")
    if name in SECRETS:
        variables = {"api_key": KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
        advice = (
            f"Put the server's key into a file and give {dashed}-file FILE, or set "
            f"{variables[name]}."
            if name in variables
            else f"Start such servers from Python, with "
            f"AsyncSGLang.from_pretrained(..., {name}=...)."
        )
        raise ConfigurationError(
            f"{flag} on a command line can be read by every user of this machine. "
            f"{advice}"
        )
    guess = nearest(dashed, own, cutoff=TYPO_CUTOFF)
    # An option of the server may be a prefix of a command's option.
    if guess is not None and not guess.startswith(dashed + "-"):
        raise ConfigurationError(f"{flag} is not an option; did you mean {guess}?")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text)
    except ValueError:
        return text
    # A version such as 1.10 stays text: as a number it would change.
    exact = isinstance(value, (int, float)) and repr(value) == text
    return value if exact or isinstance(value, dict) else text


def _devices(text: str) -> list[int | str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no GPU")
    return [int(name) if name.isdigit() else name for name in names]
