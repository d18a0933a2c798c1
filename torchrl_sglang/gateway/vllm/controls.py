"""vLLM's calls that control an engine: pause, weights, sleep, adapters, questions."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, NoReturn

from torchrl_sglang.backends.client.control import CONTROL_TIMEOUT_SECONDS
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.errors import (
    ConfigurationError,
    GatewayError,
    ServerTimeoutError,
    WeightSyncStateError,
)
from torchrl_sglang.gateway.dialects.base import Control
from torchrl_sglang.gateway.vllm.update import WeightUpdates
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.support.event_loop import run_sync

PAUSE_MODES = ("abort", "wait", "keep")
LEVELS = ("0", "1", "2")

UNLIMITED = 2**31 - 1
"""``max_loras`` of servers that load any number of adapters."""

MOST_CALLS = 256
"""Calls at once; some wait for running requests, or for a trainer."""

POLL_SECONDS = 0.02
"""Interval of questions for running requests, while a pause waits for them."""

_MISSING = {
    "/start_draft_weight_update": "SGLang updates a draft model with the model",
    "/weight_checker": "SGLang reports no checksums; SGLangWeightSyncScheme has verify",
    "/collective_rpc": "SGLang's workers run no functions of clients",
    "/update_weight_version": "versions are counted; finish_weight_update names one",
    "/release_kv_cache_memory": "use /sleep?level=1",
}
"""vLLM's calls that SGLang cannot serve -> reason or alternative."""

Fields = Mapping[str, Any]


class Controls:
    """Calls that control an engine, each in a thread of its own."""

    def __init__(self, engine: RLSGLangEngine, *, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._updates = WeightUpdates(engine, timeout=timeout)
        posts: dict[str, Callable[[Fields, Fields], Any]] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/init_weight_transfer_engine": self._init_transfer,
            "/start_weight_update": self._start_update,
            "/update_weights": self._update_weights,
            "/finish_weight_update": self._finish_update,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
            **{path: partial(_refuse, path) for path in _MISSING},
        }
        gets = {
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_info": self._weight_info,
            "/get_world_size": self._world_size,
            "/server_info": self._server_info,
            "/version": self._version,
        }
        threads = BlockingCalls("torchrl_sglang-vllm-control", MOST_CALLS)
        weakref.finalize(self, threads.close)
        self.routes = (
            *(_route(threads, "POST", path, call) for path, call in posts.items()),
            *(_route(threads, "GET", path, call) for path, call in gets.items()),
        )

    # Pauses.

    def _pause(self, query: Fields, body: Fields) -> dict[str, str]:
        mode = query.get("mode", "abort")
        if _flag(query, "wait_for_inflight_requests"):
            mode = "wait"
        if mode not in PAUSE_MODES:
            raise ConfigurationError(
                f"mode: Input should be 'abort', 'wait' or 'keep', got {mode!r}."
            )
        self._hold(mode)
        if mode != "keep" and _flag(query, "clear_cache", default=True):
            self._engine.flush_cache()
        return {"status": "paused"}

    def _hold(self, mode: str) -> None:
        """Pauses the servers; running requests end, or go on exactly afterwards."""
        engine = self._engine
        with engine.weight_update() as update:
            update.holds_requests()
            if mode == "keep" and not engine.control.paused:
                update.aborts_requests()
                engine.interrupt_requests(timeout=CONTROL_TIMEOUT_SECONDS)
            elif mode == "abort":
                self._abort()
            if mode != "keep" and not engine.control.paused:
                self._drain()
            run_sync(engine.control.pause("retract"))
        self._updates.stays_paused = True

    def _abort(self, request_ids: Any = None) -> int:
        abort = getattr(self._engine, "abort", None)
        if abort is None:
            raise ConfigurationError("This gateway's engine aborts no requests.")
        return int(abort(request_ids))

    def _drain(self) -> None:
        """Waits until no request runs."""
        deadline = time.monotonic() + self._timeout
        while any(map(any, run_sync(self._engine.control.loads()))):
            if time.monotonic() > deadline:
                raise ServerTimeoutError(
                    f"Requests still run after {self._timeout:g} s, and were not "
                    f"paused; use mode=keep or mode=abort."
                )
            time.sleep(POLL_SECONDS)

    def _resume(self, query: Fields, body: Fields) -> dict[str, str]:
        engine = self._engine
        with engine.weight_update() as update:
            if update.was_inconsistent:
                raise WeightSyncStateError(
                    "The servers may hold a mix of old and new weights, and generate "
                    "again after a whole weight update."
                )
            run_sync(engine.control.resume())
        self._updates.stays_paused = False
        return {"status": "resumed"}

    def _is_paused(self, query: Fields, body: Fields) -> dict[str, bool]:
        return {"is_paused": self._engine.control.paused}

    def _abort_requests(self, query: Fields, body: Fields) -> dict[str, Any]:
        ids = body.get("request_ids") or None
        if ids is not None and not isinstance(ids, list):
            raise ConfigurationError(f"request_ids={ids!r:.200} must be a list.")
        return {"status": "aborted", "aborted": self._abort(ids)}

    def _reset_prefix_cache(self, query: Fields, body: Fields) -> dict[str, Any]:
        if not self._engine.flush_cache():
            raise GatewayError(
                "The prefix cache is in use: requests run; pause first.", status=503
            )
        return {}

    # Weights.

    def _init_transfer(self, query: Fields, body: Fields) -> dict[str, str]:
        self._updates.join(_needed(body, "init_info"))
        return {"message": "Weight transfer initialized"}

    def _start_update(self, query: Fields, body: Fields) -> dict[str, str]:
        if body.get("is_checkpoint_format", True) is not True:
            raise ConfigurationError(
                "is_checkpoint_format=false is not supported: SGLang loads weights "
                "under the names of a checkpoint."
            )
        self._updates.start()
        return {"message": "Weight update started"}

    def _update_weights(self, query: Fields, body: Fields) -> dict[str, str]:
        self._updates.receive(_needed(body, "update_info"))
        return {"message": "Weights updated"}

    def _finish_update(self, query: Fields, body: Fields) -> dict[str, str]:
        self._updates.finish(body.get("weight_version"))
        return {"message": "Weight update finished"}

    def _weight_info(self, query: Fields, body: Fields) -> dict[str, Any]:
        version = self._engine.weight_version
        label = self._updates.labels.get(version, version)
        return {"weight_version": label, "sglang_weight_version": version}

    def _world_size(self, query: Fields, body: Fields) -> dict[str, int]:
        size = self._engine.get_world_size()
        if not _flag(query, "include_dp", default=True):
            size //= self._engine.num_replicas
        return {"world_size": size}

    # Sleep and adapters.

    def _sleep(self, query: Fields, body: Fields) -> dict[str, Any]:
        level, mode = query.get("level", "1"), query.get("mode", "abort")
        if level not in LEVELS or mode not in PAUSE_MODES:
            raise ConfigurationError(
                f"level={level!r} must be 0, 1 or 2, and mode={mode!r} 'abort', 'wait' "
                f"or 'keep'."
            )
        if level == "0":
            self._hold(mode)
            return {}
        if mode == "keep":
            raise ConfigurationError(
                "mode='keep' is not supported: SGLang releases memory when no request "
                "runs; use 'abort' or 'wait'."
            )
        if level == "1" and not self._engine.capabilities.keeps_weights:
            raise ConfigurationError(
                "level=1 keeps the weights on the CPU, for which servers are started "
                "with --enable-memory-saver --enable-weights-cpu-backup; or use "
                "level=2, and send the weights after /wake_up."
            )
        self._engine.sleep(abort_first=mode == "abort", drain_timeout=self._timeout)
        return {}

    def _wake_up(self, query: Fields, body: Fields) -> dict[str, Any]:
        tags = query.getall("tags", None) if hasattr(query, "getall") else None
        if tags is not None:
            # vLLM's name of what level 0 stops.
            tags = [tag for tag in tags if tag != "scheduling"]
        if tags is None or tags:
            self._engine.wake_up(tags)
        if self._engine.asleep:
            return {}
        # It ends every pause; lost weights resume at the end of their update.
        self._updates.stays_paused = False
        with self._engine.weight_update() as update:
            if self._engine.control.paused and not update.was_inconsistent:
                run_sync(self._engine.control.resume())
        return {}

    def _is_sleeping(self, query: Fields, body: Fields) -> dict[str, bool]:
        # A paused scheduler is asleep for vLLM, at level 0.
        return {"is_sleeping": bool(self._engine.asleep or self._updates.stays_paused)}

    def _load_adapter(self, query: Fields, body: Fields) -> str:
        name, path = _needed(body, "lora_name"), _needed(body, "lora_path")
        if name in self._engine.adapters and not body.get("load_inplace"):
            raise ConfigurationError(
                f"The lora adapter '{name}' has already been loaded. If you want to "
                f"load the adapter in place, set 'load_inplace' to True."
            )
        self._engine.load_adapter(name, path=path)
        return f"Success: LoRA adapter '{name}' added successfully."

    def _unload_adapter(self, query: Fields, body: Fields) -> str:
        name = _needed(body, "lora_name")
        if name not in self._engine.adapters:
            raise GatewayError(
                f"The lora adapter '{name}' cannot be found.", status=404
            )
        self._engine.unload_adapter(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    # Questions.

    def _server_info(self, query: Fields, body: Fields) -> dict[str, Any]:
        config = self._config()
        is_json = query.get("config_format", "text") == "json"
        about = {"version": self._engine.capabilities.version}
        return {"vllm_config": config if is_json else str(config), "sglang": about}

    def _config(self) -> dict[str, Any]:
        """Returns vLLM's configuration, as far as SGLang has the same."""
        capabilities, args = self._engine.capabilities, self._engine.capabilities.args
        ranks = capabilities.tp_size * capabilities.pp_size
        lora = {
            "max_lora_rank": args.max_lora_rank or 0,
            "max_loras": args.max_loaded_loras or UNLIMITED,
        }
        return {
            "model_config": {
                "model": self._engine.model_path,
                "dtype": str(capabilities.dtype),
                "max_model_len": capabilities.max_context,
                "quantization": args.quantization,
            },
            "parallel_config": {
                "tensor_parallel_size": capabilities.tp_size,
                "pipeline_parallel_size": capabilities.pp_size,
                # An adapter reaches every server of the engine.
                "data_parallel_size": 1,
                "world_size": ranks,
                "world_size_across_dp": self._engine.get_world_size(),
            },
            "lora_config": lora if capabilities.has_lora else None,
            "weight_transfer_config": {"backend": "nccl"},
        }

    def _version(self, query: Fields, body: Fields) -> dict[str, str]:
        version = self._engine.capabilities.version
        return {"version": metadata.version("torchrl_sglang"), "sglang": version}


def _route(
    threads: BlockingCalls,
    method: str,
    path: str,
    call: Callable[[Fields, Fields], Any],
) -> Control:
    async def run(query: Fields, body: Fields) -> Any:
        return await asyncio.wrap_future(threads.submit(partial(call, query, body)))

    return Control(method=method, path=path, call=run)


def _refuse(path: str, query: Fields, body: Fields) -> NoReturn:
    raise GatewayError(f"{path} is not supported: {_MISSING[path]}.", status=501)


def _flag(query: Fields, name: str, *, default: bool = False) -> bool:
    value = str(query.get(name, default)).lower()
    if value not in ("true", "false", "1", "0"):
        raise ConfigurationError(f"{name}={value!r} must be true or false.")
    return value in ("true", "1")


def _needed(body: Fields, name: str) -> Any:
    if body.get(name) is None:
        raise GatewayError(f"Missing '{name}' in request body", status=400, param=name)
    return body[name]
