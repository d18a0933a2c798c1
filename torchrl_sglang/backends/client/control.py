"""Control calls: one method per verb of SGLang, sent to every server directly.

A call succeeds only if every server accepts it; otherwise the error names the server
that failed. The router is never asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torchrl_sglang.backends.client.capabilities import adapters_in, start_id
from torchrl_sglang.backends.client.http import HttpClient, Method
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import PauseMode, ServerCapabilities

__all__ = ["ControlPlane"]

CONTROL_TIMEOUT_SECONDS = 60.0
"""Default timeout of one control call."""

QUERY_TIMEOUT_SECONDS = 10.0

Errors = dict[str, SGLangError | None]
"""Each server's error, or ``None`` where the call succeeded."""


class Servers(Protocol):
    """The servers that control calls go to."""

    @property
    def urls(self) -> Sequence[str]:
        """Servers that run, in the order of their ranks."""

    @property
    def membership_epoch(self) -> int:
        """Grows whenever a server joins."""

    @property
    def asleep(self) -> Collection[str]:
        """Tags of the released memory; nothing may be computed while there are any."""


@dataclass
class Pausing:
    """Whether this engine object paused generation."""

    paused: bool = False


class ControlPlane:
    """Control calls to a set of servers with equal capabilities.

    To be awaited on the background loop. Every method takes a timeout in seconds;
    ``urls`` restricts a call to some of the servers.
    """

    def __init__(
        self, http: HttpClient, servers: Servers, capabilities: ServerCapabilities
    ) -> None:
        self._http = http
        self._servers = servers
        self.pausing = Pausing()
        self.capabilities = capabilities

    @property
    def urls(self) -> Sequence[str]:
        """Servers that run, in the order of their ranks."""
        return self._servers.urls

    @property
    def membership_epoch(self) -> int:
        """Grows whenever a server joins; a process group holds for one value."""
        return self._servers.membership_epoch

    async def _one(
        self, method: Method, url: str, payload: Any, timeout: float
    ) -> Any | SGLangError:
        """Returns the content of a server's response, or its error."""
        try:
            response = await self._http.request(method, url, payload, timeout=timeout)
            body = response.raise_for_status().body
            if not body.lstrip().startswith((b"{", b"[")):
                return None
            content = response.json()
        except SGLangError as error:
            return error
        # Older versions answer 200 and say in the body that they failed.
        if isinstance(content, dict) and content.get("success") is False:
            return RequestRefusedError(
                f"{url} refused: {content.get('message', content)}"
            )
        return content

    async def _each(
        self,
        method: Method,
        path: str,
        payload: Any,
        timeout: float,
        urls: Sequence[str] | None,
    ) -> dict[str, Any | SGLangError]:
        """Returns each server's response, or its error."""
        targets = self.urls if urls is None else urls
        outcomes = await asyncio.gather(
            *(self._one(method, url + path, payload, timeout) for url in targets)
        )
        return dict(zip(targets, outcomes, strict=True))

    async def _all(
        self,
        method: Method,
        path: str,
        payload: Any = None,
        *,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        """Returns the servers' responses; raises the worst error if one failed."""
        outcomes = list(
            (await self._each(method, path, payload, timeout, urls)).values()
        )
        if not outcomes:
            raise ServerUnavailableError(
                f"No server of the engine runs, so {path} was not sent."
            )
        failures = [error for error in outcomes if isinstance(error, SGLangError)]
        if failures:
            # A refusal changed nothing on its server, so any other failure is worse.
            failures.sort(key=lambda error: isinstance(error, RequestRefusedError))
            partly = len(failures) < len(outcomes)
            raise failures[0].replace(partly=partly) from failures[0].__cause__
        return outcomes

    async def _post(
        self,
        path: str,
        payload: Any,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        return await self._all("POST", path, payload, timeout=timeout, urls=urls)

    async def _get(
        self, path: str, timeout: float, urls: Sequence[str] | None = None
    ) -> list[Any]:
        return await self._all("GET", path, timeout=timeout, urls=urls)

    async def _post_to_each(
        self, path: str, payload: Any, timeout: float, urls: Sequence[str] | None
    ) -> Errors:
        outcomes = await self._each("POST", path, payload, timeout, urls)
        return {
            url: outcome if isinstance(outcome, SGLangError) else None
            for url, outcome in outcomes.items()
        }

    async def healthy(self, *, timeout: float = QUERY_TIMEOUT_SECONDS) -> bool:
        """Returns whether every server responds; does not raise."""
        try:
            await self._get("/health", timeout)
        except SGLangError:
            return False
        return True

    async def weight_versions(
        self,
        *,
        timeout: float = QUERY_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> list[str]:
        """Returns the weight version that each server reports."""
        answers = await self._get("/model_info", timeout, urls)
        return [str(answer.get("weight_version") or "default") for answer in answers]

    async def start_id(
        self, url: str, *, timeout: float = QUERY_TIMEOUT_SECONDS
    ) -> str:
        """Returns an identifier of a server's latest start; may be empty."""
        (answer,) = await self._get(self.capabilities.info_route, timeout, [url])
        return start_id(answer)

    async def schedulers_answer(self, *, timeout: float) -> Errors:
        """Checks that every scheduler works, by a cheap task.

        Most other questions are answered by a process in front of it, even while the
        scheduler hangs. A refusal is an answer.
        """
        errors = await self._post_to_each("/flush_cache", None, timeout, None)
        return {
            url: None if isinstance(error, RequestRefusedError) else error
            for url, error in errors.items()
        }

    async def running_requests(self, *, timeout: float = QUERY_TIMEOUT_SECONDS) -> int:
        """Returns how many requests run on all servers together."""
        return sum(running for running, _ in await self.loads(timeout=timeout))

    async def loads(
        self,
        *,
        timeout: float = QUERY_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> list[tuple[int, int]]:
        """Returns the numbers of running and of queued requests of each server."""
        answers = await self._get(self.capabilities.load_route, timeout, urls)
        return [_load(answer) for answer in answers]

    async def cache_usages(
        self, *, timeout: float = QUERY_TIMEOUT_SECONDS
    ) -> list[float]:
        """Returns how much of each server's KV cache is in use, from 0 to 1."""
        answers = await self._get(self.capabilities.load_route, timeout)
        return [_cache_usage(answer) for answer in answers]

    async def start_profile(
        self, options: Mapping[str, Any], *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Starts PyTorch's profiler in every server."""
        await self._post("/start_profile", dict(options), timeout)

    async def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Stops the profiler; the servers write their traces."""
        await self._post("/stop_profile", {}, timeout)

    async def pause(
        self, mode: PauseMode, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Pauses generation.

        A scheduler handles control calls in order, between two steps, so no step runs
        during a later call. Do not ask for loads meanwhile: some versions answer with
        the last value before the pause.
        """
        self.pausing.paused = True
        await self._post("/pause_generation", {"mode": mode}, timeout)

    async def abort_all(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Aborts every request, of all users."""
        await self._post("/abort_request", {"abort_all": True}, timeout)

    async def resume(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Resumes generation, unless servers are asleep: waking them up does so."""
        if self._servers.asleep:
            return
        await self._post("/continue_generation", {}, timeout)
        self.pausing.paused = False

    async def release_memory_occupation(
        self, tags: Collection[str], *, urls: Sequence[str], timeout: float
    ) -> None:
        """Releases GPU memory; kills a server that is not idle, paused and awake."""
        payload = {"tags": sorted(tags)}
        await self._post("/release_memory_occupation", payload, timeout, urls)

    async def resume_memory_occupation(
        self, tags: Collection[str], *, urls: Sequence[str], timeout: float
    ) -> None:
        """Allocates released memory again; kills a server that did not release it."""
        payload = {"tags": sorted(tags)}
        await self._post("/resume_memory_occupation", payload, timeout, urls)

    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Empties the prefix caches; returns False if a server is too busy to."""
        try:
            await self._post("/flush_cache", None, timeout)
        except RequestRefusedError:
            return False
        return True

    async def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Has every server join a process group whose rank 0 is the sender.

        Server ``i`` has ranks ``1 + i * tp_size * pp_size`` and on. Raises as soon as
        one server fails, as the others wait for it.
        """
        ranks = self.capabilities.tp_size * self.capabilities.pp_size
        payload = {
            "master_address": master_address,
            "master_port": master_port,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await asyncio.gather(
            *(
                self._post(
                    "/init_weights_update_group",
                    {**payload, "rank_offset": 1 + index * ranks},
                    timeout,
                    [url],
                )
                for index, url in enumerate(self.urls)
            )
        )

    async def destroy_weights_update_group(
        self, group_name: str, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Has every server leave a process group."""
        payload = {"group_name": group_name}
        await self._post("/destroy_weights_update_group", payload, timeout)

    async def begin_weight_update(
        self,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Opens an update session, on servers that have such sessions."""
        if self.capabilities.needs_update_session:
            await self._post("/begin_weight_update", {}, timeout, urls)

    async def begin_weight_update_on_each(
        self, urls: Sequence[str], *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> Errors:
        """Opens update sessions; returns each server's error."""
        if not self.capabilities.needs_update_session:
            return {}
        return await self._post_to_each("/begin_weight_update", {}, timeout, urls)

    async def end_weight_update(
        self,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Closes the update session, on servers that have such sessions."""
        if self.capabilities.needs_update_session:
            await self._post("/end_weight_update", {}, timeout, urls)

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: Literal["flattened_bucket"] | None,
        weight_version: str | None,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Has servers receive one bucket over a process group.

        Args:
            names: parameters, in the order in which they lie in the bucket.
            dtypes: like ``"bfloat16"``.
            shapes: likewise.
            group_name: a group that the servers have joined.
            load_format: ``"flattened_bucket"`` for one broadcast of all tensors,
                ``None`` for one broadcast each.
            weight_version: given with the last bucket; reported from then on.
            timeout: in seconds.
            urls: the servers; by default all.
        """
        payload = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            **_loading(load_format, weight_version),
        }
        path = "/update_weights_from_distributed"
        await self._post(path, payload, timeout, urls)

    async def get_weights_by_name(
        self,
        name: str,
        rows: int,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        """Returns the first rows of a parameter as each server's first rank holds it.

        Refused for most architectures; Llama's family has it.
        """
        payload = {"name": name, "truncate_size": rows}
        return await self._post("/get_weights_by_name", payload, timeout, urls)

    async def prompt_log_probs(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache_key: str,
        adapter: str | None = None,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
    ) -> list[list[list[float]]]:
        """Has every server score prompts, past any router.

        Args:
            prompts: token ids.
            cache_key: weight version, so that no older prefix cache is used.
            adapter: served name of the LoRA adapter to score with.
            timeout: in seconds.

        Returns:
            Per server and prompt, the log-probability of each token but the first.
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
        answers = await self._post("/generate", payload, timeout)
        return [
            [
                [entry[0] for entry in item["meta_info"]["input_token_logprobs"][1:]]
                for item in answer
            ]
            for answer in answers
        ]

    async def update_weights_from_disk(
        self,
        path: str,
        *,
        load_format: str | None = None,
        weight_version: str | None,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Has servers load a checkpoint from a folder or hub name that they can read.

        ``load_format`` is by default the one of their start, which reads no files
        where it is ``"dummy"``.
        """
        payload = {"model_path": path, **_loading(load_format, weight_version)}
        await self._post("/update_weights_from_disk", payload, timeout, urls)

    async def update_weights_from_tensor(
        self,
        entries: Sequence[str],
        *,
        load_format: Literal["flattened_bucket"] | None = None,
        weight_version: str | None,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Has servers load tensors that they open, or that the request holds.

        Args:
            entries: for each tensor-parallel rank, the base64 of a pickled list of
                (name, tensor), or of a flattened bucket.
            load_format: ``"flattened_bucket"`` for a flattened bucket.
            weight_version: given with the last bucket; reported from then on.
            timeout: in seconds.
            urls: the servers; by default all.
        """
        payload = {
            "serialized_named_tensors": list(entries),
            **_loading(load_format, weight_version),
        }
        await self._post("/update_weights_from_tensor", payload, timeout, urls)

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        *,
        pinned: bool = False,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> Errors:
        """Has servers read an adapter under a new name; returns each one's error."""
        payload = {"lora_name": name, "lora_path": path, "pinned": pinned}
        return await self._post_to_each("/load_lora_adapter", payload, timeout, urls)

    async def load_lora_adapter_from_tensors(
        self,
        name: str,
        tensors: str,
        config: Mapping[str, Any],
        *,
        pinned: bool = False,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> Errors:
        """Sends servers an adapter as text; returns each one's error.

        ``tensors`` is encoded by :func:`.payload.to_text`, ``config`` is the content of
        PEFT's ``adapter_config.json``.
        """
        field = self.capabilities.lora_tensors_field
        if field is None:
            raise UnsupportedByServerError(
                "This version of SGLang takes LoRA adapters from files only; save the "
                "adapter where the servers can read it, and give its path."
            )
        payload = {
            "lora_name": name,
            "config_dict": dict(config),
            field: [tensors] * self.capabilities.tp_size
            if field.endswith("named_tensors")
            else tensors,
            "pinned": pinned,
        }
        path = "/load_lora_adapter_from_tensors"
        return await self._post_to_each(path, payload, timeout, urls)

    async def unload_lora_adapter(
        self,
        name: str,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> Errors:
        """Has servers drop an adapter; returns each one's error.

        A server drops it after the last request that uses it, and loads or drops no
        other adapter until then: for ever, while generation is paused.
        """
        payload = {"lora_name": name}
        return await self._post_to_each("/unload_lora_adapter", payload, timeout, urls)

    async def adapters(
        self,
        *,
        timeout: float = QUERY_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> list[tuple[str, ...]]:
        """Returns the served names of the LoRA adapters of each server."""
        answers = await self._get("/v1/models", timeout, urls)
        return [adapters_in(answer) for answer in answers]


def _loading(load_format: str | None, weight_version: str | None) -> dict[str, Any]:
    """Returns the fields that all weight updates share."""
    return {
        "load_format": load_format,
        # An update that flushes while requests are queued kills some versions.
        "flush_cache": False,
        "abort_all_requests": False,
        "weight_version": weight_version,
    }


def _loads(answer: Any) -> list[dict[str, Any]]:
    """Returns the load of each data-parallel rank of a server."""
    # /v1/loads answers with a mapping that holds the list, /get_load with the list.
    return list(answer.get("loads", []) if isinstance(answer, dict) else answer)


def _cache_usage(answer: Any) -> float:
    loads = _loads(answer)
    usages = [float(load["token_usage"]) for load in loads if "token_usage" in load]
    if not usages or len(usages) < len(loads):
        raise UnsupportedByServerError(
            "This version of SGLang does not tell how much of its KV cache is in use; "
            "read engine.stats() for its requests instead."
        )
    return sum(usages) / len(usages)


def _load(answer: Any) -> tuple[int, int]:
    # /v1/loads: {"num_running_reqs": ...}; /get_load: {"num_reqs": all,
    # "num_waiting_reqs": queued}.
    running = waiting = 0
    for load in _loads(answer):
        queued = int(load.get("num_waiting_reqs", 0))
        if "num_running_reqs" in load:
            running += int(load["num_running_reqs"])
        else:
            running += int(load.get("num_reqs", 0)) - queued
        waiting += queued
    return max(running, 0), waiting
