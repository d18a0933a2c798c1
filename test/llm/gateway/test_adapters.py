"""Adapters without their libraries; `make test-agents` runs them with these."""

from __future__ import annotations

import sys

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.adapters.inspect_task import InspectAgent


@pytest.mark.parametrize(
    ("make", "module", "told"),
    [
        (InspectAgent, "inspect_ai", "pip install 'inspect-ai>=0.3.285'"),
    ],
)
def test_what_has_to_be_installed(monkeypatch, make, module, told):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=told):
        make(object())
