"""The engine of this package keeps the contract that others can prove theirs with."""

from __future__ import annotations

import pytest

from torchrl_sglang.testing.engine_contract import EngineContract


class TestAsyncSGLang(EngineContract):
    @pytest.fixture(autouse=True)
    def _use(self, engine):
        self._engine = engine

    def engine(self):
        return self._engine


class _Careless:
    """Leaves log-probs out, and answers what was not asked."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate_requests(self, requests, **options):
        (answer,) = self._engine.generate(input_ids=[5], max_new_tokens=1)
        return [answer] * len(requests)

    async def agenerate_requests(self, requests, **options):
        return []

    newest_version = 3


class TestThatFails(TestAsyncSGLang):
    """The contract finds an engine that does not keep it."""

    def engine(self):
        return _Careless(self._engine)

    @pytest.fixture(autouse=True)
    def _fails(self, request):
        request.applymarker(
            pytest.mark.xfail(
                raises=(AssertionError, ValueError), strict=True, reason="on purpose"
            )
        )
