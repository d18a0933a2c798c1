r"""How long generation stands still for a weight update, beyond the update itself.

A client streams tokens through an update. The longest time between two of them, less
the duration that the update reports, is what the update costs beside its own time.

    python benchmarks/update_pause.py                    # CPU
    python benchmarks/update_pause.py --shapes 7b        # two GPUs
    python benchmarks/update_pause.py --pause-mode in_place
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import threading
import time
from typing import Any

import requests
import torch
from transformers import AutoModelForCausalLM

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme
from torchrl_sglang.cli.bench.shapes import SHAPES, save_model, save_shapes
from torchrl_sglang.testing.gpu import server_arguments
from torchrl_sglang.types import PauseMode

TOKENS_BEFORE = 32
"""Tokens that come before an update begins."""

TOKENS = 4000
"""Tokens of a stream: more than come before and during an update."""


class Stream:
    """A client that notes when tokens come, until it is told to stop."""

    def __init__(self, url: str) -> None:
        self.times: list[float] = []
        self.begun = threading.Event()
        self.stop = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        body = {
            "input_ids": list(range(5, 69)),
            "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(
            f"{self._url}/generate", json=body, stream=True, timeout=600
        ) as answer:
            for line in answer.iter_lines():
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
        """Waits for a token after the update, and returns the longest wait."""
        count = len(self.times)
        while len(self.times) < count + TOKENS_BEFORE and self._thread.is_alive():
            time.sleep(0.01)
        self.stop.set()
        self._thread.join(60)
        first = max(i for i, moment in enumerate(self.times) if moment <= since)
        around = self.times[first:]
        return max(b - a for a, b in itertools.pairwise(around))


def show_pause(engine: AsyncSGLang, model: Any, mode: PauseMode, repeats: int) -> None:
    """Measures and prints.

    Args:
        engine: one server.
        model: weights to send.
        mode: what happens to the stream.
        repeats: number of updates.
    """
    sender = SGLangWeightSyncScheme(engine, pause_mode=mode).create_sender()
    sender.update_weights(model)
    beyond, updates = [], []
    for _ in range(repeats):
        stream = Stream(engine.server_url)
        if not stream.begun.wait(120):
            raise SystemExit("No tokens came.")
        since = time.perf_counter()
        report = sender.update_weights(model)
        beyond.append(stream.longest_gap(since) - report.seconds)
        updates.append(report.seconds)
    sender.shutdown()
    print(
        f"{mode}: an update of {statistics.median(updates):.3f} s stops generation for "
        f"{statistics.median(beyond):+.3f} s beyond that (worst {max(beyond):+.3f} s).",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=["cpu", *SHAPES], default="cpu")
    parser.add_argument("--pause-mode", choices=["retract", "in_place"])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shapes == "cpu":
            path, needed = save_model("35m", folder)
            engine = AsyncSGLang.from_pretrained(path, device="cpu", **needed)
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            path = save_shapes(arguments.shapes, folder)
            engine = AsyncSGLang.from_pretrained(
                path,
                device="cuda",
                load_format="dummy",
                base_gpu_id=1,
                start_timeout=400,
                **server_arguments(),
            )
            model = {
                name: torch.randn(shape, dtype=dtype, device="cuda:0") * 0.02
                for name, (dtype, shape) in engine.get_model_metadata().items()
            }
        with engine:
            show_pause(
                engine, model, arguments.pause_mode or "retract", arguments.repeats
            )


if __name__ == "__main__":
    main()
