"""The router in front of several servers: its process, and its list of workers.

It is SGLang's own (the package ``sglang-router``), run by the engine's interpreter
under the same watchdog as a server. Generation goes through it, control never does: the
data plane talks to its :attr:`~RouterProcess.url`, and the fleet tells it which servers
are in rotation with :meth:`~RouterProcess.add_worker` and
:meth:`~RouterProcess.remove_worker`.

The router only routes. Whether a failed request is sent again is the data plane's to
decide, so the router's own retries are off; and since it counts a refused request (4xx)
against the server that refused it, so is its circuit breaker.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from torchrl_sglang.backends.client.http import Answer, HttpClient
from torchrl_sglang.backends.launch import cpu
from torchrl_sglang.backends.launch.environment import inherited_environment
from torchrl_sglang.backends.launch.ports import lease_port
from torchrl_sglang.backends.launch.process import LOG_TAIL_LINES, ServerProcess
from torchrl_sglang.backends.support.checks import nearest
from torchrl_sglang.backends.support.urls import (
    hide_passwords,
    is_loopback,
    split_credentials,
    url_of,
)
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerStartError,
    ServerTimeoutError,
    ServerUnavailableError,
)

__all__ = [
    "RouterProcess",
    "RouterWorker",
    "ask_router",
    "check_router",
    "make_sglang_router",
    "router_policies",
]

START_TIMEOUT_SECONDS = 60.0
"""Default budget for a start; the router is ready 0.1 s after its servers are."""

DESCRIBE_TIMEOUT_SECONDS = 60.0
"""Budget for asking an interpreter for its router; it takes 0.1 s."""

WORKER_TIMEOUT_SECONDS = 45.0
"""Default budget for a change of the worker list: what the router needs to give up."""

LIST_TIMEOUT_SECONDS = 10.0
"""Default budget for reading the worker list."""

POLL_SECONDS = 0.05
"""How often a change of the worker list, which is a job of the router, is looked at."""

READY_TIMEOUT_SECONDS = 2.0
"""A starting router that takes longer to list its workers is asked again."""

ROUTER_ARGUMENTS: Mapping[str, Any] = {
    # The data plane sends a failed request again; here, errors are to be seen.
    "disable_retries": True,
    # It takes a server that refuses wrong requests for a broken one.
    "disable_circuit_breaker": True,
    # A server that is dead leaves the rotation within two seconds and comes back in
    # one. One that is only slow to answer takes part for 20 s more.
    "health_check_interval_secs": 1,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    "health_check_timeout_secs": 10,
    # A week: the budget of a request is the data plane's.
    "request_timeout_secs": 7 * 24 * 3600,
    # Bytes; a prompt of a million tokens has 7 MB.
    "max_payload_size": 2**30,
    "worker_startup_timeout_secs": 30,
    "worker_startup_check_interval": 1,
    "shutdown_grace_period_secs": 1,
    # Samples of one prompt go to one server, which has it in its cache; prompts that
    # share their beginning, such as a system prompt, are spread out. With the router's
    # own values (0.3, 64, 1.5), 32 of the latter all go to one of two servers.
    "cache_threshold": 0.7,
    # A burst of groups is not torn apart because one server is a few groups ahead.
    "balance_abs_threshold": 64,
    "balance_rel_threshold": 1.5,
    # New keys of the policy "manual" go where the fewest are; with "random", most of a
    # few sessions can be on one server.
    "assignment_mode": "min_group",
    "prometheus_host": "127.0.0.1",
    # Below, the log has two lines for each request.
    "log_level": "warn",
}
"""Arguments of a router that is started here, where the user gives no others."""

KEYED_POLICIES = ("manual", "consistent_hashing")
"""Policies that read the routing key."""

UNUSABLE_POLICIES: Mapping[str, str] = {
    "bucket": "it is for servers that are split into prefill and decode",
    "prefix_hash": "it answers every request to an HTTP server with status 503",
}
"""Policies that the router has and that cannot route to these servers."""

UNUSABLE_ARGUMENTS: Mapping[str, str] = {
    "worker_urls": "give the servers as the first argument",
    "mini_lb": "it is another program, without a worker list",
}
"""Arguments that the router has and that cannot be given by name here."""

_LAUNCHER = Path(__file__).with_name("router_launch.py")

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")

_COLOR = re.compile(r"\x1b\[[0-9;]*m")


class RouterWorker(NamedTuple):
    """A server that a router knows."""

    url: str
    """Its address."""
    healthy: bool
    """Whether it is in rotation."""


def router_policies(python: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Returns the policies of the installed router that can route to these servers.

    Args:
        python: interpreter that has sglang-router, as in :func:`make_sglang_router`.

    Raises:
        ConfigurationError: if it has none.
    """
    found = _describe(_find_python(python))["policies"]
    return tuple(name for name in sorted(found) if name not in UNUSABLE_POLICIES)


class RouterProcess(ServerProcess):
    """A running router, with its worker list.

    States are those of a server; it is *ready* once every worker that it was started
    with is in rotation. The coroutines run on the background loop only.

    Args:
        worker_urls: addresses of the servers; none to add them later.
        policy: how a server is chosen for a request, one of :func:`router_policies`:
            ``"cache_aware"`` sends prompts that begin alike to one server as long as
            the load is even; ``"manual"`` and ``"consistent_hashing"`` keep requests of
            one routing key together (header ``X-SMG-Routing-Key``); ``"round_robin"``,
            ``"random"`` and ``"power_of_two"`` look at no request.
        host: address to listen on.
        port: by default, one that is free.
        api_key: what the router asks of its callers and gives to the servers, whose
            key it is too.
        python: interpreter that has sglang-router: by default this one if it has, and
            else that of the CPU engine.
        environment: variables to add to the router's environment; as for a server.
        start_timeout: timeout for its start, in seconds.
        **router_args: arguments of sglang-router under its own names, such as
            ``balance_abs_threshold``.

    Raises:
        ConfigurationError: if an argument is wrong or no router is installed.
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
        start_timeout: float = START_TIMEOUT_SECONDS,
        **router_args: Any,
    ) -> None:
        interpreter = _find_python(python)
        _check_arguments(_describe(interpreter), policy, router_args)
        if not is_loopback(host) and api_key is None:
            raise ConfigurationError(
                f"host={host!r} lets other machines reach the router, who could "
                f"generate and replace its workers; give it the servers' api_key=..., "
                f"or leave host out."
            )
        self.policy = policy
        self._worker_urls = _check_urls(worker_urls)
        self._api_key = api_key
        self._http = HttpClient(api_key)
        arguments = {**ROUTER_ARGUMENTS, **router_args}
        with ExitStack() as undo:
            lease = lease_port(host, port)
            undo.callback(lease.release)
            # Left alone, every router takes the same one, and the second dies of it.
            metrics = lease_port(
                arguments["prometheus_host"],
                arguments.get("prometheus_port"),
                name="prometheus_port",
            )
            undo.pop_all()
        arguments |= {
            "worker_urls": self._worker_urls,
            "policy": policy,
            "host": host,
            "port": lease.port,
            "prometheus_port": metrics.port,
            "api_key": api_key,
        }
        super().__init__(
            [interpreter, str(_LAUNCHER), "serve"],
            url=url_of(host, lease.port),
            environment={**_environment(interpreter), **(environment or {})},
            name="router",
            hidden=[] if api_key is None else [api_key],
            config={"arguments": json.dumps(arguments)},
            leases=[lease, metrics],
            start_timeout=start_timeout,
        )

    @property
    def usable(self) -> bool:
        """Whether requests can be sent to it, as far as is known."""
        return self.state == "ready"

    @property
    def keyed(self) -> bool:
        """Whether it keeps requests with one routing key together."""
        return self.policy in KEYED_POLICIES

    def _answers(self) -> bool:
        return self._missing() == []

    def _missing(self) -> list[str] | None:
        """Returns the workers that are not in rotation; ``None`` without an answer."""
        request = urllib.request.Request(f"{self.url}/workers")
        if self._api_key is not None:
            request.add_header("Authorization", f"Bearer {self._api_key}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=READY_TIMEOUT_SECONDS) as answer:
                entries = json.loads(answer.read())["workers"]
        except (urllib.error.URLError, OSError, ValueError):
            return None
        healthy = {entry["url"] for entry in entries if entry["is_healthy"]}
        return [url for url in self._worker_urls if url not in healthy]

    def _start_error(self, reason: str) -> ServerStartError:
        error = super()._start_error(reason)
        missing = self._missing()
        if not missing:
            return error
        return ServerStartError(
            f"{error}\nIt waits for {', '.join(missing)}, which must run before the "
            f"router is started, with the same api_key."
        )

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of its log, without colors."""
        return _COLOR.sub("", super().log_tail(lines))

    async def workers(
        self, *, timeout: float = LIST_TIMEOUT_SECONDS
    ) -> list[RouterWorker]:
        """Returns the servers that the router knows, and which are in rotation.

        Raises:
            ServerUnavailableError: if the router does not answer.
            ServerTimeoutError: if the budget is used up.
        """
        entries = await self._list(time.monotonic() + timeout)
        return [
            RouterWorker(entry["url"], bool(entry["is_healthy"])) for entry in entries
        ]

    async def add_worker(
        self, url: str, *, timeout: float = WORKER_TIMEOUT_SECONDS
    ) -> None:
        """Puts a server into rotation, and returns when it is there.

        Args:
            url: address of the server, which has the router's ``api_key`` if it asks
                for one. One that is known already is waited for until it is healthy.
            timeout: budget, in seconds.

        Raises:
            ServerUnavailableError: if the router does not answer, or cannot reach the
                server.
            ServerTimeoutError: if the budget is used up.
        """
        deadline = time.monotonic() + timeout
        url = _check_url(url)
        entry = await self._find(url, deadline)
        if entry is None:
            payload = {"url": url}
            if self._api_key is not None:
                # The router does not give its own key to a server that comes later.
                payload["api_key"] = self._api_key
            answer = await self._call("POST", "/workers", deadline, payload)
            entry = {"id": answer.raise_for_status().json()["worker_id"]}
        while not entry.get("is_healthy"):
            job = entry.get("job_status") or {}
            if job.get("status") == "failed":
                raise ServerUnavailableError(
                    f"The router at {self.url} could not add {url}: "
                    f"{job.get('message')}"
                )
            await self._pause(deadline, f"adding {url}")
            path = f"/workers/{entry['id']}"
            answer = await self._call("GET", path, deadline)
            # Between the two lists of the router, it is in neither for a moment.
            if answer.status != 404:
                entry = answer.raise_for_status().json()

    async def remove_worker(
        self, url: str, *, timeout: float = WORKER_TIMEOUT_SECONDS
    ) -> None:
        """Takes a server out of rotation, and returns when no request goes there.

        Requests that are under way are finished. One that the router does not know is
        out of rotation already.

        Args:
            url: address of the server.
            timeout: budget, in seconds.

        Raises:
            ServerUnavailableError: if the router does not answer.
            ServerTimeoutError: if the budget is used up.
        """
        deadline = time.monotonic() + timeout
        url = _check_url(url)
        entry = await self._find(url, deadline)
        if entry is None:
            return
        answer = await self._call("DELETE", f"/workers/{entry['id']}", deadline)
        if answer.status != 404:
            answer.raise_for_status()
        while await self._find(url, deadline) is not None:
            await self._pause(deadline, f"removing {url}")

    async def _find(self, url: str, deadline: float) -> dict[str, Any] | None:
        entries = await self._list(deadline)
        return next((entry for entry in entries if entry["url"] == url), None)

    async def _list(self, deadline: float) -> list[dict[str, Any]]:
        answer = await self._call("GET", "/workers", deadline)
        content = answer.raise_for_status().json()
        if not isinstance(content, dict) or "workers" not in content:
            raise ServerUnavailableError(
                f"{answer.url} answered {content!r:.200}, as no router does."
            )
        entries: list[dict[str, Any]] = content["workers"]
        return entries

    async def _call(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        deadline: float,
        payload: Any = None,
    ) -> Answer:
        left = max(deadline - time.monotonic(), 1e-3)
        return await self._http.request(
            method, f"{self.url}{path}", payload, timeout=left
        )

    async def _pause(self, deadline: float, what: str) -> None:
        if time.monotonic() > deadline:
            raise ServerTimeoutError(
                f"The router at {self.url} was not done with {what} in time. The end "
                f"of its log:\n{self.log_tail()}"
            )
        await asyncio.sleep(POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return (
            f"RouterProcess({self.url!r}, policy={self.policy!r}, pid={self.pid}, "
            f"state={self.state!r})"
        )


def make_sglang_router(
    worker_urls: Sequence[str],
    **arguments: Any,
) -> RouterProcess:
    """Starts a router and waits until all its workers are in rotation.

    Args:
        worker_urls: addresses of the servers, which run.
        **arguments: those of :class:`RouterProcess`.

    Returns:
        The running router. It ends with :meth:`~.process.ServerProcess.stop`, with this
        process, or with the last reference to it.

    Raises:
        ConfigurationError: if an argument is wrong or no router is installed.
        ServerStartError: if it ends or is not ready within the budget.

    Examples:
        >>> with make_sglang_router([engine.server_url]) as router:
        ...     router.state
        'ready'
    """
    router = RouterProcess(worker_urls, **arguments)
    router.wait_ready()
    return router


async def ask_router(http: HttpClient, url: str) -> list[str]:
    """Returns the addresses of the servers that a router has in rotation.

    Args:
        http: connections; closed afterwards.
        url: address of the router, which can be anybody's.

    Raises:
        ServerUnavailableError: if no router answers there.
        ConfigurationError: if it has no server.
    """
    try:
        answer = await http.request(
            "GET", f"{url}/workers", timeout=LIST_TIMEOUT_SECONDS
        )
        content = answer.raise_for_status().json()
        entries = content["workers"]
        found = [str(entry["url"]) for entry in entries if entry["is_healthy"]]
    except (RequestRefusedError, KeyError, TypeError) as error:
        raise ServerUnavailableError(
            f"{url} does not answer like a router of SGLang's ({error})."
        ) from error
    finally:
        await http.close()
    if not found:
        raise ConfigurationError(
            f"The router at {url} has no server in rotation: {entries!r:.300}. Add "
            f"servers to it, or give urls=[...]."
        )
    return found


def _find_python(python: str | os.PathLike[str] | None) -> str:
    if python is not None:
        return str(python)
    # Of a package at the top, this looks at files and imports nothing.
    if importlib.util.find_spec("sglang_router") is not None:
        return sys.executable
    return str(cpu.engine_python())


def _environment(interpreter: str) -> dict[str, str]:
    own_python = interpreter != sys.executable
    inherited = inherited_environment(os.environ, own_python=own_python)
    # The router and the servers talk to each other directly.
    return {k: v for k, v in inherited.items() if k not in _PROXIES}


_DESCRIBED: dict[str, Mapping[str, Any]] = {}
"""What was found for an interpreter, which does not change meanwhile."""


def _describe(interpreter: str) -> Mapping[str, Any]:
    if interpreter not in _DESCRIBED:
        try:
            done = subprocess.run(
                [interpreter, str(_LAUNCHER), "describe"],
                env=_environment(interpreter),
                capture_output=True,
                text=True,
                timeout=DESCRIBE_TIMEOUT_SECONDS,
                check=True,
            )
            _DESCRIBED[interpreter] = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            output = getattr(error, "stderr", None) or str(error)
            raise ConfigurationError(
                f"{interpreter} has no sglang-router that can be used "
                f"({output.strip().splitlines()[-1]}); install the package "
                f"sglang-router there, or name another interpreter with python=..."
            ) from None
    return _DESCRIBED[interpreter]


def check_router(policy: str, router_args: Mapping[str, Any]) -> None:
    """Checks a router's arguments without starting one.

    Args:
        policy: how a server is chosen.
        router_args: as :class:`RouterProcess` takes them.

    Raises:
        ConfigurationError: if one is wrong or no router is installed.
    """
    interpreter = _find_python(router_args.get("python"))
    named = ("host", "port", "python", "environment")
    rest = {k: v for k, v in router_args.items() if k not in named}
    _check_arguments(_describe(interpreter), policy, rest)


def _check_arguments(
    described: Mapping[str, Any], policy: str, router_args: Mapping[str, Any]
) -> None:
    usable = [name for name in described["policies"] if name not in UNUSABLE_POLICIES]
    if policy not in usable:
        reason = UNUSABLE_POLICIES.get(policy)
        raise ConfigurationError(
            f"policy={policy!r} cannot be used{f': {reason}' if reason else ''}. The "
            f"policies of sglang-router {described['version']} for these servers are "
            f"{', '.join(sorted(usable))}."
        )
    for name in router_args:
        if name in UNUSABLE_ARGUMENTS:
            raise ConfigurationError(
                f"{name!r} cannot be given to a router that is started here: "
                f"{UNUSABLE_ARGUMENTS[name]}."
            )
        if name not in described["arguments"]:
            meant = nearest(name, described["arguments"])
            hint = f"did you mean {meant!r}?" if meant else "see its RouterArgs."
            raise ConfigurationError(
                f"{name!r} is not an argument of sglang-router "
                f"{described['version']}; {hint}"
            )


def _check_urls(urls: Sequence[str]) -> list[str]:
    if isinstance(urls, str):
        raise ConfigurationError(
            f"The servers of a router are a list of addresses, not "
            f"{hide_passwords(urls)!r}."
        )
    checked = [_check_url(url) for url in urls]
    twice = sorted({url for url in checked if checked.count(url) > 1})
    if twice:
        raise ConfigurationError(
            f"The router was given {', '.join(twice)} more than once."
        )
    return checked


def _check_url(url: str) -> str:
    shown, login = split_credentials(url)
    if login is not None:
        raise ConfigurationError(
            f"The router sends no user and password to {shown}; start the server with "
            f"an api_key, and give the router the same."
        )
    return shown
