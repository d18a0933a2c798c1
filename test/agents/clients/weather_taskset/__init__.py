"""A taskset of verifiers.v1 with a tool, a reward and a metric."""

from __future__ import annotations

import os
from collections.abc import Iterable

import verifiers.v1 as vf

from weather_taskset.tools import WeatherTools

__all__ = ["WeatherTaskset"]

QUESTIONS = {"What is the weather in Rome?": "21", "And in Oslo?": "3"}


class WeatherData(vf.TaskData):
    answer: str


class WeatherConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class WeatherTask(vf.Task[WeatherData, vf.State, WeatherConfig]):
    @classmethod
    def toolsets(cls, config: WeatherConfig) -> list[vf.Toolset]:
        return [WeatherTools(config.tools)] if os.environ.get("WITH_TOOLS") else []

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            words = "a reward that fails" * int(os.environ.get("WORDS", "1"))
            raise ValueError(words)
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        if name := os.environ.get("METRIC"):
            trace.record_metric(name, 0.25)
        return float(len(trace.last_reply))


class WeatherTasksetConfig(vf.TasksetConfig):
    task: WeatherConfig = WeatherConfig()


class WeatherTaskset(vf.Taskset[WeatherTask, WeatherTasksetConfig]):
    def load(self) -> Iterable[WeatherTask]:
        for question, answer in QUESTIONS.items():
            data = WeatherData(prompt=question, answer=answer)
            yield WeatherTask(data, self.config.task)
