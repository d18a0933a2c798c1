"""The recipe's modules and its configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from helpers import recipe as recipe_helper
from helpers.memory_saver import write_saver_python
from helpers.recipe import FOLDER, SMALL
from torchrl._utils import logger as torchrl_logger

if TYPE_CHECKING:
    from omegaconf import DictConfig


@pytest.fixture(scope="session")
def recipe() -> Path:
    """Folder of the recipe."""
    return FOLDER


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Callable[..., DictConfig]]:
    """Composes a configuration for a CPU, as hydra does for the scripts."""
    # The recipe makes its process quiet, and this one is that of other tests, too.
    level = torchrl_logger.level
    yield partial(recipe_helper.compose, tmp_path / "run")
    torchrl_logger.setLevel(level)


@pytest.fixture
def small(compose: Any, tiny_model_path: str, engine: Any) -> Callable[..., DictConfig]:
    """Composes a small run on the servers of the test session."""

    def composed(mode: str, *overrides: str) -> DictConfig:
        return compose(
            mode,
            *SMALL,
            f"model.name={tiny_model_path}",
            f"inference_model.url={engine.server_url}",
            *overrides,
        )

    return composed


@pytest.fixture
def saver_python(tmp_path: Path) -> Path:
    """An interpreter whose servers can sleep."""
    return write_saver_python(tmp_path)


@pytest.fixture(autouse=True)
def same_random_numbers() -> Any:
    """Runs set the seed of all random numbers."""
    with torch.random.fork_rng(devices=[]):
        yield
