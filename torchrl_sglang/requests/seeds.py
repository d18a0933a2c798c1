"""A seed for every sample, from its place in the run and not from its time. Pure.

Python's ``hash`` differs between processes, and a generator's next number depends on
who asked first. A hash of the sample's place in the run depends on neither.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

SeedOf: TypeAlias = Callable[[int, Sequence[int]], int]
"""Returns the seed of a conversation's response, by its turn and its prompt."""


def sample_seed(
    run: int, position: int, sample: int, turn: int, prompt: Sequence[int]
) -> int:
    """Returns the seed of one response: a positive number of 63 bits.

    ``position`` counts the prompts of a run from epoch to epoch, so that the second
    visit of a prompt does not repeat the first. ``sample`` is the number of the
    conversation in its group, ``turn`` the number of the response in it.
    """
    place = struct.pack("<4Q", run % 2**64, position, sample, turn)
    tokens = b"".join(struct.pack("<q", token) for token in prompt)
    digest = blake2b(place + tokens, digest_size=8).digest()
    # SGLang keeps seeds in tensors of signed 64-bit numbers.
    return int.from_bytes(digest, "little") >> 1


@dataclass(kw_only=True, slots=True)
class SampleSeeds:
    """The seeds of a run's samples."""

    run: int
    """Seed of the run."""


def with_sample_seed(params: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Returns the parameters of one of a request's samples; seeds differ.

    Examples:
        >>> with_sample_seed({"sampling_seed": 2**63 - 1}, 1)
        {'sampling_seed': -9223372036854775808}
    """
    seed = params.get("sampling_seed")
    if type(seed) is not int or index == 0:
        return params
    # SGLang's seeds are signed numbers of 64 bits.
    return {**params, "sampling_seed": (seed + index + 2**63) % 2**64 - 2**63}


def seeds_at(seeds: SampleSeeds | None, position: int, sample: int) -> SeedOf | None:
    """Returns the seeds of one conversation; ``None``: its policy has them."""
    if seeds is None:
        return None
    return partial(sample_seed, seeds.run, position, sample)
