"""The tasks of an environment: questions, and the degrees that answer them."""

from __future__ import annotations

import sys
from pathlib import Path

QUESTIONS = {
    "What is the weather in Rome?": "21",
    "What is the weather in Oslo?": "7",
}

# Adapters need this package's errors alone, which need nothing else.
sys.path.append(str(Path(__file__).parents[3]))


def get_weather(city: str) -> str:
    """Returns the weather of a city.

    Args:
        city: name of the city.
    """
    degrees = {"Rome": 21, "Oslo": 7}
    return f"It is {degrees[city]} degrees in {city}."
