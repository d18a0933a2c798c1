"""The command, environment and ports of a server, decided before its start.

The commands of all servers of an engine are made before the first server starts, to
find a wrong argument, a port in use or a missing GPU before anything runs.

The engine can live in another interpreter and have any version, so its flags are read
from its source files. These are parsed and never imported: an import takes seconds and
needs packages absent from the trainer.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchrl_sglang.backends.client.drafts import drafts_by_ngrams
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.cuda_graphs import gpu_memory, graph_arguments
from torchrl_sglang.backends.launch.environment import (
    check_environment,
    inherited_environment,
)
from torchrl_sglang.backends.launch.gpus import (
    assign_devices,
    check_sizes,
    default_device,
    device_environment,
    devices_per_server,
    visible_devices,
)
from torchrl_sglang.backends.launch.loaders import loader_arguments, search_path
from torchrl_sglang.backends.launch.ports import PortLease, lease_port, ports_to_hold
from torchrl_sglang.backends.launch.process import Command
from torchrl_sglang.backends.launch.vllm_arguments import (
    ARGUMENTS,
    INERT,
    translate_vllm_names,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import nearest, to_python
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.support.passwords import hide_passwords
from torchrl_sglang.support.urls import interface_of, is_loopback, url_of
from torchrl_sglang.types import WeightLoader

SERVER_ENVIRONMENT = {
    # Otherwise /health generates a token, which takes a second and fails while
    # generation is paused.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    # Log-probs of sampled tokens before the temperature, as the trained model computes
    # them. If a server still returns others, the engine scores whole responses.
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
    # The last lines of a killed server are the most useful.
    "PYTHONUNBUFFERED": "1",
}
"""Variables of every server."""

SECRETS = ("api_key", "admin_api_key")
"""Arguments to hide from other users of the machine."""

OF_THE_ENGINE = (
    *("num_replicas", "launcher", "cuda_devices", "start_timeout", "parallel_start"),
    *("router_policy", "router_args", "max_in_flight", "max_attempts", "max_restarts"),
    *("progress_timeout", "deterministic", "rollout_dtype", "weight_loader"),
)
"""Arguments of ``AsyncSGLang.from_pretrained`` other than a server's."""

FIND_TIMEOUT_SECONDS = 60.0
"""Timeout for an interpreter to locate its sglang package; it takes 0.1 s."""

_FIND = (
    # find_spec of a top-level package imports nothing.
    "import importlib.util as u, sys; s = u.find_spec(sys.argv[1]); "
    "print(*(s.submodule_search_locations or [s.origin] if s else ()), sep='\\n')"
)


def make_server_command(
    model: str | os.PathLike[str],
    *,
    device: str | None = None,
    python: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    sglang_version: str | None = None,
    cuda_devices: Sequence[Any] | None = None,
    weight_loader: WeightLoader = "sglang",
    **server_args: Any,
) -> Command:
    """Checks a server's arguments and leases its ports; see make_sglang_server()."""
    for name in INERT.keys() & server_args.keys():
        reason = INERT[name]
        torchrl_logger.info(f"{name}={server_args[name]!r} changes nothing: {reason}")
    arguments = translate_vllm_names({"model": model, **server_args})
    arguments |= loader_arguments(weight_loader, arguments)
    device = default_device() if device is None else device
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f"device={device!r} is not one that a server can be started on; give "
            f"'cuda' or 'cpu'."
        )
    deterministic = bool(to_python(arguments.get("enable_deterministic_inference")))
    _check_modes(device, deterministic, arguments)
    if deterministic:
        # Decoding leaves cache entries unequal in bits to a prefill's, and cache hits
        # depend on timing.
        arguments.setdefault("disable_radix_cache", True)
    check_local_model(model)
    _check_nodes(arguments)
    check_sizes(arguments)
    secrets = _take_secrets(arguments)
    # A line for each request would fill the disk in days.
    arguments.setdefault("log_level_http", "warning")
    host = str(arguments.setdefault("host", "127.0.0.1"))
    if not is_loopback(host) and "api_key" not in secrets:
        raise ConfigurationError(
            f"host={host!r} lets other machines reach the server, whose requests can "
            f"replace its weights; give it an api_key=..., or leave host out."
        )
    gpus = _confine_to_gpus(device, cuda_devices, arguments)
    if device == "cpu":
        program = cpu.launch_command(sglang_version, python)
        arguments = {**cpu.default_server_args(), **arguments}
        device_variables = cpu.engine_environment(sglang_version, python)
    else:
        interpreter = str(python) if python is not None else sys.executable
        program = [interpreter, "-m", "sglang.launch_server"]
        arguments = {"device": device, **arguments}
        device_variables = device_environment(gpus, os.environ)
    variables = inherited_environment(
        os.environ, own_python=program[0] != sys.executable
    )
    many_nodes = int(arguments.get("nnodes") or 1) > 1
    interface = None if many_nodes and is_loopback(host) else interface_of(host)
    if interface is not None:
        # Otherwise gloo listens on the address of the machine's name.
        variables.setdefault("GLOO_SOCKET_IFNAME", interface)
    variables |= SERVER_ENVIRONMENT | device_variables | check_environment(environment)
    flags = find_flags(program[0], variables)
    path = search_path(arguments, variables.get("PYTHONPATH", ""))
    if path:
        variables["PYTHONPATH"] = path
    check_names({**arguments, **secrets}, flags)
    if to_python(arguments.get("enable_memory_saver")):
        _check_memory_saver(program[0], variables)
    if device == "cuda":
        arguments |= graph_arguments(arguments, flags, gpu_memory())
    with ExitStack() as undo:
        leases = _lease_ports(host, arguments, variables, undo)
        line = to_flags(arguments, flags)
        undo.pop_all()
    return Command(
        line=(*program, *line),
        environment=variables,
        url=url_of(host, arguments["port"]),
        config=secrets,
        # SGLang writes its arguments, keys included, to its log.
        hidden=tuple(secrets.values()),
        leases=leases,
        # SGLang calls it after its warm-up. On CPU, without a warm-up, it would come
        # before SGLang listens, and each flush would scan the heap for half a second.
        when_ready="/freeze_gc" if device == "cpu" else None,
    )


def _check_modes(
    device: str, deterministic: bool, arguments: Mapping[str, Any]
) -> None:
    """Refuses unsupported modes of SGLang and unsupported combinations."""
    if device == "cpu" and deterministic:
        raise ConfigurationError(
            "deterministic=True (enable_deterministic_inference) is for servers on "
            "GPUs: SGLang's kernels for CPUs have no such mode, and ignore seeds. "
            "Start the servers with device='cuda', or leave it out."
        )
    algorithm = arguments.get("speculative_algorithm")
    if deterministic and algorithm is not None:
        raise ConfigurationError(
            f"deterministic=True (enable_deterministic_inference) does not go with "
            f"speculative_algorithm={algorithm!r}: drafts depend on other "
            f"requests, and tokens on drafts. Leave one of the two out."
        )
    if device == "cpu" and drafts_by_ngrams(arguments):
        raise ConfigurationError(
            "speculative_algorithm='NGRAM' is for servers on NVIDIA GPUs: SGLang's "
            "kernels for CPUs verify no such drafts. Start the servers with "
            "device='cuda', or leave it out."
        )


_ADDRESS = re.compile(r"https?://|[\w.-]+:\d+$")
"""Address of a server, where a hub name has no colon."""


def check_local_model(model: str | os.PathLike[str]) -> None:
    """Raises an error for a missing folder; a hub name is "owner/name"."""
    if not model or not isinstance(model, (str, os.PathLike)):
        raise ConfigurationError(
            f"model must be a folder or a hub name, got {model!r:.100}."
        )
    text = os.fspath(model)
    if _ADDRESS.match(text) and not Path(text).is_dir():
        raise ConfigurationError(
            f"{hide_passwords(text)!r} is an address, not a model. A running server is "
            f"given as AsyncSGLang.connect(ADDRESS), or as engine=... of GRPO."
        )
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_local and not Path(text).is_dir():
        raise ConfigurationError(
            f"There is no model folder {text!r}; give the path of a folder with "
            f"config.json, or a hub name like 'Qwen/Qwen2.5-0.5B'."
        )


def _check_nodes(arguments: Mapping[str, Any]) -> None:
    nodes = int(arguments.get("nnodes") or 1)
    rank = int(arguments.get("node_rank") or 0)
    if not 0 <= rank < nodes:
        raise ConfigurationError(
            f"node_rank={rank} is not one of nnodes={nodes}; they count from 0."
        )
    if nodes > 1 and not arguments.get("dist_init_addr"):
        raise ConfigurationError(
            f"nnodes={nodes} needs dist_init_addr='HOST:PORT', the same for every "
            f"node: an address of the node with node_rank=0, where they meet."
        )


def _take_secrets(arguments: dict[str, Any]) -> dict[str, str]:
    secrets = {name: arguments.pop(name, None) for name in SECRETS}
    secrets = {name: value for name, value in secrets.items() if value is not None}
    for name, value in secrets.items():
        # A key is sent as an HTTP header, and given to the server as a flag.
        if not isinstance(value, str) or not re.fullmatch(r"(?!-)[!-~]+", value):
            raise ConfigurationError(
                f"{name} is not a key; give a string of printable ASCII characters "
                f"without spaces, which does not begin with '-'."
            )
    return secrets


def _confine_to_gpus(
    device: str, cuda_devices: Sequence[Any] | None, arguments: Mapping[str, Any]
) -> tuple[str, ...]:
    """Returns the only GPUs for a server; none: all GPUs visible to the trainer."""
    if cuda_devices is None:
        return ()
    alternatives = ("base_gpu_id", "gpu_id_step")
    if device == "cpu" or any(arguments.get(name) is not None for name in alternatives):
        raise ConfigurationError(
            f"cuda_devices={list(cuda_devices)!r} is for device='cuda' without "
            f"base_gpu_id and gpu_id_step; leave it out."
        )
    return assign_devices(
        1,
        devices_per_server(arguments),
        cuda_devices=cuda_devices,
        available=visible_devices(),
    )[0]


def _lease_ports(
    host: str,
    arguments: dict[str, Any],
    environment: Mapping[str, str],
    undo: ExitStack,
) -> tuple[PortLease, ...]:
    """Leases every port of a server, and adds the chosen ports to the arguments."""

    def lease(name: str, port: object) -> PortLease:
        leased = lease_port(host, port, name=name)
        undo.callback(leased.release)
        if port is None or name == "port":
            arguments[name] = leased.port
        return leased

    http = lease("port", arguments.get("port"))
    ports = ports_to_hold(arguments, environment)
    return (http, *(lease(name, port) for name, port in ports.items()))


class ServerFlag(NamedTuple):
    """An option of a server's command line."""

    flag: str
    negatable: bool = False
    """Whether the flag has a ``--no-`` form."""


_FOUND: dict[tuple[str, str], Mapping[str, ServerFlag]] = {}
"""Interpreter and its search path -> flags, constant in this process."""


def find_flags(python: str, environment: Mapping[str, str]) -> Mapping[str, ServerFlag]:
    """Returns argument name -> flag of an interpreter's SGLang; none: unknown."""
    key = (python, environment.get("PYTHONPATH", ""))
    if key not in _FOUND:
        candidates = map(read_flags, _find_packages(python, environment) or ())
        _FOUND[key] = next(filter(None, candidates), {})
        if not _FOUND[key]:
            torchrl_logger.debug(f"The arguments of {python}'s sglang are unknown.")
    return _FOUND[key]


def _find_packages(
    python: str, environment: Mapping[str, str], name: str = "sglang"
) -> list[Path] | None:
    """Returns the folders of an interpreter's package; None: it does not run."""
    try:
        done = subprocess.run(
            [python, "-c", _FIND, name],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=FIND_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        torchrl_logger.debug(f"{python} does not report the place of {name}: {error}")
        return None
    return [Path(line) for line in done.stdout.splitlines() if line]


def _check_memory_saver(python: str, environment: Mapping[str, str]) -> None:
    if _find_packages(python, environment, "torch_memory_saver") == []:
        raise ConfigurationError(
            f"enable_memory_saver=True (which colocated=True sets) lets servers sleep, "
            f"and {python} has no torch_memory_saver, a package for NVIDIA GPUs that "
            f"comes with SGLang there. Install it beside sglang, or leave that out."
        )


def read_flags(package: Path) -> Mapping[str, ServerFlag]:
    """Returns the flags of the ``sglang`` package in a folder; none: not readable."""
    # Older versions define all flags in the first file, newer versions in the folder.
    files = [
        package / "srt" / "server_args.py",
        *sorted((package / "srt" / "arg_groups").rglob("*.py")),
    ]
    try:
        flags = parse_flags(file.read_text() for file in files)
    except (OSError, SyntaxError, ValueError) as error:
        torchrl_logger.debug(f"{package} cannot be read: {error}")
        return {}
    return flags if "model_path" in flags else {}


def parse_flags(sources: Iterable[str]) -> dict[str, ServerFlag]:
    """Returns argument name -> flag, as defined in Python source texts.

    A flag is an ``add_argument`` call or a field ``name: A[type, metadata, ...]``.
    """
    flags: dict[str, ServerFlag] = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.AnnAssign):
                flags |= _flags_of_field(node)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "add_argument"
            ):
                flags |= _by_name(map(_value, node.args), _is_negatable(node))
    return flags


def _flags_of_field(field: ast.AnnAssign) -> dict[str, ServerFlag]:
    name, annotation = ast.unparse(field.target), field.annotation
    if not (
        isinstance(annotation, ast.Subscript)
        and ast.unparse(annotation.value) in ("A", "Annotated")
        and isinstance(annotation.slice, ast.Tuple)
    ):
        return {}
    calls = [item for item in annotation.slice.elts if isinstance(item, ast.Call)]
    options = {o.arg: _value(o.value) for call in calls for o in call.keywords}
    if options.get("no_cli") is True:
        return {}
    flag = options.get("cli_name") or "--" + name.replace("_", "-")
    negatable = any(map(_is_negatable, calls))
    flags = _by_name([flag, *(options.get("aliases") or ())], negatable)
    return {**flags, name: ServerFlag(flag, negatable)}


def _by_name(flags: Iterable[Any], negatable: bool) -> dict[str, ServerFlag]:
    return {
        flag.removeprefix("--").replace("-", "_"): ServerFlag(flag, negatable)
        for flag in flags
        if isinstance(flag, str) and flag.startswith("--")
    }


def _is_negatable(call: ast.Call) -> bool:
    return any(
        option.arg == "action" and "BooleanOptionalAction" in ast.unparse(option.value)
        for option in call.keywords
    )


def _value(node: ast.expr) -> Any:
    """Returns the value of a literal, and ``None`` for any other expression."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def check_names(arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag]) -> None:
    """Refuses unknown arguments of the server, unless the value is False."""
    for name, value in arguments.items():
        if not name.isidentifier():
            raise ConfigurationError(
                f"{name!r} is not the name of an engine argument; write it with "
                f"underscores, like 'mem_fraction_static'."
            )
        # A disabled switch changes nothing, even if this version lacks it.
        if not flags or name in flags or to_python(value) is False:
            continue
        # argparse would accept a prefix of a name.
        guess = nearest(name, [*OF_THE_ENGINE, *flags, *ARGUMENTS])
        hint = f"did you mean {guess!r}?" if guess else "see SGLang's own list."
        if guess == name:
            hint = "give it to AsyncSGLang.from_pretrained()."
        raise ConfigurationError(
            f"{name!r} is not an argument of this SGLang's server; {hint}"
        )


def to_flags(
    arguments: Mapping[str, Any], flags: Mapping[str, ServerFlag]
) -> list[str]:
    """Returns the command line for arguments under SGLang's names.

    ``True`` becomes a bare flag, ``False`` its ``--no-`` form or nothing, ``None``
    nothing, a list several values, a mapping JSON, and a :class:`torch.dtype` its name.
    """
    line: list[str] = []
    for name, raw in arguments.items():
        value = to_python(raw)
        option = flags.get(name, ServerFlag("--" + name.replace("_", "-")))
        if value is False and option.negatable:
            line.append("--no-" + option.flag.removeprefix("--"))
        if value is None or value is False:
            continue
        if value is True:
            line.append(option.flag)
        elif isinstance(value, (list, tuple)):
            line += [option.flag, *(_text(name, item) for item in value)]
        else:
            text = _text(name, value)
            # argparse takes a separate value with a leading dash for a flag.
            line += (
                [f"{option.flag}={text}"] if text[:1] == "-" else [option.flag, text]
            )
    return line


def _text(name: str, value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Mapping):
        return json.dumps(value)
    if isinstance(value, (str, int, float)) or hasattr(value, "__fspath__"):
        return str(value)
    raise ConfigurationError(
        f"The engine argument {name}={value!r} has no form on a command line; give a "
        f"string, a number, a boolean, a list of them, or a mapping."
    )
