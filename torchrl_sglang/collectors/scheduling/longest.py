"""The order that begins requests first which are expected to be longest. Pure.

A load that many servers share ends early if its long parts begin first (Graham, 1969).
The length of a response is not known before its end, but samples of one prompt are
alike: one of them, the probe, is sent first, and those that finish tell the length of
the others. So do the lengths of an earlier epoch.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

MOST_PROMPTS = 65_536
"""Prompts whose lengths are remembered; the least recently seen are forgotten."""

MOST_LENGTHS = 512
"""Latest lengths that tell how long a response is that has a length already."""

DECAY = 0.99
"""Weight of earlier responses in the rate, with each one that finishes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sample:
    """One request that waits or runs."""

    prompt: Hashable
    """Identity of its prompt; samples of one prompt tell each other's length."""
    batch: int = 0
    """Batch that it is for; all of an earlier one are begun before."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Siblings:
    """The samples of one prompt that are not done, and what is known of them."""

    prompt: Hashable
    """Identity of the prompt."""
    expected: float | None
    """Mean length in an earlier epoch; ``None``: the prompt is new."""
    queue: list[tuple[int, int, Sample]] = field(default_factory=list)
    """Heap of those that came, by batch and number; some may not wait any more."""
    waiting: set[Sample] = field(default_factory=set)
    """Samples that wait."""
    running: dict[Sample, float] = field(default_factory=dict)
    """Samples that run, and when they began, in seconds; the earliest first."""
    finished: int = 0
    """Samples that finished."""
    tokens: int = 0
    """Their tokens."""
    changes: int = 0
    """Number of changes, by which entries of a heap are told to be outdated."""

    def first(self) -> tuple[int, int, Sample]:
        """Returns batch and number of the sample to begin before the others."""
        while self.queue[0][2] not in self.waiting:
            heapq.heappop(self.queue)
        return self.queue[0]

    @property
    def length(self) -> float | None:
        """Length that the others are expected to have; ``None``: not known yet."""
        return self.tokens / self.finished if self.finished else self.expected


_Entry = tuple[int, float, int, int, _Siblings]
"""Batch, order in its heap, number, changes when it was written, and the samples."""


class LongestFirst:
    """Says which of the waiting requests is next.

    Of one batch these are, in this order: a sample of each prompt of which nothing is
    known and none runs; then the longest. A prompt whose probe runs longer than others
    took is expected to be as long as those that took longer than that. Nothing waits
    for a probe: as long as requests wait, :meth:`next` returns one.

    Times are arguments, in seconds from any moment on.

    Examples:
        >>> order = LongestFirst()
        >>> short, long = [[Sample(prompt=p) for _ in range(2)] for p in "ab"]
        >>> for sample in (*short, *long):
        ...     order.add(sample)
        >>> [order.next(now=0.0) in group for group in (short, long)]
        [True, True]
        >>> order.end(short[0], now=1.0, length=10)
        >>> order.end(long[0], now=9.0, length=90)
        >>> order.next(now=9.0) is long[1]
        True
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, _Siblings] = {}
        self._known: OrderedDict[Hashable, float] = OrderedDict()
        self._numbers = itertools.count()
        # Prompts of which nothing is known; whose probe runs; of which a length is.
        self._unknown: list[_Entry] = []
        self._probed: list[_Entry] = []
        self._expected: list[_Entry] = []
        self._lengths = _Lengths()
        self._waiting = 0

    def __len__(self) -> int:
        """Returns the number of requests that wait."""
        return self._waiting

    def add(self, sample: Sample) -> None:
        """Takes a request that waits from now on."""
        siblings = self._open.get(sample.prompt)
        if siblings is None:
            siblings = _Siblings(
                prompt=sample.prompt, expected=self._known.get(sample.prompt)
            )
            self._open[sample.prompt] = siblings
        number = next(self._numbers)
        heapq.heappush(siblings.queue, (sample.batch, number, sample))
        siblings.waiting.add(sample)
        self._waiting += 1
        if siblings.first()[1] == number:
            self._enter(siblings)

    def next(self, now: float) -> Sample | None:
        """Returns the request to begin now; ``None``: none waits."""
        found: list[tuple[tuple[int, float, int], list[_Entry]]] = []
        for heap in (self._unknown, self._probed, self._expected):
            while heap and heap[0][3] != heap[0][4].changes:
                heapq.heappop(heap)
            if heap:
                batch, order, number, _, _ = heap[0]
                if heap is self._probed:
                    order = -self._lengths.beyond(now - order)
                found.append(((batch, order, number), heap))
        if not found:
            return None
        _, heap = min(found, key=lambda each: each[0])
        siblings = heap[0][4]
        _, _, sample = siblings.first()
        siblings.waiting.remove(sample)
        siblings.running[sample] = now
        self._waiting -= 1
        self._enter(siblings)
        return sample

    def discard(self, sample: Sample) -> None:
        """Forgets a request that waits and is not wanted any more."""
        siblings = self._open[sample.prompt]
        siblings.waiting.remove(sample)
        self._waiting -= 1
        self._enter(siblings)

    def end(self, sample: Sample, now: float, length: int | None) -> None:
        """Takes the length of a response that has ended; ``None``: it failed."""
        siblings = self._open[sample.prompt]
        began = siblings.running.pop(sample)
        if length is not None:
            siblings.finished += 1
            siblings.tokens += length
            self._lengths.add(length, now - began)
        self._enter(siblings)

    def _enter(self, siblings: _Siblings) -> None:
        """Puts a prompt where its first waiting sample belongs now."""
        siblings.changes += 1
        if not siblings.waiting:
            if not siblings.running:
                self._close(siblings)
            return
        batch, number, _ = siblings.first()
        heap, order = self._unknown, -math.inf
        if siblings.length is not None:
            heap, order = self._expected, -siblings.length
        elif siblings.running:
            # The probe that runs longest has the most tokens.
            heap, order = self._probed, next(iter(siblings.running.values()))
        heapq.heappush(heap, (batch, order, number, siblings.changes, siblings))

    def _close(self, siblings: _Siblings) -> None:
        """Remembers the length of a prompt whose samples are done."""
        del self._open[siblings.prompt]
        if siblings.length is None:
            return
        self._known[siblings.prompt] = siblings.length
        self._known.move_to_end(siblings.prompt)
        while len(self._known) > MOST_PROMPTS:
            self._known.popitem(last=False)


class _Lengths:
    """Lengths of the latest responses, and how fast they were generated."""

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        self._tokens = DECAY * self._tokens + tokens
        self._seconds = DECAY * self._seconds + seconds
        self._latest.append(tokens)
        bisect.insort(self._sorted, tokens)
        if len(self._latest) > MOST_LENGTHS:
            oldest = self._latest.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]

    def beyond(self, seconds: float) -> float:
        """Returns the mean length of responses that take longer than that."""
        tokens = seconds * self._tokens / self._seconds if self._seconds else 0.0
        longer = self._sorted[bisect.bisect_right(self._sorted, tokens) :]
        return sum(longer) / len(longer) if longer else tokens
