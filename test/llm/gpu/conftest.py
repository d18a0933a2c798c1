"""The folder of the model that the tests on GPUs serve."""

from __future__ import annotations

import pytest
from helpers.gpu import MODEL

from torchrl_sglang.testing.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def gpu_model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the tiny model in bfloat16."""
    return str(save_tiny_model(tmp_path_factory.mktemp("gpu") / "model", **MODEL))
