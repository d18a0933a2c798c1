"""A taskset of verifiers.v1 that even a random model can learn: write vowels."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["VowelsTaskset"]

NUM_TASKS = 16


class VowelsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def vowels(self, trace: vf.Trace) -> float:
        return sum(letter in "aeiou" for letter in trace.last_reply) / 4

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class VowelsTaskset(vf.Taskset[VowelsTask, vf.TasksetConfig]):
    def load(self) -> Iterable[VowelsTask]:
        for number in range(NUM_TASKS):
            yield VowelsTask(vf.TaskData(prompt=f"Say {number}."), self.config.task)
