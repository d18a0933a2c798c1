"""The structured answer of the scenarios, for frameworks that read models."""

from __future__ import annotations

from pydantic import BaseModel


class Weather(BaseModel):
    city: str
    degrees: int
