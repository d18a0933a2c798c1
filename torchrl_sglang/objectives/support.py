"""Tells of batches whose tokens were drawn from another distribution than is trained.

``logprobs_mode="behaviour"`` records temperature and support of each token. The losses
compute log-probs over the whole vocabulary at temperature 1.
"""

from __future__ import annotations

import warnings
from typing import Any

from tensordict import TensorDictBase

COUNTS = ("sampling_support", "full_counts")
TEMPERATURES = ("sampling_temperature", "full")

_told: set[str] = set()


def warn_of_sampling(batch: TensorDictBase) -> None:
    """Warns once in a process if tokens of a batch were not drawn from the model."""
    if _told:
        return
    found = {
        "a temperature": _any(batch, TEMPERATURES, lambda each: (each != 1).any()),
        "top-k, top-p or min-p": _any(batch, COUNTS, lambda each: (each > 0).any()),
    }
    named = " and ".join(name for name, holds in found.items() if holds)
    if named:
        _told.add(named)
        warnings.warn(
            f"Tokens of this batch were drawn with {named}, and the loss computes the "
            f"log-probs of the whole vocabulary at temperature 1: the ratio of the "
            f"first step is not 1. Sample with temperature=1.0 alone, or correct it "
            f"with a RolloutCorrectionConfig.",
            RuntimeWarning,
            stacklevel=3,
        )


def _any(batch: TensorDictBase, key: Any, holds: Any) -> bool:
    rows = batch.get(key, None, as_list=True)
    return rows is not None and any(bool(holds(row)) for row in rows)
