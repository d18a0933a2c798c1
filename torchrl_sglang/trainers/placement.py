"""Servers of a run: whether and how they are started, and on which GPUs."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.environment import check_environment
from torchrl_sglang.backends.launch.gpus import devices_per_server
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.checks import suggest
from torchrl_sglang.support.urls import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.types import ServerPlacement

CONNECTING = ("url", "server_url", "urls", "router_url")
"""Arguments of an engine whose servers run already."""

PLACES = {"launcher", "cuda_devices", "base_gpu_id"}
"""Arguments with the GPUs of servers."""

COLOCATED_SHARE = 0.6
"""Share of a GPU's memory of a server that sleeps while the trainer trains, unless
``engine`` has another one."""


def connect_arguments(
    engine: Any, environment: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """Returns the arguments of ``AsyncSGLang.connect``, or None for servers to start.

    The environment has default keys of the servers, since other users can read a run's
    file and its command line. Arguments of servers to start beside an address are
    refused.
    """
    if isinstance(engine, str):
        engine = {"url": engine}
    elif isinstance(engine, Sequence):
        engine = {"urls": list(engine)}
    if not isinstance(engine, Mapping) or engine.keys().isdisjoint(CONNECTING):
        return None
    parameters = inspect.signature(AsyncSGLang.connect).parameters
    for name in engine:
        if name not in parameters:
            hint = suggest(str(name), parameters)
            raise ConfigurationError(
                f"engine has the address of servers that run, and {name!r}, which is "
                f"not for those but for servers that are started here; leave one of "
                f"them out.{hint}"
            )
    variables = {"api_key": KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
    keys = {name: environment.get(variable) for name, variable in variables.items()}
    return {**{name: key for name, key in keys.items() if key}, **engine}


def check_engine(name: str, engine: Any) -> Any:
    """Returns an engine, addresses of servers, or arguments of either."""
    is_kind = isinstance(engine, (RLSGLangEngine, str, Mapping, Sequence))
    if not is_kind or (isinstance(engine, Sequence) and not engine):
        raise ConfigurationError(
            f"{name} must be arguments of AsyncSGLang.from_pretrained, a URL, a list "
            f"of these, or an engine, got {engine!r}."
        )
    if isinstance(engine, Mapping):
        check_environment(engine.get("environment"))
        for model in ("model", "model_name", "model_path"):
            if model in engine:
                raise ConfigurationError(
                    f"{name} has {model!r}, and servers serve the model that is "
                    f"trained; leave it out."
                )
    return engine


def check_placement(
    model: Any, engine: Any, colocated: bool, max_staleness: int
) -> None:
    """Checks that the servers of a model can be started or run already."""
    runs = isinstance(engine, RLSGLangEngine) or connect_arguments(engine) is not None
    if isinstance(model, nn.Module) and not runs:
        raise ConfigurationError(
            "model is a module, of which no server can be started; give the engine "
            "that serves it, or its URL, as engine=..., or the model's folder or name."
        )
    if colocated and max_staleness:
        raise ConfigurationError(
            f"colocated=True lets the servers sleep while the trainer trains, so that "
            f"max_staleness={max_staleness} has no use; leave it out, or give the "
            f"servers GPUs of their own."
        )


def server_arguments(
    given: Mapping[str, Any],
    ranks: TrainerRanks,
    *,
    colocated: bool,
    lora: Mapping[str, Any] | None,
    by_file: bool,
    seed: int,
) -> dict[str, Any]:
    """Returns the arguments of a run's servers; the user's arguments take precedence.

    The trainer's ranks have the first GPUs; ``colocated`` servers run on the same.
    ``by_file`` weights are files that every server reads. Refuses a server on a GPU
    without a rank of the trainer, which could not open the weights.
    """
    arguments: dict[str, Any] = {"random_seed": seed}
    on_gpus = torch.cuda.is_available()
    if lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": lora.get("r", 8),
            "lora_target_modules": ["all"],
        }
    if colocated:
        arguments["enable_memory_saver"] = True
        if "gpu_memory_utilization" not in given:
            arguments["mem_fraction_static"] = COLOCATED_SHARE
        if on_gpus and not {"launcher", "cuda_devices"} & given.keys():
            # An adapter that one process has travels in the requests themselves.
            anywhere = by_file or (lora is not None and ranks.size == 1)
            arguments |= _one_for_each_rank(given, ranks, anywhere=anywhere)
    if not on_gpus:
        arguments["device"] = "cpu"
    elif "launcher" not in given:
        first = 0 if colocated else ranks.local_size
        replicas = {**arguments, **given}.get("num_replicas", 1)
        count = replicas * given.get("tp_size", 1)
        arguments["cuda_devices"] = list(range(first, first + count))
    return {**arguments, **given}


def _one_for_each_rank(
    given: Mapping[str, Any], ranks: TrainerRanks, *, anywhere: bool
) -> dict[str, Any]:
    """Returns the number of servers on the trainer's GPUs."""
    tp_size = given.get("tp_size", 1)
    replicas = given.get("num_replicas", max(ranks.local_size // tp_size, 1))
    if (replicas - 1) * tp_size >= ranks.local_size and not anywhere:
        gpus = replicas * tp_size
        raise ConfigurationError(
            f"colocated=True has each server open the memory of a rank of the trainer "
            f"on its GPUs; num_replicas={replicas} with tp_size={tp_size} are on "
            f"{gpus} GPUs, and {ranks.local_size} rank(s) are here. Start as many "
            f"ranks, torchrun --nproc-per-node {gpus}; or give fewer servers, or "
            f"weight_sync={{'directory': a folder on this machine, such as "
            f"'/dev/shm/weights'}}."
        )
    return {"num_replicas": replicas}


def place_apart(
    servers: Mapping[Any, Mapping[str, Any]], count: int
) -> dict[Any, Mapping[str, Any]]:
    """Returns the arguments of servers of several models, on different GPUs. Pure.

    The first model has the last of ``count`` GPUs. Servers with a place keep it.

    Examples:
        >>> place_apart({"math": {"tp_size": 2}, "code": {}}, 8)["code"]
        {'cuda_devices': [5]}
    """
    placed: dict[Any, Mapping[str, Any]] = {}
    for name, options in servers.items():
        placed[name] = options
        if PLACES & options.keys() or options.get("device") == "cpu":
            continue
        end = count
        count -= options.get("num_replicas", 1) * devices_per_server(options)
        if count < 0:
            raise ConfigurationError(
                f"The servers of {', '.join(map(repr, servers))} need {-count} more "
                f"GPUs than are visible here; give them fewer, or the same ones with "
                f"cuda_devices=[0] and smaller shares of the memory."
            )
        placed[name] = {**options, "cuda_devices": list(range(count, end))}
    return placed


def check_gpus(servers: Iterable[ServerPlacement], gpus: Collection[str]) -> None:
    """Refuses servers that a launcher has started on the trainer's GPUs."""
    for server in servers:
        if server.local and not set(gpus).isdisjoint(server.gpus or ()):
            raise ConfigurationError(
                f"The launcher started the server at {server.url} on the trainer's "
                f"GPUs, {', '.join(gpus)}; start Ray on this machine without them, as "
                f"in CUDA_VISIBLE_DEVICES=1,2,3 ray start ..., or name other nodes, as "
                f"in launcher=RayLauncher(nodes=...)."
            )
