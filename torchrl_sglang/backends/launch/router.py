"""The router in front of several servers: its arguments and its process.

It is SGLang's own (the package ``sglang-router``), run by the engine's interpreter
under the same watchdog as a server. Generation requests go through it, control calls
never do.

The router only routes. The engine retries failed requests, so the router's own retries
are off; so is its circuit breaker, which counts refused requests (4xx), too.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchrl_sglang.backends.client.router import RouterClient, check_worker_url
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.ports import lease_port
from torchrl_sglang.backends.launch.process import Command, ServerProcess
from torchrl_sglang.errors import ConfigurationError, ServerStartError, SGLangError
from torchrl_sglang.support.checks import check_count, nearest
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.urls import is_loopback, url_of

ROUTER_ARGUMENTS: Mapping[str, Any] = {
    # The engine retries; errors must reach it.
    "disable_retries": True,
    # The circuit breaker takes a server out of rotation for refusals of wrong requests.
    "disable_circuit_breaker": True,
    # A dead server leaves the rotation within two seconds and comes back in a second. A
    # slow server stays for 20 s more.
    "health_check_interval_secs": 1,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "health_check_timeout_secs": 10,
    # A week: the engine has the timeouts of requests.
    "request_timeout_secs": 7 * 24 * 3600,
    # Bytes; a prompt of a million tokens has 7 MB.
    "max_payload_size": 2**30,
    "worker_startup_timeout_secs": 30,
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
    # Samples of a prompt go to the same server, for its prefix cache; prompts with a
    # common prefix, such as a system prompt, are spread out. With the router's own
    # values (0.3, 64, 1.5), 32 of the latter all go to one of two servers.
    "cache_threshold": 0.7,
    # A group is not split because a server is a few groups ahead.
    "balance_abs_threshold": 64,
    "balance_rel_threshold": 1.5,
    # With "manual", new keys go to the server with the fewest keys; with "random", a
    # server can get most of a few sessions.
    "assignment_mode": "min_group",
    "prometheus_host": "127.0.0.1",
    # Lower levels log two lines for each request.
    "log_level": "warn",
}
"""Defaults of a router of this package."""

KEYED_POLICIES = ("manual", "consistent_hashing")
"""Policies with a server per routing key (``X-SMG-Routing-Key``)."""

UNUSABLE_POLICIES: Mapping[str, str] = {
    "bucket": "it is for servers that are split into prefill and decode",
    "prefix_hash": "it answers every request to an HTTP server with status 503",
}
"""Router policies unable to route to these servers, with the reason."""

UNUSABLE_ARGUMENTS: Mapping[str, str] = {
    "worker_urls": "give the servers as the first argument",
    "mini_lb": "it is another program, without a worker list",
}
"""Router arguments refused here by name, with the reason."""

_LAUNCHER = Path(__file__).with_name("router_launch.py")

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


class RouterProcess(ServerProcess, RouterClient):
    """A router; it is *ready* when all workers of its start are in rotation.

    It shares the key of its servers. Other arguments are sglang-router's own.
    """

    def __init__(
        self,
        worker_urls: Sequence[str],
        *,
        policy: str = "cache_aware",
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        python: str | os.PathLike[str] | None = None,
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        **router_args: Any,
    ) -> None:
        interpreter = _find_python(python)
        _check_arguments(interpreter, policy, router_args)
        if not is_loopback(host) and api_key is None:
            raise ConfigurationError(
                f"host={host!r} lets other machines reach the router, who could "
                f"generate and replace its workers; give it the servers' api_key=..., "
                f"or leave host out."
            )
        self.policy = policy
        self._worker_urls = [check_worker_url(url) for url in worker_urls]
        arguments = {**ROUTER_ARGUMENTS, **router_args}
        lease = lease_port(host, port)
        # All routers have the same default, and a second router would end at once.
        metrics = lease_port(
            arguments["prometheus_host"],
            arguments.get("prometheus_port"),
            name="prometheus_port",
        )
        arguments |= {
            "worker_urls": self._worker_urls,
            "policy": policy,
            "host": host,
            "port": lease.port,
            "prometheus_port": metrics.port,
            "api_key": api_key,
        }
        url = url_of(host, lease.port)
        RouterClient.__init__(self, url, api_key)
        command = Command(
            line=(interpreter, str(_LAUNCHER), "serve"),
            environment={**_environment(interpreter), **(environment or {})},
            url=url,
            config={"arguments": json.dumps(arguments)},
            hidden=() if api_key is None else (api_key,),
            leases=(lease, metrics),
        )
        ServerProcess.__init__(
            self, command, name="router", start_timeout=start_timeout
        )

    @property
    def usable(self) -> bool:
        """Whether the router accepts requests, according to its process state."""
        return self.state == "ready"

    @property
    def keyed(self) -> bool:
        """Whether the router keeps requests with equal routing keys together."""
        return self.policy in KEYED_POLICIES

    def _answers(self) -> bool:
        return self._missing_workers() == []

    def _missing_workers(self) -> list[str] | None:
        """Returns the workers out of rotation; None: no response."""
        try:
            workers = run_sync(self.workers(timeout=2.0))
        except SGLangError:
            return None
        healthy = {url for url, healthy in workers if healthy}
        return [url for url in self._worker_urls if url not in healthy]

    def _start_error(self, reason: str) -> ServerStartError:
        error = super()._start_error(reason)
        missing = self._missing_workers()
        if not missing:
            return error
        return ServerStartError(
            f"{error}\nIt waits for {', '.join(missing)}, which must run before the "
            f"router is started, with the same api_key."
        )


def make_sglang_router(worker_urls: Sequence[str], **arguments: Any) -> RouterProcess:
    """Starts a :class:`RouterProcess` and waits until it is ready."""
    router = RouterProcess(worker_urls, **arguments)
    router.wait_ready()
    return router


def router_arguments(
    num_replicas: int,
    *,
    policy: str | None,
    api_key: str | None,
    router_args: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Returns the checked arguments of an engine's router; None: it has no router."""
    if check_count("num_replicas", num_replicas) == 1:
        if router_args:
            raise ConfigurationError(
                f"router_args={dict(router_args)!r} is for several servers, and "
                f"num_replicas is 1; leave it out."
            )
        return None
    if policy is None:
        return None
    named = ("host", "port", "python", "environment")
    remaining = {n: value for n, value in router_args.items() if n not in named}
    _check_arguments(_find_python(router_args.get("python")), policy, remaining)
    return {"policy": policy, "api_key": api_key, **router_args}


def _find_python(python: str | os.PathLike[str] | None) -> str:
    if python is not None:
        return str(python)
    # Of a package at the top, this looks at files and imports nothing.
    if importlib.util.find_spec("sglang_router") is not None:
        return sys.executable
    try:
        return str(cpu.engine_python())
    except ConfigurationError as error:
        raise ConfigurationError(
            f"The router in front of several servers needs the package sglang-router, "
            f"which {sys.executable} does not have; install it, name an interpreter "
            f"that has it in router_args={{'python': ...}}, or give "
            f"router_policy=None: requests then go to the servers directly. {error}"
        ) from error


def _environment(interpreter: str) -> dict[str, str]:
    own_python = interpreter != sys.executable
    inherited = inherited_environment(os.environ, own_python=own_python)
    # The router and the servers talk to each other directly.
    return {k: v for k, v in inherited.items() if k not in _PROXIES}


@functools.cache
def _describe(interpreter: str) -> Mapping[str, Any]:
    """Returns version, argument names and policies of an interpreter's router."""
    try:
        done = subprocess.run(
            [interpreter, str(_LAUNCHER), "describe"],
            env=_environment(interpreter),
            capture_output=True,
            text=True,
            timeout=60.0,
            check=True,
        )
        described: Mapping[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        output = getattr(error, "stderr", None) or str(error)
        raise ConfigurationError(
            f"{interpreter} has no sglang-router that can be used "
            f"({output.strip().splitlines()[-1]}); install the package "
            f"sglang-router there, or name another interpreter with python=..."
        ) from None
    return described


def usable_policies(described: Mapping[str, Any]) -> list[str]:
    """Returns a router's policies for these servers."""
    return sorted(set(described["policies"]) - UNUSABLE_POLICIES.keys())


def _check_arguments(
    interpreter: str, policy: str, router_args: Mapping[str, Any]
) -> None:
    described = _describe(interpreter)
    usable = usable_policies(described)
    if policy not in usable:
        reason = UNUSABLE_POLICIES.get(policy)
        raise ConfigurationError(
            f"policy={policy!r} cannot be used{f': {reason}' if reason else ''}. The "
            f"policies of sglang-router {described['version']} for these servers are "
            f"{', '.join(usable)}."
        )
    for name in router_args:
        if name in UNUSABLE_ARGUMENTS:
            raise ConfigurationError(
                f"{name!r} cannot be given to a router that is started here: "
                f"{UNUSABLE_ARGUMENTS[name]}."
            )
        if name not in described["arguments"]:
            guess = nearest(name, described["arguments"])
            hint = f"did you mean {guess!r}?" if guess else "see its RouterArgs."
            raise ConfigurationError(
                f"{name!r} is not an argument of sglang-router "
                f"{described['version']}; {hint}"
            )
