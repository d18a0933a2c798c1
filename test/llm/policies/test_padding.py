from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies import outputs
from torchrl_sglang.policies.inputs import read_tokens, strip_padding
from torchrl_sglang.types import Completion


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


class Elsewhere(torch.Tensor):
    """A tensor of another device, as far as indexing goes: CUDA's masks refuse so."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor):
            assert isinstance(args[0], cls) == isinstance(args[1], cls), (
                "indices should be either on cpu or on the same device"
            )
        found = super().__torch_function__(func, types, args, kwargs or {})
        moves = func is torch.Tensor.cpu or (kwargs or {}).get("device") == "cpu"
        return found.as_subclass(torch.Tensor) if moves else found


@pytest.mark.parametrize("masked", [True, False])
def test_padded_tokens_of_another_device_are_scored_on_the_cpu(masked):
    tokens = torch.tensor([[0, 0, 5, 6]]).as_subclass(Elsewhere)
    td = TensorDict(tokens=tokens, batch_size=1)
    if masked:
        td["mask"] = tokens != 0
    prompts = read_tokens(
        td.to_lazystack(0),
        "tokens",
        attention_mask_key="mask",
        written_mask_key="written",
        padding_value=0,
        keep_layout=True,
    )
    assert prompts.token_ids == [[5, 6]]
    (mask,) = prompts.masks
    assert type(mask) is torch.Tensor
    assert mask.tolist() == [False, False, True, True]
    done = Completion(
        token_ids=[], prompt_log_probs=[float("nan"), -1.0], finish_reason="length"
    )
    (sample,) = outputs.scored(prompts, [done], 0)
    assert sample["log_probs"]["full"].tolist() == [0.0, 0.0, 0.0, -1.0]


PADDED = torch.tensor([[9, 10, 0, 0], [5, 6, 7, 8]])
COUNTED = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
FULL = [[9, 10], [5, 6, 7, 8]]


def read(td):
    return read_tokens(
        td.to_lazystack(0),
        "tokens",
        attention_mask_key="mask",
        written_mask_key="written",
        padding_value=0,
    ).token_ids


@pytest.mark.parametrize(
    "mask",
    [
        COUNTED,
        COUNTED.bool(),
        COUNTED.float(),
        COUNTED.to(torch.uint8),
        torch.nested.as_nested_tensor(list(COUNTED), layout=torch.jagged),
    ],
    ids=["int", "bool", "float", "uint8", "jagged"],
)
def test_a_mask_of_the_tokens_shape_decides(mask):
    assert read(TensorDict(tokens=PADDED, mask=mask, batch_size=2)) == FULL


@pytest.mark.parametrize(
    "mask",
    [
        COUNTED[:, :3],
        COUNTED[:, None],
        COUNTED[:, 0],
        torch.cat([COUNTED, COUNTED], 1),
        torch.nested.as_nested_tensor(
            [torch.ones(2), torch.ones(4)], layout=torch.jagged
        ),
    ],
    ids=["narrow", "B1L", "vector", "wide", "jagged"],
)
@pytest.mark.parametrize("stale", [True, False])
def test_a_mask_of_another_shape_is_refused(mask, stale):
    td = TensorDict(tokens=PADDED, mask=mask, batch_size=2)
    if stale:
        td["written"] = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    with pytest.raises(ConfigurationError, match="'mask'.*the tokens' shape"):
        read(td)


@pytest.mark.parametrize("value", [2, -1, float("-inf"), float("nan")])
def test_a_mask_of_other_values_is_refused(value):
    mask = COUNTED.float()
    mask[0, 0] = value
    with pytest.raises(ConfigurationError, match="other values than 0 and 1"):
        read(TensorDict(tokens=PADDED, mask=mask, batch_size=2))


def test_a_mask_that_was_written_with_the_tokens_decides():
    """Also where the prompt's own mask is beside the whole sequence."""
    td = TensorDict(tokens=PADDED, written=COUNTED.bool(), batch_size=2)
    assert read(td) == FULL
    td["mask"] = torch.ones(2, 2, dtype=torch.bool)
    assert read(td) == FULL


def test_a_mask_that_an_earlier_call_wrote_does_not_decide():
    written = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1]]).bool()
    td = TensorDict(tokens=PADDED, written=written, batch_size=2)
    assert read(td) == [[9, 10, 0, 0], [5, 6, 7, 8]]


@pytest.mark.parametrize("padding", [7, -100])
@pytest.mark.parametrize("width", [3, 4])
def test_a_written_mask_of_another_padding_is_refused_or_given(padding, width):
    tokens = PADDED.masked_fill(~COUNTED.bool(), padding)[:, :width]
    mask = COUNTED[:, :width].bool()
    with pytest.raises(ConfigurationError, match=f"token {padding}.*pads with 0"):
        read(TensorDict(tokens=tokens, written=mask, batch_size=2))
    td = TensorDict(tokens=tokens, written=mask, mask=mask, batch_size=2)
    assert read(td) == [row[:width] for row in FULL]
