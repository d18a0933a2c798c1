"""New weights as a LoRA adapter: megabytes beside a model that stays as it is.

Nothing is paused and nothing can be half done: servers are given the new adapter beside
the old one, and requests name the new one when every server holds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from torchrl_sglang.backends.base import RLSGLangEngine
from torchrl_sglang.errors import ConfigurationError, SGLangError, WeightTransferError

__all__ = ["LoraTransport"]


class LoraTransport:
    """Publishes adapters as weight versions.

    Args:
        engine: servers that were started with ``enable_lora=True``.
        name: what requests can select the adapter by. They need not: every request
            that selects none carries it after the first update.
        pinned: keep it among those that the servers compute batches with.
        timeout: budget for each update, in seconds. Defaults to the engine's.

    Raises:
        ConfigurationError: if the servers take no adapters.
    """

    name: ClassVar[str] = "lora"

    def __init__(
        self,
        engine: RLSGLangEngine,
        name: str = "policy",
        *,
        pinned: bool = False,
        timeout: float | None = None,
    ) -> None:
        if not engine.capabilities.has_lora:
            raise ConfigurationError(
                f"The servers at {engine.server_url} take no LoRA adapters; start them "
                f"with enable_lora=True, max_lora_rank=... and "
                f"lora_target_modules=['all'], or send whole weights."
            )
        self._engine = engine
        self._adapter = name
        self._pinned = pinned
        self._timeout = timeout

    def publish(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        version: str,
    ) -> None:
        """Has every request that is sent from now on use these weights.

        Requests under way end with the weights that they began with. Each completion
        tells in its ``versions`` which ones these were.

        Args:
            tensors: the adapter's, as :func:`.lora_source.adapter_from_model` returns
                them; read before this returns.
            config: its configuration, from the same.
            version: weight version that completions report.

        Raises:
            WeightTransferError: if that failed. ``untouched`` is True: every request
                uses what it used before.
        """
        try:
            self._engine.load_adapter(
                self._adapter,
                tensors=tensors,
                config=config,
                pinned=self._pinned,
                version=version,
                default=True,
                timeout=self._timeout,
            )
        except SGLangError as error:
            raise WeightTransferError(
                f"The LoRA adapter was not published as version {version!r}: {error} "
                f"The servers still use the weights from before.",
                untouched=True,
            ) from error
