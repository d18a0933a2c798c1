"""An engine that owns fake servers, each on a machine of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.fake_launcher import FakeDirectory, FakeLauncher, make_engine

from torchrl_sglang import AsyncSGLang


@pytest.fixture
def launcher(tiny_model_path: str) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tiny_model_path, directory=FakeDirectory())
    yield launcher
    launcher.close()


@pytest.fixture
def engine(launcher: FakeLauncher) -> Iterator[AsyncSGLang]:
    with make_engine(launcher) as engine:
        yield engine
