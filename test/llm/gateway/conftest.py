"""A server that can be told what its model writes, for the tests of the gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.tool_template import gateway_of

from torchrl_sglang import AsyncSGLang, Gateway


@pytest.fixture(scope="session")
def grammar_engine(tiny_model_path: str) -> Iterator[AsyncSGLang]:
    """A running engine with grammars. A test that changes its weights restores them."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", grammar_backend="xgrammar"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def gateway(grammar_engine: AsyncSGLang) -> Iterator[Gateway]:
    """A gateway whose model writes tool calls; several files have another one."""
    with gateway_of(grammar_engine) as gateway:
        yield gateway
