r"""How long generation pauses for a weight update, beyond the update itself.

A client streams tokens through an update. The longest time between two of them, less
the duration that the update reports, is what the update costs beside its own time.

    python benchmarks/update_pause.py                    # CPU
    python benchmarks/update_pause.py 7b --device cuda        # two GPUs
    python benchmarks/update_pause.py 7b --device cuda --transport cuda_ipc \
        --pause-mode in_place                                         # one GPU
"""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time

import requests

from script import read_options
from torchrl_sglang import SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.measure import exact_length, random_weights, start_engine

TOKENS_BEFORE = 32
"""Tokens that come before an update begins."""

PROMPT = list(range(5, 69))
TOKENS = 4000
"""Most tokens of a stream: more than come before and during an update."""


class Stream:
    """A raw client that records when its tokens arrive, until it is told to stop."""

    def __init__(self, url: str, tokens: int) -> None:
        self.times: list[float] = []
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._url = url
        self._tokens = tokens
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {
            "input_ids": PROMPT,
            "sampling_params": exact_length(self._tokens),
            "stream": True,
        }
        with requests.post(
            f"{self._url}/generate", json=body, stream=True, timeout=600
        ) as response:
            for line in response.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                reason = json.loads(line[6:])["meta_info"]["finish_reason"] or {}
                if reason.get("type") == "abort":
                    raise SystemExit("This server ends streams for an update.")
                self.times.append(time.perf_counter())
                if len(self.times) == TOKENS_BEFORE:
                    self.begun.set()
                if self.stop.is_set():
                    return

    def longest_gap(self, since: float) -> float:
        """Waits for tokens after the update; returns the longest time between two."""
        count = len(self.times)
        while len(self.times) < count + TOKENS_BEFORE and self._thread.is_alive():
            time.sleep(0.01)
        self.stop.set()
        self._thread.join(60)
        first = max(i for i, moment in enumerate(self.times) if moment <= since)
        around = self.times[first:]
        return max(b - a for a, b in itertools.pairwise(around))


def main() -> None:
    arguments = read_options(
        __doc__,
        model="35m",
        device="cpu|cuda",
        transport="broadcast|cuda_ipc",
        pause_mode="continue|in_place",
        repeats=5,
    )
    transport, mode = arguments.transport, arguments.pause_mode
    options = {}
    if arguments.device == "cuda":
        options = {"base_gpu_id": int(transport == "broadcast"), "start_timeout": 400}
        options |= {"mem_fraction_static": 0.6}
    with start_engine(arguments.model, device=arguments.device, **options) as engine:
        place = "cuda:0" if arguments.device == "cuda" else "cpu"
        weights = random_weights(engine, place)
        sender = SGLangWeightSyncScheme(
            engine, transport=transport, pause_mode=mode
        ).create_sender()
        sender.update_weights(weights)
        tokens = min(TOKENS, engine.capabilities.max_context - len(PROMPT) - 1)
        beyond, updates = [], []
        for _ in range(arguments.repeats):
            stream = Stream(engine.server_url, tokens)
            if not stream.begun.wait(120):
                raise SystemExit("No tokens came.")
            since = time.perf_counter()
            report = sender.update_weights(weights)
            beyond.append(stream.longest_gap(since) - report.seconds)
            updates.append(report.seconds)
        sender.shutdown()
    extra, worst = statistics.median(beyond), max(beyond)
    print(
        f"{mode}: an update of {statistics.median(updates):.3f} s stops generation for "
        f"{extra:+.3f} s beyond that (worst {worst:+.3f} s)."
    )


if __name__ == "__main__":
    main()
