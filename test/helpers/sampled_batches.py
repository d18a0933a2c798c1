"""Batches of sampled tokens, and an actor whose logits are its parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torchrl.modules import LLMMaskedCategorical
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from torchrl_sglang.requests.token_columns import POLICY_VERSIONS

VOCABULARY = 7


@dataclass
class Row:
    """One sequence; all lists are about the response, which follows the prompt."""

    prompt: list[int]
    tokens: list[int]
    rollout: list[float]
    advantage: float
    versions: list[int]
    train: list[float] = field(default_factory=list)


@dataclass
class Case:
    """A batch with the logits of the trainer's policy before the step."""

    rows: list[Row]
    logits: Tensor
    """float64 ``(B, T, VOCABULARY)``, padded on the left."""

    @property
    def width(self) -> int:
        return self.logits.shape[1]


def make_case(seed: int, *, mismatch: float = 0.6, unknown: float = 0.0) -> Case:
    """Returns random rows of random lengths, one of them without a response.

    Args:
        seed: of everything.
        mismatch: standard deviation of the log-ratio of rollout and trainer.
        unknown: share of the engine's log-probs that are NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, size: int) -> list[int]:
        return torch.randint(low, high, (size,), generator=generator).tolist()

    count = integers(2, 6, 1)[0]
    rows = []
    for index in range(count):
        prompt, length = integers(1, 4, 1)[0], integers(1, 7, 1)[0]
        length = 0 if index == 1 and seed % 2 else length
        rows.append(
            Row(
                prompt=integers(0, VOCABULARY, prompt),
                tokens=integers(0, VOCABULARY, length),
                rollout=[],
                advantage=torch.randn((), generator=generator).item(),
                versions=integers(-1, 5, length),
            )
        )
    width = max(len(row.prompt) + len(row.tokens) for row in rows)
    shape = (count, width, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64)
    log_probs = logits.log_softmax(-1)
    bad = [float("nan"), float("-inf"), float("inf")]
    for index, row in enumerate(rows):
        start = width - len(row.tokens)
        noise = torch.randn(len(row.tokens), generator=generator) * mismatch
        for position, token in enumerate(row.tokens):
            value = log_probs[index, start + position, token].item()
            row.train.append(value)
            lost = torch.rand((), generator=generator).item() < unknown
            choice = bad[integers(0, 3, 1)[0]]
            # A log-prob is not positive.
            sampled = min(value + noise[position].item(), -1e-3)
            row.rollout.append(choice if lost else sampled)
    return Case(rows, logits)


def make_batch(case: Case, layout: str) -> TensorDictBase:
    """Returns a case as TorchRL has it.

    Args:
        case: the rows.
        layout: ``"ragged"``, ``"padded"``, ``"nested"``, or ``"ragged inside"``: a
            dense batch of lazy stacks.
    """
    rows = [_row(row) for row in case.rows]
    ragged = lazy_stack([TensorDict(row) for row in rows])
    if layout == "ragged":
        return ragged
    stacked = {
        name: _padded([row[name] for row in rows], case.width)
        for name in ("tokens", "masks", "log_probs", "train_log_probs")
    }
    if layout == "ragged inside":
        stacked = {name: ragged.get(name) for name in stacked}
    if layout == "nested":
        for name in ("log_probs", "train_log_probs"):
            leaves = [row[name].full for row in rows]
            nested = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
            stacked[name] = {"full": nested}
    versions = [row[POLICY_VERSIONS] for row in rows]
    width = max(map(len, versions))
    stacked[POLICY_VERSIONS] = torch.stack(
        [_left(version, width, padding=-1) for version in versions]
    )
    stacked["advantage"] = torch.stack([row["advantage"] for row in rows])
    return TensorDict(stacked, batch_size=len(rows))


def _row(row: Row) -> dict[str, object]:
    """Returns the columns of a row."""
    prompt = torch.tensor(row.prompt)
    response = torch.tensor(row.tokens, dtype=torch.int64)
    unscored = torch.full((len(prompt),), torch.nan, dtype=torch.float64)
    rollout = torch.tensor(row.rollout, dtype=torch.float64)
    train = torch.tensor(row.train, dtype=torch.float64)
    total = len(prompt) + len(response)
    return {
        "tokens": Tokens(
            prompt=prompt,
            response=response,
            full=torch.cat([prompt, response]),
            padded=False,
        ),
        "masks": Masks(
            all_attention_mask=torch.ones(total, dtype=torch.bool),
            all_assistant_mask=torch.arange(total) >= len(prompt),
            padded=False,
        ),
        "log_probs": LogProbs(full=torch.cat([unscored, rollout]), padded=False),
        "train_log_probs": LogProbs(full=torch.cat([unscored, train]), padded=False),
        POLICY_VERSIONS: torch.tensor(row.versions, dtype=torch.int64),
        "advantage": torch.full((1, 1), row.advantage, dtype=torch.float64),
    }


def _padded(rows: list[object], width: int) -> dict[str, Tensor]:
    """Returns the columns of all rows, padded on the left, but for the prompts."""
    names = ("full", "all_attention_mask", "all_assistant_mask")
    present = [name for name in names if getattr(rows[0], name, None) is not None]
    return {
        name: torch.stack([_left(getattr(row, name), width) for row in rows])
        for name in present
    }


def _left(values: Tensor, width: int, padding: float = 0) -> Tensor:
    return nn.functional.pad(values, (width - len(values), 0), value=padding)


class TableActor(nn.Module):
    """A policy whose logits do not depend on the tokens: they are its parameters."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.in_keys = [("tokens", "full")]
        self.logits = nn.Parameter(logits.clone())

    def get_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        mask = tensordict.get(
            ("masks", "all_assistant_mask"),
            as_padded_tensor=True,
            padding_side="left",
            padding_value=False,
        )
        return LLMMaskedCategorical(logits=self.logits, mask=mask)

    _get_sft_dist = _get_rlhf_dist = get_dist
