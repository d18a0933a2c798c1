"""Control calls: to every server directly, never through a router.

One method for each verb that SGLang has. A call succeeds only if every server says so;
otherwise the error tells which one failed and how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torchrl_sglang.backends.client.capabilities import adapters_in, start_id
from torchrl_sglang.backends.client.http import HttpClient
from torchrl_sglang.errors import (
    RequestRefusedError,
    ServerUnavailableError,
    SGLangError,
    UnsupportedByServerError,
)
from torchrl_sglang.types import PauseMode, ServerCapabilities

__all__ = ["ControlPlane"]

CONTROL_TIMEOUT_SECONDS = 60.0
"""Default budget for one control call."""


class Servers(Protocol):
    """Which servers there are."""

    @property
    def urls(self) -> Sequence[str]:
        """Servers that run, in the order of their ranks."""

    @property
    def membership_epoch(self) -> int:
        """Grows whenever a server joins."""

    @property
    def asleep(self) -> Collection[str]:
        """What of the servers' memory is released; nothing may be computed then."""


@dataclass
class Pausing:
    """Whether generation is paused, as far as this engine object knows."""

    paused: bool = False


class ControlPlane:
    """Sends control calls to a set of servers. Used from the background loop only.

    Args:
        http: connections.
        servers: which servers there are.
        capabilities: what they can do; the same for all of them.
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

    async def _all(
        self,
        method: Literal["GET", "POST"],
        path: str,
        payload: Any = None,
        *,
        timeout: float,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        async def one(url: str) -> Any:
            answer = await self._http.request(
                method, url + path, payload, timeout=timeout
            )
            body = answer.raise_for_status().body
            if not body.lstrip().startswith((b"{", b"[")):
                return None
            content = answer.json()
            # Older versions answer 200 and say in the body that they failed.
            if isinstance(content, dict) and content.get("success") is False:
                raise RequestRefusedError(
                    f"{url}{path} refused: {content.get('message', content)}"
                )
            return content

        targets = self.urls if urls is None else urls
        if not targets:
            raise ServerUnavailableError(
                f"No server of the engine runs, so {path} went to none."
            )
        outcomes = await asyncio.gather(
            *(one(url) for url in targets), return_exceptions=True
        )
        failures = [each for each in outcomes if isinstance(each, BaseException)]
        if failures:
            # A refusal says that nothing was done; it must not hide a failure after
            # which that is not known.
            failures.sort(key=lambda each: isinstance(each, RequestRefusedError))
            failure = failures[0]
            if isinstance(failure, SGLangError):
                partly = len(failures) < len(outcomes)
                raise failure.replace(partly=partly) from failure.__cause__
            raise failure
        return outcomes

    async def healthy(self, *, timeout: float = 10.0) -> bool:
        """Returns whether every server answers; never raises for one that does not."""
        try:
            await self._all("GET", "/health", timeout=timeout)
        except SGLangError:
            return False
        return True

    async def weight_versions(
        self, *, timeout: float = 10.0, urls: Sequence[str] | None = None
    ) -> list[str]:
        """Returns the weight version that each server reports."""
        answers = await self._all("GET", "/model_info", timeout=timeout, urls=urls)
        return [str(answer.get("weight_version") or "default") for answer in answers]

    async def start_id(self, url: str, *, timeout: float = 10.0) -> str:
        """Returns which start of a server this is; empty where it does not tell."""
        (answer,) = await self._all(
            "GET", self.capabilities.info_route, timeout=timeout, urls=[url]
        )
        return start_id(answer)

    async def schedulers_answer(
        self, *, timeout: float
    ) -> dict[str, SGLangError | None]:
        """Has every scheduler do something cheap; returns each one's error, or None.

        Other questions are answered by a process in front of it, which is well when
        the scheduler hangs. A refusal is an answer.
        """
        outcomes = await self._each("/flush_cache", None, timeout, None)
        return {
            url: None if isinstance(error, RequestRefusedError) else error
            for url, error in outcomes.items()
        }

    async def running_requests(self, *, timeout: float = 10.0) -> int:
        """Returns how many requests are being computed on all servers together."""
        return sum(running for running, _ in await self.loads(timeout=timeout))

    async def loads(
        self, *, timeout: float = 10.0, urls: Sequence[str] | None = None
    ) -> list[tuple[int, int]]:
        """Returns how many requests each server computes and has waiting."""
        answers = await self._all(
            "GET", self.capabilities.load_route, timeout=timeout, urls=urls
        )
        return [_load(answer) for answer in answers]

    async def cache_usages(self, *, timeout: float = 10.0) -> list[float]:
        """Returns how much of each server's KV cache is in use, from 0 to 1.

        Raises:
            UnsupportedByServerError: if a server does not tell.
        """
        answers = await self._all("GET", self.capabilities.load_route, timeout=timeout)
        return [_cache_usage(answer) for answer in answers]

    async def start_profile(
        self, options: Mapping[str, Any], *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Starts PyTorch's profiler in every server.

        Args:
            options: for SGLang's ``/start_profile``, such as ``output_dir`` and
                ``num_steps``.
            timeout: budget, in seconds.
        """
        await self._all("POST", "/start_profile", dict(options), timeout=timeout)

    async def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Stops it; the servers write their traces."""
        await self._all("POST", "/stop_profile", {}, timeout=timeout)

    async def pause(
        self, mode: PauseMode, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Stops generation.

        A scheduler takes control calls in the order in which they come, between two
        steps, so every later call finds no step running. How many requests run must
        not be asked meanwhile: some versions answer with the last value before the
        pause until generation goes on.
        """
        self.pausing.paused = True
        await self._all("POST", "/pause_generation", {"mode": mode}, timeout=timeout)

    async def abort_all(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Ends every request, of all users; later calls find none of them."""
        await self._all("POST", "/abort_request", {"abort_all": True}, timeout=timeout)

    async def resume(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> None:
        """Lets generation go on; if memory is released, waking it up will do so."""
        if self._servers.asleep:
            return
        await self._all("POST", "/continue_generation", {}, timeout=timeout)
        self.pausing.paused = False

    async def release_memory_occupation(
        self, tags: Collection[str], *, urls: Sequence[str], timeout: float
    ) -> None:
        """Has servers give memory back to the device.

        A server must be idle and paused, and must hold this memory: it does not survive
        the call otherwise.
        """
        await self._all(
            "POST",
            "/release_memory_occupation",
            {"tags": sorted(tags)},
            timeout=timeout,
            urls=urls,
        )

    async def resume_memory_occupation(
        self, tags: Collection[str], *, urls: Sequence[str], timeout: float
    ) -> None:
        """Has servers take memory that they gave back, which holds nothing then.

        A server does not survive the call where it did not give this memory back.
        """
        await self._all(
            "POST",
            "/resume_memory_occupation",
            {"tags": sorted(tags)},
            timeout=timeout,
            urls=urls,
        )

    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_SECONDS) -> bool:
        """Empties the prefix caches; returns False if a server is too busy to do so."""
        try:
            await self._all("POST", "/flush_cache", timeout=timeout)
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
        """Has every server join a process group; ranks follow the order of servers.

        Rank 0 is the sender. Server ``i`` has ranks ``1 + i * tp_size`` and on.
        """
        ranks = self.capabilities.tp_size * self.capabilities.pp_size

        async def one(index: int, url: str) -> None:
            payload = {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": 1 + index * ranks,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            }
            await self._all(
                "POST",
                "/init_weights_update_group",
                payload,
                timeout=timeout,
                urls=[url],
            )

        await asyncio.gather(*(one(i, url) for i, url in enumerate(self.urls)))

    async def destroy_weights_update_group(
        self, group_name: str, *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> None:
        """Has every server leave a process group."""
        await self._all(
            "POST",
            "/destroy_weights_update_group",
            {"group_name": group_name},
            timeout=timeout,
        )

    async def begin_weight_update(
        self,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Opens an update session, where the servers have such sessions."""
        if self.capabilities.needs_update_session:
            await self._all(
                "POST", "/begin_weight_update", {}, timeout=timeout, urls=urls
            )

    async def begin_weight_update_on_each(
        self, urls: Sequence[str], *, timeout: float = CONTROL_TIMEOUT_SECONDS
    ) -> dict[str, SGLangError | None]:
        """Opens update sessions; returns each server's error, or None."""
        if not self.capabilities.needs_update_session:
            return {}
        return await self._each("/begin_weight_update", {}, timeout, urls)

    async def end_weight_update(
        self,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> None:
        """Closes the update session, where the servers have such sessions."""
        if self.capabilities.needs_update_session:
            await self._all(
                "POST", "/end_weight_update", {}, timeout=timeout, urls=urls
            )

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
            dtypes: their types, like ``"bfloat16"``.
            shapes: their shapes.
            group_name: a group that the servers have joined.
            load_format: ``"flattened_bucket"`` for one broadcast of them all, ``None``
                for one of each.
            weight_version: version to report from now on; given with the last bucket.
            timeout: budget, in seconds.
            urls: the servers; by default every one.
        """
        payload = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
            # An update that flushes while requests are queued kills some versions.
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": weight_version,
        }
        await self._all(
            "POST",
            "/update_weights_from_distributed",
            payload,
            timeout=timeout,
            urls=urls,
        )

    async def get_weights_by_name(
        self,
        name: str,
        rows: int,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> list[Any]:
        """Returns the first rows of a parameter as each server holds it.

        Few architectures can, Llama's family among them. Of a tensor-parallel server it
        is the first rank's part.

        Args:
            name: of a parameter, as in a checkpoint.
            rows: how many rows of it, or elements of a vector.
            timeout: budget, in seconds.
            urls: the servers; by default every one.

        Raises:
            RequestRefusedError: if a server cannot, or has no such parameter.
        """
        payload = {"name": name, "truncate_size": rows}
        return await self._all(
            "POST", "/get_weights_by_name", payload, timeout=timeout, urls=urls
        )

    async def prompt_log_probs(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        cache_key: str,
        adapter: str | None = None,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
    ) -> list[list[list[float]]]:
        """Has every server score prompts, whatever a router would choose.

        Args:
            prompts: token ids.
            cache_key: version of the weights, so that no older cache is used.
            adapter: what the servers call the LoRA adapter to score with.
            timeout: budget, in seconds.

        Returns:
            For each server and prompt, the log-probability of each token but the first.
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
        answers = await self._all("POST", "/generate", payload, timeout=timeout)
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
        """Has every server load a checkpoint, whatever it held before.

        Args:
            path: folder or hub name, as the servers see it.
            load_format: like ``"safetensors"``; by default what each was started with,
                which cannot read files where it is ``"dummy"``.
            weight_version: version to report from now on.
            timeout: budget, in seconds.
            urls: the servers; by default every one.
        """
        payload = {
            "model_path": path,
            "load_format": load_format,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": weight_version,
        }
        await self._all(
            "POST", "/update_weights_from_disk", payload, timeout=timeout, urls=urls
        )

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
            entries: for each tensor-parallel rank, a base64 text of the pickle of a
                list of (name, tensor), or of a flattened bucket.
            load_format: ``"flattened_bucket"`` for one of those.
            weight_version: version to report from now on; given with the last one.
            timeout: budget, in seconds.
            urls: the servers; by default every one.
        """
        payload = {
            "serialized_named_tensors": list(entries),
            "load_format": load_format,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": weight_version,
        }
        await self._all(
            "POST", "/update_weights_from_tensor", payload, timeout=timeout, urls=urls
        )

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        *,
        pinned: bool = False,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> dict[str, SGLangError | None]:
        """Has servers read a LoRA adapter; returns each one's error, or None.

        Args:
            name: what to call it; no adapter that they hold has this name.
            path: folder or hub name, as the servers see it.
            pinned: keep it among those that batches are computed with.
            timeout: budget, in seconds.
            urls: the servers; by default every one.
        """
        payload = {"lora_name": name, "lora_path": path, "pinned": pinned}
        return await self._each("/load_lora_adapter", payload, timeout, urls)

    async def load_lora_adapter_from_tensors(
        self,
        name: str,
        tensors: str,
        config: Mapping[str, Any],
        *,
        pinned: bool = False,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> dict[str, SGLangError | None]:
        """Sends servers a LoRA adapter; returns each one's error, or None.

        Args:
            name: as in :meth:`load_lora_adapter`.
            tensors: the adapter's tensors, in text; see
                :func:`.adapter_payload.to_text`.
            config: the content of PEFT's ``adapter_config.json``.
            pinned: as in :meth:`load_lora_adapter`.
            timeout: as in :meth:`load_lora_adapter`.
            urls: as in :meth:`load_lora_adapter`.

        Raises:
            UnsupportedByServerError: if the servers read adapters from files only.
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
        return await self._each(
            "/load_lora_adapter_from_tensors", payload, timeout, urls
        )

    async def unload_lora_adapter(
        self,
        name: str,
        *,
        timeout: float = CONTROL_TIMEOUT_SECONDS,
        urls: Sequence[str] | None = None,
    ) -> dict[str, SGLangError | None]:
        """Has servers drop a LoRA adapter; returns each one's error, or None.

        A server takes no new requests for it at once, and drops it after the last one
        that runs. Until then it neither loads nor drops another adapter, and while
        generation is paused that is for ever: see to it that none runs.
        """
        payload = {"lora_name": name}
        return await self._each("/unload_lora_adapter", payload, timeout, urls)

    async def adapters(
        self, *, timeout: float = 10.0, urls: Sequence[str] | None = None
    ) -> list[tuple[str, ...]]:
        """Returns the LoRA adapters that each server holds, as it calls them."""
        answers = await self._all("GET", "/v1/models", timeout=timeout, urls=urls)
        return [adapters_in(answer) for answer in answers]

    async def _each(
        self, path: str, payload: Any, timeout: float, urls: Sequence[str] | None
    ) -> dict[str, SGLangError | None]:
        async def one(url: str) -> SGLangError | None:
            try:
                await self._all("POST", path, payload, timeout=timeout, urls=[url])
            except SGLangError as error:
                return error
            return None

        targets = self.urls if urls is None else urls
        outcomes = await asyncio.gather(*(one(url) for url in targets))
        return dict(zip(targets, outcomes, strict=True))


def _loads(answer: Any) -> list[dict[str, Any]]:
    """Returns what a server says about each of its data-parallel ranks."""
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
    loads = _loads(answer)
    running = waiting = 0
    for load in loads:
        queued = int(load.get("num_waiting_reqs", 0))
        if "num_running_reqs" in load:
            running += int(load["num_running_reqs"])
        else:
            running += int(load.get("num_reqs", 0)) - queued
        waiting += queued
    return max(running, 0), waiting
