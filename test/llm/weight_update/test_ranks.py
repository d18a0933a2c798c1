"""Models that are spread over ranks: real processes, gloo, and the real engine."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from pathlib import Path

import pytest
from helpers.forked_starts import trainer_python

PROGRAM = Path(__file__).with_name("rank_program.py")

TIMEOUT = 60.0
"""Seconds for one task."""

START_TIMEOUT = 300.0
"""Seconds for two processes to import PyTorch and transformers, on two busy cores."""

SEED = int.from_bytes(os.urandom(3), "big")
BUCKET = 70_000
LARGEST = 256 * 64 * 4
"""Bytes of the largest tensor of the tiny model."""


class RankPair:
    """Two processes of one trainer."""

    def __init__(self, folder, server: str, model: str) -> None:
        arguments = [str(folder / "store"), server, model]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        self.logs = [folder / f"rank{rank}.log" for rank in range(2)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [trainer_python(), str(PROGRAM), str(rank), "2", *arguments],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=file,
                        text=True,
                        bufsize=1,
                        env=environment,
                    )
                )
        try:
            assert self.answers(START_TIMEOUT) == [{"value": "ready"}] * 2, self.log()
        except BaseException:
            self.close()
            raise

    def __call__(self, task: str, **arguments) -> list[dict]:
        """Has both ranks do the same, and returns what they answer."""
        for process in self.processes:
            process.stdin.write(json.dumps([task, arguments]) + "\n")
        return self.answers()

    def answers(self, timeout: float = TIMEOUT) -> list[dict]:
        deadline = time.monotonic() + timeout
        found: dict[int, dict] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(found) < len(self.processes):
                left = deadline - time.monotonic()
                ready = selector.select(left) if left > 0 else []
                if not ready:
                    waiting = sorted({0, 1} - found.keys())
                    pytest.fail(f"Ranks {waiting} do not answer.\n{self.log()}")
                for key, _ in ready:
                    line = key.fileobj.readline()
                    found[key.data] = json.loads(line) if line else {"error": "ended"}
                    selector.unregister(key.fileobj)
        return [found[rank] for rank in range(2)]

    def log(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.logs)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(60)
            process.stdin.close()
            process.stdout.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory, session_engine, tiny_model_path):
    pair = RankPair(
        tmp_path_factory.mktemp("ranks"), session_engine.server_url, tiny_model_path
    )
    yield pair
    pair.close()


@pytest.fixture
def ranks(pair, restored_engine):
    """Two ranks, and an engine whose weights are put back afterwards."""
    return pair


def values(answers) -> list:
    assert all("value" in answer for answer in answers), answers
    return [answer["value"] for answer in answers]


@pytest.mark.parametrize(
    "kind",
    ["plain", "replicated", "offloaded", "mixed", "half", "state dict", "exporter"],
)
def test_sharded_models_reach_the_engine(ranks, kind):
    first, second = values(ranks("sharded", seed=SEED, kind=kind, bucket_bytes=BUCKET))
    # The first rank sent it, and the second one knows, without a server of its own.
    assert first["report"] == second["report"]
    assert first["report"]["tensors"] == 27
    assert first["report"]["buckets"] > 5
    assert first["difference"] < 1e-4
    # Both gathered everything, and held no more than a bucket of it.
    for rank in (first, second):
        assert rank["gathered"] == 27
        # A shard that is the only one of its tensor is not copied.
        if kind != "replicated":
            assert LARGEST // 2 <= rank["most"] <= BUCKET


def test_a_large_bucket_holds_all(ranks):
    """So the bound on what is alive is one that can be broken."""
    first, second = values(
        ranks("sharded", seed=SEED, kind="plain", bucket_bytes=1 << 30)
    )
    assert first["most"] > 4 * BUCKET
    # Who does not send lets go at once, whatever a bucket holds; on a busy machine, a
    # thread of Gloo's lets go of a tensor a moment later.
    assert second["most"] <= 3 * LARGEST


def test_sharded_adapters_are_merged(ranks):
    first, second = values(ranks("sharded_adapters", seed=SEED))
    assert first["report"] == second["report"]
    assert first["difference"] < 1e-4
    assert first["gathered"] == second["gathered"] > 27


@pytest.mark.parametrize(
    ("reason", "error", "words"),
    [
        ("mismatch", "WeightMismatchError", "of another shape"),
        ("locked", "WeightSyncStateError", "in progress"),
        ("different", "WeightTransferError", "send the same model on all ranks"),
        ("half way", "WeightTransferError", "mix of old and new"),
    ],
)
def test_all_ranks_raise_and_none_hangs(ranks, reason, error, words):
    found = values(ranks("refused", seed=SEED, reason=reason))
    for rank in found:
        (failure,) = rank["errors"]
        assert (failure["type"], failure["seconds"] < 60) == (error, True), failure
        assert words in failure["text"]
        if reason != "half way":
            assert failure["gathered"] == 0
        if error == "WeightTransferError":
            assert failure["untouched"] == (reason != "half way")
    assert found[0]["errors"][0]["text"] == found[1]["errors"][0]["text"]
    # The ranks are in step afterwards, and the next update heals the servers.
    assert found[0]["report"] == found[1]["report"]
    assert found[0]["difference"] < 1e-4


def test_a_server_that_is_gone(ranks):
    for answer in ranks("no_server", seed=SEED):
        assert answer["error"] == "ServerUnavailableError"
        assert answer["seconds"] < 60


def test_an_error_of_one_rank_is_raised_by_every_rank(ranks):
    first, second = ranks("other_error")
    assert first["error"] == "ZeroDivisionError"
    assert second["error"] == "WeightTransferError"
    assert "ZeroDivisionError: nobody expected this" in second["text"]


def test_copies_are_sent_by_the_first_rank(ranks):
    first, second = values(ranks("copies", seed=SEED))
    assert first["difference"] < 1e-4
    assert first["report"]["tensors"] == 27
    assert second["report"] == {
        "version": "",
        "transport": "none",
        "tensors": 0,
        "buckets": 0,
    }


def test_a_collector_of_a_copy_is_refused(ranks):
    """It would not learn the versions of the weights that the first rank sends."""
    first, second = values(ranks("copies_with_collectors", seed=SEED))
    assert first == "broadcast"
    assert "this rank's AsyncLLMCollector does not learn their versions" in second
    assert "SharedCollector" in second


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("", ""),
        ("no handle", "Rank 1 of the trainer has no handles: no memory for a handle"),
        ("refused", "The server does not answer."),
    ],
)
def test_handles_of_each_rank_reach_its_server(ranks, reason, message):
    """And what fails on one rank ends the update on both; the next one succeeds."""
    first, second = values(ranks("by_handles", seed=SEED, reason=reason))
    assert first["report"] == second["report"]
    assert first["report"]["transport"] == "cuda_ipc"
    assert first["report"]["buckets"] > 5
    assert first["difference"] < 1e-4
    for rank in (first, second):
        assert message in rank["failed"]
        # Two buckets, and what is gathered of the next one.
        assert rank["most"] <= 3 * BUCKET + LARGEST
    # The first rank counts requests, the second one what it packed.
    assert first["packed"] == second["packed"] == first["report"]["buckets"]


def test_a_rank_with_a_model_of_its_own(ranks):
    first, _ = values(ranks("alone", seed=SEED))
    assert first["difference"] < 1e-4


def test_sharded_experts_are_sent_one_by_one(ranks):
    for rank in values(ranks("sharded_experts")):
        assert rank == {"names": 39, "served": True, "same": True}


def test_an_exporter_of_several_ranks(ranks):
    first, second = values(ranks("exported_together", seed=SEED))
    assert first["report"] == second["report"]
    assert first["difference"] < 1e-4
    # Once for the names, and once for each update, on both.
    assert first["exports"] == second["exports"] == 3


def test_the_older_sharding_is_refused(ranks):
    for answer in ranks("older_sharding"):
        assert answer["error"] == "ConfigurationError"
        assert "fully_shard" in answer["text"]


def test_a_rank_that_dies(tmp_path, restored_engine, tiny_model_path):
    pair = RankPair(tmp_path, restored_engine.server_url, tiny_model_path)
    try:
        # Between two requests of an update.
        first, second = pair("by_handles", seed=SEED, reason="dies")
        assert second == {"error": "ended"}
        assert first["error"] == "WeightTransferError", first
        assert "was lost" in first["text"]
        assert first["seconds"] < 60
    finally:
        pair.close()
    (tmp_path / "store").unlink()
    pair = RankPair(tmp_path, restored_engine.server_url, tiny_model_path)
    try:
        first, second = pair("waits_for_nobody", seed=SEED)
        assert first == {"error": "ended"}
        assert second["error"] == "WeightTransferError", second
        assert "was lost" in second["text"]
        assert second["seconds"] < 60
    finally:
        pair.close()
