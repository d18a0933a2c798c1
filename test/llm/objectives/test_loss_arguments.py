"""Wrong values of a loss's arguments are errors, and no other objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_sglang import CorrectedCISPOLoss, CorrectedGRPOLoss, CorrectedGSPOLoss
from torchrl_sglang.errors import ConfigurationError

LOSSES = [CorrectedGRPOLoss, CorrectedCISPOLoss, CorrectedGSPOLoss]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("aggregation", "tokn"),
        ("masking_strategy", "nope"),
        ("masking_strategy", None),
        ("reduction", "sum"),
        ("ref_log_prob_padding_side", "top"),
        ("clip_epsilon", float("nan")),
        ("clip_epsilon", (0.2, float("nan"))),
        ("clip_epsilon", 1.5),
        ("clip_epsilon", (0.1, 0.2, 0.3)),
        ("clip_epsilon", "0.2"),
        ("kl_mask_threshold", -1.0),
        ("entropy_coeff", float("nan")),
        ("entropy_coeff", "0.1"),
        ("entropy_coeff", True),
        ("entropy_bonus", "yes"),
        ("kl_to_ref_coeff", "x"),
        ("kl_to_inference_coeff", float("inf")),
    ],
)
def test_a_value_that_an_argument_does_not_take(loss, name, value):
    with pytest.raises(ConfigurationError, match=name):
        loss(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_epsilon", [0.2, 0.28]),
        ("clip_epsilon", (0.2, float("inf"))),
        ("clip_epsilon", np.float32(0.2)),
        ("kl_mask_threshold", None),
        ("entropy_coeff", torch.tensor(0.01)),
        ("entropy_coeff", -0.01),
        ("reduction", None),
        ("aggregation", None),
    ],
)
def test_values_that_it_takes(name, value):
    CorrectedGRPOLoss(**{name: value})
