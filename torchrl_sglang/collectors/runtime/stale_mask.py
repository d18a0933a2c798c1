"""Excludes tokens that are too old from the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tensordict import NestedKey, TensorDictBase

from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class StaleMask:
    """Excludes tokens of a response from the loss.

    Their assistant mask is False, and their log-probs are NaN: TorchRL's losses skip
    such tokens, with any masking strategy.
    """

    masks_key: NestedKey = "masks"
    """Key of the masks."""
    log_probs_key: NestedKey | None = "log_probs"
    """Key of the log-probs; ``None``: there are none."""

    @classmethod
    def of(cls, policy: SGLangWrapper) -> StaleMask:
        """Returns the mask for the rows of a policy."""
        key = policy.log_probs_key if policy.return_log_probs else None
        return cls(masks_key=policy.masks_key, log_probs_key=key)

    def __call__(self, row: TensorDictBase, bound: int) -> None:
        """Excludes tokens of policy versions before ``bound``, in place."""
        versions = row[POLICY_VERSIONS]
        stale = (versions >= 0) & (versions < bound)
        if not stale.any():
            return
        count = len(stale)
        row[self.masks_key].all_assistant_mask[-count:][stale] = False
        if self.log_probs_key is not None:
            log_probs = row[self.log_probs_key]
            log_probs.response[stale] = math.nan
            log_probs.full[-count:][stale] = math.nan
