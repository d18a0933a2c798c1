"""The tool server of the taskset, which verifiers starts as a module."""

from __future__ import annotations

import verifiers.v1 as vf


class WeatherTools(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def get_weather(self, city: str) -> str:
        """Returns the weather of a city.

        Args:
            city: its name.
        """
        return f"It is 21 degrees in {city}."


if __name__ == "__main__":
    WeatherTools.run()
