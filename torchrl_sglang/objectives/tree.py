"""Token trees: a prefix that several sequences share is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TREES_PAY = 1.5
"""Tokens over the distinct ones from which on trees are faster than rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTree:
    """The distinct tokens of a batch, depth first.

    A token is distinct by its values and those of all tokens before it. A segment is a
    run of new tokens of a sequence, which attends to its path: all tokens of the
    sequence up to the segment's end, in their order.
    """

    nodes: Tensor
    """``(nodes,)``: the first of the equal tokens, among all tokens of the batch."""
    node_of: Tensor
    """``(tokens,)``: the node of each token."""
    depths: Tensor
    """``(nodes,)``: the position in its sequence."""
    segments: Tensor
    """``(segments,)``: number of nodes of each segment."""
    paths: Tensor
    """``(segments,)``: number of nodes of each path."""
    path_nodes: Tensor
    """``(sum of paths,)``: the nodes of all paths."""


def node_values(tokens: Tensor, experts: Tensor | None) -> Tensor:
    """Returns integers ``(tokens, n)`` that equal tokens ``(tokens,)`` have in common.

    A token with other ``experts`` ``(tokens, layers, chosen)`` has other states. There
    are hundreds of experts for a token, hence the small integers.
    """
    values = tokens.long().unsqueeze(-1)
    if experts is None:
        return values
    return torch.cat([values.view(torch.int16), experts.flatten(1).short()], -1)


def plan_tree(values: Tensor, lengths: Tensor) -> TokenTree:
    """Returns the tree of a batch's tokens, on their device.

    Args:
        values: of :func:`node_values`, one sequence after the other.
        lengths: ``(sequences,)``, not zero.

    Examples:
        >>> ids = torch.tensor([5, 6, 7, 5, 6, 8]).unsqueeze(-1)
        >>> tree = plan_tree(ids, torch.tensor([3, 3]))
        >>> tree.nodes.tolist(), tree.node_of.tolist(), tree.depths.tolist()
        ([0, 1, 2, 5], [0, 1, 2, 0, 1, 3], [0, 1, 2, 2])
    """
    bounds = np.concatenate([[0], lengths.cpu().numpy().cumsum()])
    rows = np.split(values.cpu().numpy(), bounds[1:-1])
    node_of = np.empty(bounds[-1], dtype=np.int64)
    path = np.empty(0, dtype=np.int64)
    nodes, depths, segments, paths = [], [], [], []
    count = 0
    for index, common in sorted_rows(rows):
        length = len(rows[index])
        new = length - common
        path = np.concatenate([path[:common], np.arange(count, count + new)])
        node_of[bounds[index] : bounds[index + 1]] = path
        if not new:
            continue
        count += new
        nodes.append(np.arange(bounds[index] + common, bounds[index + 1]))
        depths.append(np.arange(common, length))
        segments.append(new)
        paths.append(path)
    device = values.device
    return TokenTree(
        nodes=torch.from_numpy(np.concatenate(nodes)).to(device),
        node_of=torch.from_numpy(node_of).to(device),
        depths=torch.from_numpy(np.concatenate(depths)).to(device),
        segments=torch.tensor(segments, device=device),
        paths=torch.tensor([len(path) for path in paths], device=device),
        path_nodes=torch.from_numpy(np.concatenate(paths)).to(device),
    )


def sorted_rows(rows: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Returns rows in order, each with the length of its prefix in the row before.

    Args:
        rows: integers ``(tokens, n)``.

    Examples:
        >>> rows = [np.array([[1], [2]]), np.array([[3]]), np.array([[1], [4], [5]])]
        >>> sorted_rows(rows)
        [(0, 0), (2, 1), (1, 0)]
    """
    # Any order of bytes puts rows beside those with which they share most.
    order = sorted(range(len(rows)), key=lambda index: rows[index].tobytes())
    previous = [None, *order[:-1]]
    return [
        (index, 0 if other is None else _common(rows[index], rows[other]))
        for index, other in zip(order, previous, strict=True)
    ]


def cut_tree(
    order: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    limit: int,
    *,
    least: int = 1,
) -> list[list[int]]:
    """Groups sequences so that a group has at most ``limit`` distinct tokens.

    A longer sequence is alone. Groups are as few as that allows, but at least
    ``least``, as far as there are sequences, and have about as many distinct tokens
    each. What sequences of two groups share is computed in both.

    Args:
        order: of :func:`sorted_rows`.
        lengths: of the sequences.
        limit: of the distinct tokens of a group.
        least: number of groups.

    Examples:
        >>> cut_tree([(0, 0), (2, 3), (1, 0)], [4, 9, 4], limit=10)
        [[0, 2], [1]]
    """
    return spread_tree(order, lengths, max(least, len(_fill(order, lengths, limit))))


def spread_tree(
    order: Sequence[tuple[int, int]], lengths: Sequence[int], count: int
) -> list[list[int]]:
    """Groups sequences with about as many distinct tokens in each group.

    Returns ``count`` groups, as far as there are sequences, in the order of
    :func:`sorted_rows`.

    Examples:
        >>> spread_tree([(0, 0), (2, 3), (1, 0)], [4, 9, 4], 2)
        [[0, 2], [1]]
    """
    low, high = 1, sum(lengths)
    while low < high:
        middle = (low + high) // 2
        if len(_fill(order, lengths, middle)) > count:
            low = middle + 1
        else:
            high = middle
    groups = halve_largest(_fill(order, lengths, high), min(count, len(order)))
    return [sorted(group) for group in groups]


def halve_largest(groups: Sequence[list[int]], count: int) -> list[list[int]]:
    """Returns at least ``count`` groups; the largest ones are halved.

    Examples:
        >>> halve_largest([[0], [1, 2, 3]], 3)
        [[0], [1], [2, 3]]
    """
    halved = list(groups)
    while len(halved) < count:
        largest = max(halved, key=len)
        half = len(largest) // 2
        halved.remove(largest)
        halved += [largest[:half], largest[half:]]
    return halved


def _common(row: np.ndarray, other: np.ndarray) -> int:
    """Returns the length of the prefix that two rows share."""
    shorter = min(len(row), len(other))
    differs = (row[:shorter] != other[:shorter]).any(-1)
    return int(differs.argmax()) if differs.any() else shorter


def _fill(
    order: Sequence[tuple[int, int]], lengths: Sequence[int], limit: int
) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for index, common in order:
        new = lengths[index] - common
        if groups and size + new <= limit:
            groups[-1].append(index)
            size += new
        else:
            groups.append([index])
            size = lengths[index]
    return groups
