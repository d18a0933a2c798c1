"""Options of a server on a command line, and the key, which is never there.

What ``serve`` and ``bench`` have in common: their own options say where and with what a
server is started, and every other ``--name value`` is an argument of the server itself,
under SGLang's name or vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.support.checks import nearest
from torchrl_sglang.cli.parser import Parser
from torchrl_sglang.errors import ConfigurationError

__all__ = [
    "KEY_VARIABLE",
    "add_start_options",
    "engine_arguments",
    "read_key",
    "split",
    "start_arguments",
]

KEY_VARIABLE = "TORCHRL_SGLANG_API_KEY"
"""The environment variable that holds the servers' key."""

SURELY = 0.85
"""How near an unknown name must be to an own option to be a mistake for it.

No argument of SGLang's server is as near to one; a test looks at all of them.
"""

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")


def add_start_options(parser: Parser) -> None:
    """Adds the options that say how a server is started."""
    parser.add_argument(
        "--num-replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of servers (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where the model runs (default: cuda where there is a GPU)",
    )
    parser.add_argument(
        "--cuda-devices",
        type=_devices,
        metavar="LIST",
        help="GPUs to confine the servers to, like 2,3",
    )
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="interpreter that has SGLang (default: this one on CUDA, that of the "
        "engine environment on CPU)",
    )
    parser.add_argument(
        "--router-policy",
        metavar="NAME",
        help="how the router of several servers chooses one, or none for no router "
        "(default: cache_aware)",
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help="budget for the start (default: 600)",
    )
    add_key_option(parser)


def add_key_option(parser: Parser) -> None:
    """Adds the option that names the file with the key."""
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help=f"file with the key that the server asks for (default: the environment "
        f"variable {KEY_VARIABLE}; never the command line, which everybody can read)",
    )


def start_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the keyword arguments of ``from_pretrained`` for these options."""
    found = {
        "num_replicas": arguments.num_replicas,
        "device": arguments.device,
        "cuda_devices": arguments.cuda_devices,
        "python": arguments.python,
        "start_timeout": arguments.start_timeout,
        "api_key": read_key(arguments.api_key_file),
    }
    given = {name: value for name, value in found.items() if value is not None}
    if arguments.router_policy is not None:
        named = arguments.router_policy
        given["router_policy"] = None if named == "none" else named
    return {**given, **engine_arguments(arguments.engine_words, arguments.own_options)}


def read_key(
    file: str | None, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Returns the key from a file or else from the environment.

    Raises:
        ConfigurationError: if the file cannot be read or has no key.
    """
    if file is None:
        return environment.get(KEY_VARIABLE) or None
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The key cannot be read: {error}.") from None
    if not key:
        raise ConfigurationError(f"The file {file} has no key in it.")
    return key


def split(words: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Returns the command's own words and the engine's. Pure.

    Values follow their option, so a word after an engine's option is its value; MODEL
    stands before these or behind an option of the command's own.

    Args:
        words: the command line.
        own: the command's own options, and whether each takes a value.

    Examples:
        >>> split(["model", "--tp-size", "2", "--json"], {"--json": False})
        (['model', '--json'], ['--tp-size', '2'])
    """
    mine: list[str] = []
    engine: list[str] = []
    to = mine
    values_due = 0
    for word in words:
        name, equals, _ = word.partition("=")
        if values_due:
            values_due -= 1
        elif name in own:
            to = mine
            values_due = int(own[name] and not equals)
        elif word.startswith("--") and len(word) > 2:
            to = engine
        elif re.match(r"-[A-Za-z]", word):
            # Left to the parser, which says that it is unknown.
            to = mine
        to.append(word)
    return mine, engine


def engine_arguments(words: Iterable[str], own: Iterable[str] = ()) -> dict[str, Any]:
    """Returns a server's arguments from its options. Pure.

    Integers, simple fractions, ``true``, ``false`` and JSON objects become what they
    stand for, everything else stays text. An option without a value is ``True``, one
    with several is a list, and ``--no-name`` without a value is ``name=False``.

    Args:
        words: ``--name value``, ``--name=value`` and ``--name``.
        own: options of the command's own, for suggestions.

    Raises:
        ConfigurationError: if a name is given twice, is nearly one of the command's
            own, or is a key.

    Examples:
        >>> engine_arguments(["--tp-size", "2", "--disable-radix-cache"])
        {'tp_size': 2, 'disable_radix_cache': True}
        >>> engine_arguments(["--no-enable-prefix-caching"])
        {'enable_prefix_caching': False}
    """
    found: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            _check_engine_option(flag, own)
            name = flag.removeprefix("--").replace("-", "_")
            if name in found:
                raise ConfigurationError(f"{flag} is given twice; give it once.")
            values = found[name] = [value] if equals else []
        else:
            values.append(word)
    arguments: dict[str, Any] = {}
    for name, texts in found.items():
        if not texts and name.startswith("no_"):
            arguments[name.removeprefix("no_")] = False
        elif len(texts) > 1:
            arguments[name] = [_value(text) for text in texts]
        else:
            arguments[name] = _value(texts[0]) if texts else True
    return arguments


def _check_engine_option(flag: str, own: Iterable[str]) -> None:
    if flag.removeprefix("--").replace("-", "_") in SECRETS:
        raise ConfigurationError(
            f"{flag} on a command line can be read by every user of this machine. Put "
            f"the server's key into a file and give --api-key-file FILE, or set "
            f"{KEY_VARIABLE}."
        )
    dashed = flag.replace("_", "-")
    meant = nearest(dashed, own, cutoff=SURELY)
    # The beginning of an own option may be the whole of one of the engine's.
    if meant is not None and not meant.startswith(dashed + "-"):
        raise ConfigurationError(f"{flag} is not an option; did you mean {meant}?")


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"-?(0|[1-9][0-9]*)", text):
        return int(text)
    # A version such as 1.10 is text: as a number it would be another one.
    if re.fullmatch(r"-?[0-9]+\.[0-9]+", text) and repr(float(text)) == text:
        return float(text)
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _devices(text: str) -> list[int | str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names no GPU")
    return [int(name) if name.isdigit() else name for name in names]
