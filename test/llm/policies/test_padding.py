from __future__ import annotations

import pytest
import torch

from torchrl_sglang.policies.padding import pad, strip_padding


@pytest.mark.parametrize(
    ("row", "padding_value", "expected"),
    [
        ([0, 0, 5, 6], 0, [5, 6]),
        ([5, 6], 0, [5, 6]),
        # A padding token inside or at the end may be a real end-of-sequence token.
        ([0, 5, 0, 6, 0], 0, [5, 0, 6, 0]),
        ([0, 0, 0], 0, [0]),
        ([0, 5], None, [0, 5]),
        ([], 0, []),
    ],
)
def test_only_leading_padding_is_stripped(row, padding_value, expected):
    assert strip_padding(row, padding_value) == expected


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", [[1, 2, 3], [9, 9, 4]]), ("right", [[1, 2, 3], [4, 9, 9]])],
)
def test_pad(side, expected):
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert pad(rows, side=side, value=9).tolist() == expected


def test_pad_keeps_the_dtype():
    rows = [torch.tensor([True]), torch.tensor([True, True])]
    padded = pad(rows, side="left", value=False)
    assert padded.dtype is torch.bool
    assert padded.tolist() == [[False, True], [True, True]]
