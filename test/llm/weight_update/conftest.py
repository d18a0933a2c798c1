"""One engine of each generation of SGLang, with update sessions and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchrl_sglang import AsyncSGLang


@pytest.fixture(scope="module")
def older_engine(tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """A server from before update sessions; it cannot flush while requests wait."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", sglang_version="0.5.20"
    ) as engine:
        yield engine


@pytest.fixture(params=["sessions", "no sessions"])
def any_engine(request: pytest.FixtureRequest) -> AsyncSGLang:
    """An engine of each generation; a test may change its weights."""
    name = "restored_engine" if request.param == "sessions" else "older_engine"
    engine: AsyncSGLang = request.getfixturevalue(name)
    assert engine.capabilities.needs_update_session == (request.param == "sessions")
    return engine
