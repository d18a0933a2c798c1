"""TorchRL's LLM collector with weight-sync schemes for SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl.collectors.llm import LLMCollector

from torchrl_sglang.collectors.weight_sync import attach_weight_sync, check_schemes
from torchrl_sglang.types import SyncReport
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

__all__ = ["SGLangLLMCollector"]


class SGLangLLMCollector(LLMCollector):
    """TorchRL's LLM collector with weight-sync schemes that send weights to SGLang.

    Takes all arguments of :class:`~torchrl.collectors.llm.LLMCollector` and calls
    :func:`attach_weight_sync` on itself.

    Keyword Args:
        weight_sync_schemes (dict, optional): ``{"policy": scheme}``.

    Raises:
        ConfigurationError: if a scheme is not an ``SGLangWeightSyncScheme`` or is for a
            model other than ``"policy"``.

    Examples:
        >>> scheme = SGLangWeightSyncScheme(engine)
        >>> scheme.create_sender().register_model(model)
        >>> from tensordict import TensorDict
        >>> from torchrl.envs.llm import ChatEnv
        >>> queries = [TensorDict(query=["Hi"], batch_size=1)]
        >>> env = ChatEnv.from_dataloader(queries, tokenizer=tokenizer, batch_size=(1,))
        >>> collector = SGLangLLMCollector(
        ...     env,
        ...     policy=SGLangWrapper(engine),
        ...     dialog_turns_per_batch=1,
        ...     track_policy_version=True,
        ...     weight_sync_schemes={"policy": scheme},
        ... )
        >>> report = collector.update_policy_weights_()
        >>> report.version == engine.weight_version
        True
        >>> scheme.shutdown()
    """

    last_sync_report: SyncReport | None = None
    """Report of the last weight update; ``None`` before the first."""

    def __init__(
        self,
        *args: Any,
        weight_sync_schemes: Mapping[str, SGLangWeightSyncScheme] | None = None,
        **kwargs: Any,
    ) -> None:
        schemes = check_schemes(weight_sync_schemes)
        super().__init__(*args, **kwargs)
        for scheme in schemes.values():
            attach_weight_sync(self, scheme)
