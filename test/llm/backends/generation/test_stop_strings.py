"""Where a response ends, decided without a server."""

from __future__ import annotations

import pytest

from torchrl_sglang.requests.resume import cut, stops_of
from torchrl_sglang.types import Completion, VersionSpan

WORDS = ["a", "b", "cd", "e", "é"]


def decode(ids) -> str:
    return "".join(WORDS[i] for i in ids)


def decode_bytes(ids) -> str:
    return bytes(ids).decode(errors="replace")


def completion(ids, **kwargs) -> Completion:
    kwargs.setdefault("finish_reason", "length")
    return Completion(
        token_ids=list(ids),
        log_probs=[-float(i) for i in range(len(ids))],
        top_token_ids=[[i] for i in ids],
        top_log_probs=[[-0.5] for _ in ids],
        versions=(
            VersionSpan(version="1", start=0, end=2),
            VersionSpan(version="2", start=2, end=len(ids)),
        ),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("ids", "stops", "kept", "kept_without"),
    [
        ([0, 1, 2, 3], ["cd"], 3, 2),
        ([0, 1, 2, 3], ["bc"], 3, 1),  # Begins in one token and ends inside another.
        ([0, 1, 2, 3], ["c"], 3, 2),  # Inside one token.
        ([0, 1, 2, 3], ["a"], 1, 0),
        ([0, 1, 2, 3], ["e", "b"], 2, 1),  # The first to come, not the first named.
        ([0, 1, 2, 3], ["abcde"], 4, 0),
        ([0, 1, 0, 1, 3], ["ab"], 2, 0),
    ],
)
def test_cut(ids, stops, kept, kept_without):
    for include, size in [(True, kept), (False, kept_without)]:
        short = cut(completion(ids), stops_of({"stop": stops}), decode, include=include)
        assert short.token_ids == ids[:size]
        assert short.finish_reason == "stop"
        assert short.matched_stop in stops
        assert len(short.log_probs) == size
        assert len(short.top_token_ids) == len(short.top_log_probs) == size
        assert [span.end for span in short.versions][-1:] == ([size] if size else [])
    text = decode(
        cut(completion(ids), stops_of({"stop": stops}), decode, include=False).token_ids
    )
    assert not any(stop in text for stop in stops)


def test_without_a_match_nothing_changes():
    whole = completion([0, 1, 2])
    assert cut(whole, stops_of({"stop": ["x", "ba"]}), decode, include=True) is whole


def test_characters_of_several_tokens():
    """A character that is not whole yet neither hides nor moves a stop string."""
    ids = list("😀é.x".encode())
    assert decode_bytes(
        cut(
            completion(ids), stops_of({"stop": "."}), decode_bytes, include=True
        ).token_ids
    )
    without = cut(completion(ids), stops_of({"stop": "."}), decode_bytes, include=False)
    assert decode_bytes(without.token_ids) == "😀é"


def test_regular_expressions():
    stops = stops_of({"stop_regex": ["c+", "b[x-z]"], "stop": ["e"]})
    short = cut(completion([0, 1, 2, 3]), stops, decode, include=True)
    assert (short.token_ids, short.matched_stop) == ([0, 1, 2], "c+")
