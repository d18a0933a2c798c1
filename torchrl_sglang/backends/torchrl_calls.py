"""The calls of TorchRL's engines for SGLang and vLLM, on top of the engine's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import torch

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.backends.support.checks import (
    check_count,
    check_port,
    check_seconds,
)
from torchrl_sglang.backends.support.event_loop import run_sync
from torchrl_sglang.backends.support.versions import next_version
from torchrl_sglang.errors import (
    ConfigurationError,
    RequestRefusedError,
    UnsupportedByServerError,
    WeightSyncStateError,
)
from torchrl_sglang.types import Completion

__all__ = ["TorchRLCalls"]

JOIN_TIMEOUT_SECONDS = 60.0
RECEIVE_TIMEOUT_SECONDS = 300.0
WEIGHT_UPDATE_GROUP = "weight_update_group"
"""SGLang's own name for the process group that weights are broadcast in."""


class TorchRLCalls(RLSGLangEngine):
    """Methods that code written for TorchRL's engines calls."""

    def generate_batch(
        self,
        prompts: Sequence[str],
        sampling_params: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Completion]:
        """Continues several texts; the same as :meth:`generate` with a list of them."""
        return self.generate(list(prompts), sampling_params, **kwargs)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; vLLM's name for :meth:`flush_cache`."""
        return self.flush_cache()

    def get_num_unfinished_requests(
        self, actor_index: int | None = None
    ) -> int | list[int]:
        """Returns how many requests run or wait in each server, of all users.

        Args:
            actor_index: only the number of this server.
        """
        loads = run_sync(self.control.loads())
        return _chosen([running + queued for running, queued in loads], actor_index)

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Returns how much of each server's KV cache is in use, from 0 to 1.

        Args:
            actor_index: only the usage of this server.

        Raises:
            UnsupportedByServerError: if a server does not tell.
        """
        return _chosen(run_sync(self.control.cache_usages()), actor_index)

    def init_weight_update_group(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        *,
        timeout: float = JOIN_TIMEOUT_SECONDS,
    ) -> None:
        """Has every server join a process group whose first rank is the caller's.

        For a trainer that runs its own collectives. It opens the store at the address
        and joins meanwhile, in another thread. A
        :class:`~torchrl_sglang.SGLangWeightSyncScheme` does all of this by itself.

        Args:
            master_address: where the servers meet the trainer. Defaults to
                :meth:`get_master_address`.
            master_port: of the trainer's store; TorchRL's default cannot be known.
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
        on_cpu = self.capabilities.server_args.get("device") == "cpu"
        run_sync(
            self._join(
                master_address=master_address or self.get_master_address(),
                master_port=check_port("master_port", master_port),
                world_size=1 + self.get_world_size(),
                group_name=WEIGHT_UPDATE_GROUP,
                backend="gloo" if on_cpu else "nccl",
                timeout=check_seconds("timeout", timeout),
            )
        )

    def update_weights_from_distributed(
        self,
        name: str,
        dtype: torch.dtype,
        shape: Sequence[int],
        *,
        timeout: float = RECEIVE_TIMEOUT_SECONDS,
    ) -> str:
        """Has every server receive one tensor that the trainer broadcasts meanwhile.

        It is an update with its own weight version, and the engine must be idle.
        :meth:`.SGLangWeightSender.update_weights` sends all tensors in one update.

        Args:
            name: of the parameter.
            dtype: of the parameter.
            shape: of the parameter.
            timeout: in seconds.

        Returns:
            The weight version that the servers report from now on.

        Raises:
            WeightSyncStateError: if a request or another update runs.
            ServerError: if a server did not receive it. Generation is refused until an
                update succeeds.
        """
        timeout = check_seconds("timeout", timeout)
        with self.weight_update() as update:
            current = run_sync(self.control.weight_versions())
            known = [*current, self.weight_version, self.newest_version]
            version = next_version(known)
            # The engine refuses to generate from here on; no request may run.
            update.mark_inconsistent(f"The parameter {name!r} is being received.")
            if any(map(sum, run_sync(self.control.loads()))):
                update.abort()
                raise WeightSyncStateError(
                    f"{name!r} cannot be received while the servers compute requests; "
                    f"wait for them, or write SGLangWeightSyncScheme(engine)"
                    f".create_sender().update_weights(model), which pauses them."
                )
            run_sync(
                self._receive(
                    names=[name],
                    dtypes=[str(dtype).removeprefix("torch.")],
                    shapes=[list(shape)],
                    weight_version=version,
                    timeout=timeout,
                )
            )
            update.commit(version)
        return version

    async def _join(self, *, group_name: str, **options: Any) -> None:
        with suppress(RequestRefusedError):
            # An earlier trainer may have left one.
            await self.control.destroy_weights_update_group(group_name)
        await self.control.init_weights_update_group(group_name=group_name, **options)

    async def _receive(self, **tensors: Any) -> None:
        await self.control.begin_weight_update()
        await self.control.update_weights_from(
            "distributed", group_name=WEIGHT_UPDATE_GROUP, **tensors
        )
        await self.control.end_weight_update()
        await self.control.flush_cache()

    def update_weights(self, weights: Any) -> NoReturn:
        """Raises :class:`UnsupportedByServerError`: a sender sends weights."""
        raise UnsupportedByServerError(
            "An engine does not send weights; write "
            "SGLangWeightSyncScheme(engine).create_sender().update_weights(weights)."
        )


Number = TypeVar("Number", int, float)


def _chosen(numbers: list[Number], actor_index: int | None) -> Number | list[Number]:
    """Returns the number of one server, or of each one."""
    if actor_index is None:
        return numbers
    if check_count("actor_index", actor_index, least=0) >= len(numbers):
        raise ConfigurationError(
            f"actor_index={actor_index} is not one of the {len(numbers)} "
            f"servers; the first one is 0."
        )
    return numbers[actor_index]
