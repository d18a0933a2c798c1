"""Calls of TorchRL's engines for SGLang and vLLM, on top of the engine's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn, Self

import torch

from torchrl_sglang.backends import session
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.fleet.weights_state import next_version
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.support.checks import check_count, check_port, check_seconds
from torchrl_sglang.support.event_loop import run_sync
from torchrl_sglang.support.log import torchrl_logger
from torchrl_sglang.types import Completion

WEIGHT_UPDATE_GROUP = "weight_update_group"
"""SGLang's own name for the process group of weight broadcasts."""


IGNORED_VARIABLES: Mapping[str, str] = {
    "TORCHRL_SGLANG_GENERATE_RETRIES": "max_attempts=... of the engine",
    "TORCHRL_SGLANG_GENERATE_RETRY_DELAY": "max_attempts=... of the engine, whose "
    "delays grow by themselves",
    "TORCHRL_SGLANG_PAUSE_GENERATION_MODE": "pause_mode=... of SGLangWeightSyncScheme",
    "TORCHRL_SGLANG_WEIGHT_SYNC_FLUSH_CACHE": "flush_cache=... of "
    "SGLangWeightSyncScheme",
}
"""Environment variable of TorchRL's own classes -> counterpart here."""


@cache
def warn_of_ignored_variables() -> None:
    """Warns, once in a process, of set variables without an effect here."""
    for name in IGNORED_VARIABLES.keys() & os.environ.keys():
        torchrl_logger.warning(
            f"{name}={os.environ[name]} is set, which TorchRL's own SGLang classes "
            f"read and this package does not; give {IGNORED_VARIABLES[name]}."
        )


class TorchRLCalls(RLSGLangEngine):
    """Methods of TorchRL's engines, for code written for them."""

    def generate_batch(
        self,
        prompts: Sequence[str],
        sampling_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Completion]:
        """Continues several texts, like :meth:`generate` with a list of them."""
        return self.generate(list(prompts), sampling_params, **kwargs)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; vLLM's name for :meth:`flush_cache`."""
        return self.flush_cache()

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> Any:
        """Returns the number of all users' requests on each or a given server."""
        loads = run_sync(self.control.loads())
        return _choose([running + queued for running, queued in loads], actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> Any:
        """Returns the used share of each server's KV cache, or of one's, from 0 to 1.

        Raises:
            UnsupportedByServerError: if a server does not report it.
        """
        return _choose(run_sync(self.control.cache_usages()), actor_index)

    def init_weight_update_group(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        *,
        timeout: float = 60.0,
    ) -> None:
        """Makes every server join a process group whose first rank is the caller's.

        For a trainer with its own collectives. It opens the store at the address and
        joins concurrently, in another thread. A
        :class:`~torchrl_sglang.SGLangWeightSyncScheme` does all of this by itself.

        Args:
            master_address: rendezvous address of servers and trainer. Defaults to
                :meth:`get_master_address`.
            master_port: port of the trainer's store; TorchRL's default cannot be known.
            timeout: in seconds.

        Raises:
            ConfigurationError: if there is no port.
            ServerError: if a server does not join.
        """
        if master_port is None:
            raise ConfigurationError(
                "init_weight_update_group needs the master_port of a store that the "
                "trainer has opened. SGLangWeightSyncScheme(engine).create_sender() "
                "opens its own, and needs nothing."
            )
        on_cpu = self.capabilities.args.device == "cpu"
        options: dict[str, Any] = {
            "group_name": WEIGHT_UPDATE_GROUP,
            "master_address": master_address or self.get_master_address(),
            "master_port": check_port("master_port", master_port),
            "world_size": 1 + self.get_world_size(),
            "backend": "gloo" if on_cpu else "nccl",
            "timeout": check_seconds("timeout", timeout),
        }
        with suppress(RequestRefusedError):
            # An earlier trainer may have left a group.
            run_sync(self.control.destroy_weights_update_group(WEIGHT_UPDATE_GROUP))
        run_sync(self.control.init_weights_update_group(**options))

    def update_weights_from_distributed(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        timeout: float = 300.0,
    ) -> str:
        """Makes every server receive a tensor of the trainer's concurrent broadcast.

        It is an update with its own weight version, and the engine must be idle.
        :meth:`.SGLangWeightSender.update_weights` sends all tensors in a single update.

        Args:
            name: name of the parameter.
            dtype: type of the parameter.
            shape: shape of the parameter.
            timeout: in seconds.

        Returns:
            The weight version of the servers' reports from now on.

        Raises:
            WeightSyncStateError: if a request or another update runs, or if an earlier
                update left a mix of weights, which a single tensor cannot repair.
            WeightTransferError: if a server did not receive it. Generation is refused
                until an update of all tensors succeeds.
        """
        tensor = _Announced(name=name, dtype=dtype, shape=torch.Size(shape))
        transfer = _Broadcast(self, check_seconds("timeout", timeout))
        with self.weight_update() as update:
            if update.was_inconsistent:
                raise WeightSyncStateError(
                    f"Servers may hold a mix of weights, which {name!r} alone does not "
                    f"mend; send all of them, "
                    f"SGLangWeightSyncScheme(engine).create_sender()"
                    f".update_weights(model), or call its recover()."
                )
            current = run_sync(self.control.weight_versions())
            version = next_version([*current, self.weight_version, self.newest_version])
            try:
                session.update_weights(
                    self,
                    transfer,
                    tensor,
                    version=version,
                    # The trainer's collective does not wait for running requests.
                    pause_mode="none",
                    held=update,
                )
            except WeightSyncStateError as error:
                raise error.replace(
                    note="SGLangWeightSyncScheme(engine).create_sender()"
                    ".update_weights(model) pauses requests."
                ) from None
        return version

    def update_weights(self, weights: Any) -> NoReturn:
        """Raises :class:`.UnsupportedByServerError`: a sender sends weights."""
        raise UnsupportedByServerError(
            "An engine does not send weights; write "
            "SGLangWeightSyncScheme(engine).create_sender().update_weights(weights)."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Announced:
    """A tensor of the trainer's broadcast."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    quantized: None = None

    @property
    def specs(self) -> tuple[Self, ...]:
        return (self,)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Broadcast(session.Transfer):
    """Transport in which servers receive a trainer's own broadcasts."""

    name = "broadcast"
    route = "distributed"
    in_session = True
    reason = "The trainer called update_weights_from_distributed()."

    def __init__(self, engine: RLSGLangEngine, timeout: float) -> None:
        self._control = engine.control
        self._timeout = timeout

    def send(self, weights: _Announced, *, version: str) -> int:
        """Announces the tensor to the servers, and waits until they have it."""
        receiving = self._control.update_weights_from(
            "distributed",
            group_name=WEIGHT_UPDATE_GROUP,
            names=[weights.name],
            dtypes=[str(weights.dtype).removeprefix("torch.")],
            shapes=[list(weights.shape)],
            weight_version=version,
            timeout=self._timeout,
        )
        run_sync(receiving)
        return 1


def _choose(numbers: list[Any], actor_index: int | None) -> Any:
    """Returns the number of a server, or all."""
    if actor_index is None:
        return numbers
    if check_count("actor_index", actor_index, least=0) >= len(numbers):
        raise ConfigurationError(
            f"actor_index={actor_index} is not one of the {len(numbers)} "
            f"servers; the first one is 0."
        )
    return numbers[actor_index]
