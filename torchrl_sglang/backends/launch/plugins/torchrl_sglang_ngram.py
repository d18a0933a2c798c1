"""N-gram drafts that change no probability, as a plugin of SGLang.

A pass of ``--speculative-algorithm NGRAM`` has a fixed number of places. Those that no
draft fills hold token 0, and SGLang hangs each of them below the last token, beside the
others. At a temperature it accepts one of the tokens below another with the probability
of that token, one after the other, so token 0 is accepted once for each of these
places: with seven of them it is sampled nearly seven times as often as the model says.

Here such places follow each other, below the last draft. A row of zeros is a draft as
any other one, which is accepted as often as the model says. This was seen with SGLang
0.5.15 and 0.5.23 (``fillResult`` in ``ngram_corpus/result.cpp``).

It runs in the schedulers of a server, whose Python does not have ``torchrl_sglang``, so
the file stands alone; its folder is on the server's ``PYTHONPATH``.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

MARK = "torchrl_sglang_ngram"
"""Name under which a scheduler tells that it is there."""


def install() -> None:
    """Changes the drafts of this process, if it is a scheduler."""
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is None:
        return
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    find = NgramCorpus.batch_get

    @functools.wraps(find)
    def batch_get(self: Any, req_ids: Any, *args: Any, **kwargs: Any) -> Any:
        tokens, mask = find(self, req_ids, *args, **kwargs)
        return tokens, chain_padding(tokens, mask, len(req_ids))

    tell = scheduler.Scheduler.get_internal_state

    @functools.wraps(tell)
    def get_internal_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = tell(self, *args, **kwargs)
        answer.internal_state[MARK] = True
        return answer

    NgramCorpus.batch_get = batch_get
    scheduler.Scheduler.get_internal_state = get_internal_state


def chain_padding(tokens: Any, mask: Any, size: int) -> Any:
    """Returns a mask in which places without a draft follow each other.

    Args:
        tokens (numpy.ndarray): ``[size * places]``, of which the first of each request
            is its last token.
        mask (numpy.ndarray): ``[size * places * places]``; which tokens each of them
            follows, itself included.
        size (int): requests.

    Examples:
        >>> tokens, mask = np.array([7, 5, 0, 0]), np.eye(4, dtype=bool)
        >>> mask[:, 0] = True  # SGLang's: all three below token 7.
        >>> chain_padding(tokens, mask.ravel(), 1).reshape(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
    """
    if not size:
        return mask
    nodes = tokens.reshape(size, -1)
    places = nodes.shape[1]
    tree = mask.reshape(size, places, places)
    # Below the last token: itself and that one.
    empty = (nodes == 0) & (tree.sum(-1) == 2)
    # From the end on. A draft of token 0 among them is no loss.
    empty = np.logical_and.accumulate(empty[:, ::-1], axis=1)[:, ::-1]
    last = places - empty.sum(-1) - 1
    below = tree[np.arange(size), last]
    earlier = np.tri(places, dtype=bool)
    rows = below[:, None, :].astype(bool) | (empty[:, None, :] & earlier)
    chained = np.where(empty[:, :, None], rows, tree.astype(bool))
    return chained.astype(mask.dtype).reshape(mask.shape)
