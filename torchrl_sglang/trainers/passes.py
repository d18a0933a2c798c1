"""Passes over a batch: which rows are in one, and which passes are needed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from tensordict import TensorDictBase

from torchrl_sglang.objectives.losses import CorrectedGRPOLoss
from torchrl_sglang.objectives.routing import EXPERTS
from torchrl_sglang.objectives.transform import OffPolicyCorrection
from torchrl_sglang.objectives.tree import halve_largest, node_values, sorted_rows
from torchrl_sglang.requests.token_columns import TOKENS


def cut_by_tokens(
    lengths: Sequence[int], limit: int, *, packed: bool = False, least: int = 1
) -> list[list[int]]:
    """Groups sequences by their lengths, so that a group has few padded tokens. Pure.

    A group has at most ``limit`` tokens; a longer sequence is alone. ``packed`` groups
    have no padding, and about as many tokens each; otherwise the sequences of a group
    are of similar length. There are at least ``least`` groups, as far as there are
    sequences. Returns positions of the sequences; later groups have more tokens if they
    are packed, or longer sequences.

    Examples:
        >>> cut_by_tokens([5, 1, 2, 2, 9], limit=6)
        [[1, 2, 3], [0], [4]]
        >>> cut_by_tokens([5, 1, 2, 2, 9], limit=6, packed=True)
        [[0], [1, 2, 3], [4]]
        >>> cut_by_tokens([1, 2, 3, 4], limit=100, packed=True, least=2)
        [[0, 3], [1, 2]]
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    if packed:
        parts = _pack(lengths, order, limit, least)
    else:
        parts = _pad(lengths, order, limit)
    parts = halve_largest(parts, min(least, len(lengths)))
    size = sum if packed else max
    parts.sort(key=lambda part: size(lengths[index] for index in part))
    return [sorted(part) for part in parts]


def _pad(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    """Groups sequences of similar lengths, of which the longest counts for all."""
    parts: list[list[int]] = []
    for index in order:
        if parts and (len(parts[-1]) + 1) * lengths[index] <= limit:
            parts[-1].append(index)
        else:
            parts.append([index])
    return parts


def _pack(
    lengths: Sequence[int], order: Sequence[int], limit: int, least: int
) -> list[list[int]]:
    """Spreads sequences evenly over as few groups as they fill, or fills these."""
    longest_first = order[::-1]
    filled = _fill(lengths, longest_first, limit)
    number = min(max(len(filled), least), len(order))
    even: list[list[int]] = [[] for _ in range(number)]
    sums = [0] * number
    for index in longest_first:
        fewest = min(range(number), key=sums.__getitem__)
        even[fewest].append(index)
        sums[fewest] += lengths[index]
    fits = all(
        len(part) == 1 or size <= limit for part, size in zip(even, sums, strict=True)
    )
    return even if fits else filled


def _fill(lengths: Sequence[int], order: Sequence[int], limit: int) -> list[list[int]]:
    """Puts each sequence into the group in which it leaves the least room."""
    parts: list[list[int]] = []
    rooms: list[int] = []
    for index in order:
        length = lengths[index]
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if fitting:
            best = min(fitting, key=lambda number: rooms[number])
            parts[best].append(index)
            rooms[best] -= length
        else:
            parts.append([index])
            rooms.append(limit - length)
    return parts


def sort_rows(rows: TensorDictBase, *, by_experts: bool) -> list[tuple[int, int]]:
    """Returns the order in which each row shares most with the one before.

    With the lengths of the prefixes that they share, as :func:`.sorted_rows`;
    ``by_experts``: of tokens with the same experts, where rows have them.
    """
    return sorted_rows(
        [
            node_values(row[TOKENS], row.get(EXPERTS, None) if by_experts else None)
            .cpu()
            .numpy()
            for row in rows.unbind(0)
        ]
    )


def count_tokens(
    rows: TensorDictBase, order: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """Returns the tokens of rows, and the distinct ones by :func:`sort_rows`."""
    lengths = [len(row[TOKENS]) for row in rows.unbind(0)]
    return sum(lengths), sum(lengths) - sum(common for _, common in order)


def count_computed(
    order: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    parts: Sequence[Sequence[int]],
) -> int:
    """Returns the tokens that passes compute, each pass its distinct ones. Pure.

    Args:
        order: of :func:`.sorted_rows`.
        lengths: of the sequences.
        parts: of :func:`.cut_tree`: the sequences of each pass.

    Examples:
        >>> count_computed([(0, 0), (1, 3)], [4, 5], [[0, 1]])
        6
        >>> count_computed([(0, 0), (1, 3)], [4, 5], [[0], [1]])
        9
    """
    pass_of = {index: number for number, part in enumerate(parts) for index in part}
    passes = [pass_of[index] for index, _ in order]
    neighbours = zip(order[1:], pairwise(passes), strict=True)
    shared = sum(common for (_, common), pair in neighbours if pair[0] == pair[1])
    return sum(lengths) - shared


def needs_no_pass(loss: Any, correct: OffPolicyCorrection | None) -> bool:
    """Whether the loss's own pass has the old policy of a batch's only step.

    What the loss compares with the log-probs of a corrected batch would else be another
    policy's, and a mean over the batch is not known to its parts.
    """
    if type(correct) is not OffPolicyCorrection or correct.actor_network is not None:
        return False
    if not isinstance(loss, CorrectedGRPOLoss) or loss.correction is not None:
        return False
    if "prompt_mean" in (loss.aggregation, correct.aggregation):
        # Penalties are means over other sequences then.
        penalties = loss.entropy_bonus or loss.kl_to_ref_coeff
        if penalties or loss.aggregation != correct.aggregation:
            return False
    keys = loss.tensor_keys
    return (
        loss.kl_mask_threshold is None
        and loss.kl_to_inference_coeff is None
        and not correct.config.rollout_is_batch_normalize
        and loss.masking_strategy == correct.masking_strategy
        and loss.version_key == correct.version_key
        and keys.advantage == correct.advantage_key
        and keys.sample_log_prob == correct.log_probs_key
    )
