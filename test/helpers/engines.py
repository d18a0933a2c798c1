"""Engine objects that healthy servers would not give."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

from torchrl_sglang import AsyncSGLang


def with_capabilities(engine: AsyncSGLang, **capabilities: Any) -> AsyncSGLang:
    """Returns an engine for the same servers that attributes others to them."""
    changed = copy.copy(engine)
    changed.capabilities = replace(engine.capabilities, **capabilities)
    return pickle.loads(pickle.dumps(changed))
