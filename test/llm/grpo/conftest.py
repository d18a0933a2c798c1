"""The recipe's modules and its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.memory_saver import write_saver_python
from helpers.recipe import FOLDER, SMALL
from omegaconf import DictConfig

# As for a script, whose folder is the first one.
sys.path.insert(0, str(FOLDER))


@pytest.fixture(scope="session")
def recipe() -> Path:
    """Folder of the recipe."""
    return FOLDER


@pytest.fixture
def compose(tmp_path: Path) -> Callable[..., DictConfig]:
    """Composes a configuration for a CPU, as hydra does for the scripts."""
    import hydra

    def composed(mode: str, *overrides: str) -> DictConfig:
        with hydra.initialize_config_dir(config_dir=str(FOLDER / "config")):
            return hydra.compose(
                "grpo_gsm8k",
                overrides=[
                    f"mode={mode}",
                    "+debug=cpu",
                    f"logging.dir={tmp_path / 'run'}",
                    *overrides,
                ],
            )

    return composed


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
