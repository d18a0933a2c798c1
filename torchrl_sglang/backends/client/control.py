"""Control calls: a method per verb of SGLang, sent to every server directly.

A call succeeds only if every server accepts it; otherwise the error names the failed
server. Control calls bypass the router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Protocol

from torchrl_sglang.backends.client.capabilities import (
    adapters_in,
    start_id,
    weight_loaders,
)
from torchrl_sglang.backends.client.drafts import model_fields
from torchrl_sglang.backends.client.fan_out import AT_ONCE, fan_out
from torchrl_sglang.backends.client.http import HttpClient, Method, encode
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    ServerTimeoutError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import DraftUpdate, PauseMode, ServerCapabilities, WeightRoute

CONTROL_TIMEOUT_SECONDS = 60.0

QUERY_TIMEOUT_SECONDS = 10.0

SILENT_SECONDS = 0.5
"""Timeout of a call to a silent server, which still reaches a server that is slow."""

LoadFormat = (
    Literal["flattened_bucket", "safetensors", "torchrl_sglang_loader.load"] | None
)
"""Format of weights for servers; an unknown format ends a server."""

Errors = dict[str, SGLangError | None]
"""Each server's error, or ``None`` on success."""

Urls = Sequence[str] | None
"""Target servers of a call; ``None``: all running servers."""


class Servers(Protocol):
    """Target servers of control calls."""

    paused: bool
    """Whether this engine object paused generation."""

    @property
    def urls(self) -> Sequence[str]:
        """Running servers, in the order of their ranks."""

    @property
    def membership_epoch(self) -> int:
        """Grows whenever a server joins or leaves."""

    @property
    def asleep(self) -> Collection[str]:
        """Tags of the released memory; computation requires none."""


class ControlPlane:
    """Control calls to a set of servers with equal capabilities.

    To be awaited on the background loop. Timeouts are in seconds.
    """

    def __init__(
        self, http: HttpClient, servers: Servers, capabilities: ServerCapabilities
    ) -> None:
        self._http = http
        self._servers = servers
        self.capabilities = capabilities
        self.silent: set[str] | None = None
        """Servers without an answer to the last call; ``None``: not recorded."""

    async def impatient(self, *, timeout: float) -> ControlPlane:
        """Returns control calls that wait shortly for servers that are silent now.

        A machine may be gone, and the timeouts of successive calls would add up.
        """
        calls = ControlPlane(self._http, self._servers, self.capabilities)
        calls.silent = set()
        await calls._each("/model_info", None, timeout, method="GET")
        return calls

    @property
    def urls(self) -> Sequence[str]:
        """Running servers, in the order of their ranks."""
        return self._servers.urls

    @property
    def membership_epoch(self) -> int:
        """Grows whenever a server joins; a process group holds for a single value."""
        return self._servers.membership_epoch

    @property
    def paused(self) -> bool:
        """Whether this engine object paused generation."""
        return self._servers.paused

    async def _each(
        self,
        path: str,
        payload: Any,
        timeout: float,
        urls: Urls = None,
        method: Method = "POST",
        at_once: int | None = AT_ONCE,
    ) -> dict[str, Any | SGLangError]:
        """Returns the content of each server's response, or its error."""
        body = None if payload is None else encode(payload)

        async def one(url: str) -> Any | SGLangError:
            silent = self.silent is not None and url in self.silent
            seconds = min(timeout, SILENT_SECONDS) if silent else timeout
            call = self._http.request(method, url + path, body, timeout=seconds)
            try:
                response = (await call).raise_for_status()
                # Some answer with a plain text.
                is_json = response.body.lstrip().startswith((b"{", b"["))
                content = response.json() if is_json else None
            except SGLangError as error:
                self._record(url, silent=_is_silence(error))
                return error
            self._record(url, silent=False)
            # Older versions answer 200 and report failure in the body.
            if isinstance(content, dict) and content.get("success") is False:
                reason = content.get("message", content)
                return RequestRefusedError(f"{url}{path} refused: {reason}")
            return content

        targets = self.urls if urls is None else urls
        outcomes = await fan_out(one, targets, at_once=at_once)
        return dict(zip(targets, outcomes, strict=True))

    def _record(self, url: str, *, silent: bool) -> None:
        if self.silent is not None:
            (self.silent.add if silent else self.silent.discard)(url)

    async def _all(
        self,
        path: str,
        payload: Any,
        timeout: float,
        urls: Urls = None,
        method: Method = "POST",
        at_once: int | None = AT_ONCE,
    ) -> list[Any]:
        """Returns the servers' responses; raises the worst error if any failed."""
        outcomes = await self._each(path, payload, timeout, urls, method, at_once)
        if not outcomes:
            raise ServerUnavailableError(
                f"No server of the engine runs, so {path} was not sent."
            )
        failures = [e for e in outcomes.values() if isinstance(e, SGLangError)]
        if failures:
            # A refusal changed nothing on its server, so any other failure is worse.
            worst = min(failures, key=lambda e: isinstance(e, RequestRefusedError))
            partly = len(failures) < len(outcomes)
            raise worst.replace(partly=partly) from worst.__cause__
        return list(outcomes.values())

    async def _get(self, path: str, timeout: float, urls: Urls = None) -> list[Any]:
        return await self._all(path, None, timeout, urls, "GET")

    async def _errors(
        self, path: str, payload: Any, timeout: float, urls: Urls = None
    ) -> Errors:
        outcomes = await self._each(path, payload, timeout, urls)
        return {
            url: outcome if isinstance(outcome, SGLangError) else None
            for url, outcome in outcomes.items()
        }

    # Questions.

    async def healthy(self) -> bool:
        """Returns whether every server responds; does not raise."""
        try:
            await self._get("/health", QUERY_TIMEOUT_SECONDS)
        except SGLangError:
            return False
        return True

    async def weight_versions(
        self, *, timeout: float = QUERY_TIMEOUT_SECONDS, urls: Urls = None
    ) -> list[str]:
        """Returns each server's reported weight version."""
        answers = await self._get("/model_info", timeout, urls)
        return [str(answer.get("weight_version") or "default") for answer in answers]

    async def start_id(self, url: str) -> str:
        """Returns an identifier of a server's latest start; may be empty."""
        route = self.capabilities.info_route
        (answer,) = await self._get(route, QUERY_TIMEOUT_SECONDS, [url])
        return start_id(answer)

    async def weight_loaders(
        self, *, timeout: float = QUERY_TIMEOUT_SECONDS, urls: Urls = None
    ) -> list[tuple[str, ...]]:
        """Returns the current weight loaders' names of each server."""
        answers = await self._get(self.capabilities.info_route, timeout, urls)
        return [weight_loaders(answer) for answer in answers]

    async def schedulers_answer(self, *, timeout: float) -> Errors:
        """Checks every scheduler by a cheap task.

        A process in front of it answers most other queries, even while the scheduler
        hangs. A refusal is a response, and a wrong key no reason for a restart.
        """
        errors = await self._errors("/flush_cache", None, timeout)
        answers = (RequestRefusedError, ConfigurationError)
        return {
            url: None if isinstance(error, answers) else error
            for url, error in errors.items()
        }

    async def running_requests(self, *, timeout: float = QUERY_TIMEOUT_SECONDS) -> int:
        """Returns the number of running requests on all servers together."""
        return sum(running for running, _ in await self.loads(timeout=timeout))

    async def loads(
        self, *, timeout: float = QUERY_TIMEOUT_SECONDS, urls: Urls = None
    ) -> list[tuple[int, int]]:
        """Returns the numbers of running and of queued requests of each server."""
        answers = await self._get(self.capabilities.load_route, timeout, urls)
        return [_load(answer) for answer in answers]

    async def load_of(
        self, url: str, *, timeout: float = QUERY_TIMEOUT_SECONDS
    ) -> tuple[int, int, float | None]:
        """Returns a server's running and queued requests, and its use of KV cache."""
        (answer,) = await self._get(self.capabilities.load_route, timeout, [url])
        try:
            usage = _cache_usage(answer)
        except UnsupportedByServerError:
            usage = None
        return *_load(answer), usage

    async def cache_usages(self) -> list[float]:
        """Returns the used share of each server's KV cache, from 0 to 1."""
        answers = await self._get(self.capabilities.load_route, QUERY_TIMEOUT_SECONDS)
        return [_cache_usage(answer) for answer in answers]

    async def adapters(
        self, *, timeout: float = QUERY_TIMEOUT_SECONDS, urls: Urls = None
    ) -> list[tuple[str, ...]]:
        """Returns the served names of the LoRA adapters of each server."""
        answers = await self._get("/v1/models", timeout, urls)
        return [adapters_in(answer) for answer in answers]

    async def get_weights_by_name(
        self,
        name: str,
        rows: int,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Urls = None,
    ) -> list[Any]:
        """Returns a parameter's first rows on each first rank; for Llama's family."""
        payload = {"name": name, "truncate_size": rows}
        return await self._all("/get_weights_by_name", payload, timeout, urls)

    async def set_weight_version(self, version: str, *, timeout: float) -> None:
        """Sets the version of each server's weights."""
        payload = {"new_version": version, "abort_all_requests": False}
        await self._all("/update_weight_version", payload, timeout)

    async def loader_states(
        self, name: str, *, timeout: float, urls: Urls = None
    ) -> dict[str, list[float] | None]:
        """Returns the state of each server's weight loader; None: it has none."""
        payload = {"name": name, "truncate_size": 1}
        outcomes = await self._each("/get_weights_by_name", payload, timeout, urls)
        states: dict[str, list[float] | None] = {}
        for url, outcome in outcomes.items():
            # A server without the loader's answer refuses.
            refused = isinstance(outcome, RequestRefusedError)
            if isinstance(outcome, SGLangError) and not refused:
                raise outcome
            states[url] = outcome if isinstance(outcome, list) else None
        return states

    async def prompt_log_probs(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache_key: str,
        adapter: str | None = None,
        urls: Urls = None,
    ) -> list[list[list[float]]]:
        """Returns, per server and prompt, the log-prob of each token but the first.

        ``cache_key`` is the weight version, to avoid an older prefix cache; ``adapter``
        the served name of a LoRA adapter.
        """
        payload = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "extra_key": [cache_key] * len(prompts),
        }
        if adapter is not None:
            payload["lora_path"] = [adapter] * len(prompts)
        answers = await self._all("/generate", payload, CONTROL_TIMEOUT_SECONDS, urls)
        return [
            [
                [entry[0] for entry in item["meta_info"]["input_token_logprobs"][1:]]
                for item in answer
            ]
            for answer in answers
        ]

    async def parse_response(
        self, path: str, content: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the response parsed by the first server with an answer."""
        error: SGLangError = ServerUnavailableError(
            f"No server of the engine runs, so {path} was not sent."
        )
        for url in self.urls:
            try:
                (answer,) = await self._all(path, content, QUERY_TIMEOUT_SECONDS, [url])
            except ServerUnavailableError as unavailable:
                error = unavailable
            else:
                return answer if isinstance(answer, dict) else {}
        raise error

    # Generation, caches and memory.

    async def pause(
        self, mode: PauseMode, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Pauses generation.

        A scheduler handles control calls in order, between two steps, so no step runs
        during a later call. Do not query loads during a pause: some versions return the
        last value before it.
        """
        self._servers.paused = True
        await self._all("/pause_generation", {"mode": mode}, timeout)

    async def resume(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Resumes generation, unless servers are asleep: their wake-up does so."""
        if not self._servers.asleep:
            await self._all("/continue_generation", {}, timeout)
            self._servers.paused = False

    async def abort_all(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Aborts every request, of all users."""
        await self._all("/abort_request", {"abort_all": True}, timeout)

    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Empties the prefix caches; returns False if a server is too busy."""
        try:
            await self._all("/flush_cache", None, timeout)
        except RequestRefusedError:
            return False
        return True

    async def flush_when_idle(self, *, grace: float = 1.0) -> bool:
        """Empties the prefix caches when the servers are idle, within a grace period.

        A server responds to a request before it ends the request. SGLang's own timeout
        for this is not used: a paused server never responds then.
        """
        deadline = time.monotonic() + grace
        while not (flushed := await self.flush_cache()):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        return flushed

    async def memory_occupation(
        self,
        verb: Literal["release", "resume"],
        tags: Collection[str],
        *,
        url: str,
        timeout: float,
    ) -> None:
        """Releases GPU memory of a server, or allocates released memory again.

        It ends a server unless it is idle, paused and awake, and has released it.
        """
        payload = {"tags": sorted(tags)}
        await self._all(f"/{verb}_memory_occupation", payload, timeout, [url])

    async def start_profile(self, options: Mapping[str, Any]) -> None:
        """Starts PyTorch's profiler in every server."""
        await self._all("/start_profile", dict(options), CONTROL_TIMEOUT_SECONDS)

    async def stop_profile(self) -> None:
        """Stops the profiler; the servers write their traces."""
        await self._all("/stop_profile", {}, CONTROL_TIMEOUT_SECONDS)

    # Weights.

    async def init_weights_update_group(self, *, timeout: float, **group: Any) -> None:
        """Makes every server join a process group whose rank 0 is the sender.

        ``group``: ``master_address``, ``master_port``, ``world_size``, ``group_name``
        and ``backend``. The ranks of server ``i`` begin at ``1 + i * tp_size *
        pp_size``. Raises as soon as a server fails, as the others wait for it.
        """
        ranks = self.capabilities.tp_size * self.capabilities.pp_size
        path = "/init_weights_update_group"
        await asyncio.gather(
            *(
                self._all(path, {**group, "rank_offset": 1 + i * ranks}, timeout, [url])
                for i, url in enumerate(self.urls)
            )
        )

    async def destroy_weights_update_group(
        self, group_name: str, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Makes every server leave a process group."""
        payload = {"group_name": group_name}
        await self._all("/destroy_weights_update_group", payload, timeout)

    async def begin_weight_update(
        self, *, urls: Urls = None, draft: DraftUpdate = "auto"
    ) -> None:
        """Opens an update session, on servers with such sessions."""
        if self.capabilities.needs_update_session:
            fields = model_fields(self.capabilities, None, draft)
            await self._all(
                "/begin_weight_update", fields, CONTROL_TIMEOUT_SECONDS, urls
            )

    async def begin_weight_update_on_each(
        self, urls: Sequence[str], *, timeout: float, draft: DraftUpdate = "auto"
    ) -> Errors:
        """Opens update sessions; returns each server's error."""
        if not self.capabilities.needs_update_session:
            return {}
        fields = model_fields(self.capabilities, None, draft)
        return await self._errors("/begin_weight_update", fields, timeout, urls)

    async def end_weight_update(
        self, *, timeout: float = CONTROL_TIMEOUT_SECONDS, urls: Urls = None
    ) -> None:
        """Closes the update session, on servers with such sessions."""
        if self.capabilities.needs_update_session:
            await self._all("/end_weight_update", {}, timeout, urls)

    async def end_weight_update_on_each(
        self, urls: Sequence[str], *, timeout: float
    ) -> Errors:
        """Closes update sessions; returns each server's error."""
        if not self.capabilities.needs_update_session:
            return {}
        return await self._errors("/end_weight_update", {}, timeout, urls)

    async def update_weights_from(
        self,
        source: WeightRoute,
        *,
        load_format: LoadFormat | str = None,
        weight_version: str | None,
        timeout: float,
        urls: Urls = None,
        draft: DraftUpdate = "auto",
        **fields: Any,
    ) -> None:
        """Loads weights into servers from a process group, a folder or the request.

        ``fields`` are the fields of SGLang's route. ``load_format`` is
        ``"flattened_bucket"`` for tensors in a single buffer, or the name of a loader
        of the servers; for a folder, it defaults to the format of the server's start,
        which reads no files if it is ``"dummy"``. ``weight_version``, given with the
        last part, is reported from then on.
        """
        payload = {
            **fields,
            **model_fields(self.capabilities, source, draft),
            "load_format": load_format,
            # A flush while requests are queued kills some versions.
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": weight_version,
        }
        path = f"/update_weights_from_{source}"
        # Servers wait for each other in a collective, and loading takes long.
        await self._all(path, payload, timeout, urls, at_once=None)

    # LoRA adapters.

    async def load_lora_adapter(
        self,
        name: str,
        path: str | None = None,
        *,
        tensors: str = "",
        config: Mapping[str, Any] | None = None,
        pinned: bool = False,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Urls = None,
    ) -> Errors:
        """Loads an adapter into servers under a new name; returns each server's error.

        It is in a folder readable there, or the text of :func:`.payload.to_text`, with
        the content of PEFT's ``adapter_config.json``.
        """
        payload = {"lora_name": name, "pinned": pinned}
        if path is not None:
            payload["lora_path"] = path
            return await self._errors("/load_lora_adapter", payload, timeout, urls)
        field = self.capabilities.lora_tensors_field
        if field is None:
            raise UnsupportedByServerError(
                "This version of SGLang takes LoRA adapters from files only; save the "
                "adapter where the servers can read it, and give its path."
            )
        per_rank = field.endswith("named_tensors")
        payload[field] = [tensors] * self.capabilities.tp_size if per_rank else tensors
        payload["config_dict"] = dict(config or {})
        route = "/load_lora_adapter_from_tensors"
        return await self._errors(route, payload, timeout, urls)

    async def unload_lora_adapter(
        self, name: str, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> Errors:
        """Drops an adapter on servers; returns each server's error.

        A server drops it after its last request, and loads or drops no other adapter
        before: forever, while generation is paused.
        """
        return await self._errors("/unload_lora_adapter", {"lora_name": name}, timeout)


def _is_silence(error: SGLangError) -> bool:
    """Returns whether a server has not answered at all."""
    unavailable = isinstance(error, ServerUnavailableError) and error.status is None
    return unavailable or isinstance(error, ServerTimeoutError)


def _loads(answer: Any) -> list[dict[str, Any]]:
    """Returns the load of each data-parallel rank of a server."""
    # /v1/loads returns a mapping with the list, /get_load the list.
    return list(answer.get("loads", []) if isinstance(answer, dict) else answer)


def _cache_usage(answer: Any) -> float:
    loads = _loads(answer)
    usages = [float(load["token_usage"]) for load in loads if "token_usage" in load]
    if not usages or len(usages) < len(loads):
        raise UnsupportedByServerError(
            "This version of SGLang does not report the used share of its KV cache; "
            "read engine.stats() for its requests instead."
        )
    return sum(usages) / len(usages)


def _load(answer: Any) -> tuple[int, int]:
    # /v1/loads: {"num_running_reqs": ...}; /get_load: {"num_reqs": all,
    # "num_waiting_reqs": queued}.
    running = waiting = 0
    for load in _loads(answer):
        queued = int(load.get("num_waiting_reqs", 0))
        every = int(load.get("num_reqs", 0))
        running += int(load.get("num_running_reqs", every - queued))
        waiting += queued
    return max(running, 0), waiting
