"""SGLang for TorchRL: rollouts at engine speed, weights at link speed.

:class:`AsyncSGLang` is the engine, :class:`SGLangWrapper` the policy that uses it, and
:class:`SGLangWeightSyncScheme` sends new weights to it. A name is imported when it is
first used, so that ``import torchrl_sglang`` is cheap.

A public name is a row of ``_HOME``, with an example in its docstring and its place in
``docs/source/reference``. Errors are in ``errors.py``; values exchanged by layers are
in ``types.py``, also the arguments (``types.py::ServerArgs``) and the capabilities of a
server (``types.py::ServerCapabilities``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrl_sglang.backends.async_sglang import AsyncSGLang
    from torchrl_sglang.backends.contract import RLSGLangEngine
    from torchrl_sglang.backends.launch.local import make_sglang_server
    from torchrl_sglang.backends.launch.ray_launcher import RayLauncher
    from torchrl_sglang.collectors.async_llm_collector import AsyncLLMCollector
    from torchrl_sglang.collectors.groups.environments import EnvironmentGroups
    from torchrl_sglang.collectors.groups.filter import has_variance
    from torchrl_sglang.collectors.groups.functions import FunctionGroups
    from torchrl_sglang.collectors.llm_collector import SGLangLLMCollector
    from torchrl_sglang.collectors.ray_collector import RayAsyncLLMCollector
    from torchrl_sglang.collectors.shared_collector import SharedCollector
    from torchrl_sglang.collectors.timeouts import CollectorTimeouts
    from torchrl_sglang.collectors.weight_sync import attach_weight_sync
    from torchrl_sglang.gateway.agent_groups import AgentGroups
    from torchrl_sglang.gateway.gateway import Gateway
    from torchrl_sglang.gateway.programs.container import Container
    from torchrl_sglang.gateway.programs.program import AgentProgram
    from torchrl_sglang.objectives.advantages import GroupAdvantage
    from torchrl_sglang.objectives.config import RolloutCorrectionConfig
    from torchrl_sglang.objectives.divergences import Distillation
    from torchrl_sglang.objectives.losses import (
        CorrectedCISPOLoss,
        CorrectedGRPOLoss,
        CorrectedGSPOLoss,
    )
    from torchrl_sglang.objectives.routing import replay_routing
    from torchrl_sglang.objectives.sampling import replay_sampling
    from torchrl_sglang.objectives.supervised import SFTLoss
    from torchrl_sglang.objectives.transform import OffPolicyCorrection
    from torchrl_sglang.policies.dataset import batch_to_dataset, dataset_to_batch
    from torchrl_sglang.policies.outputs import GenerationInfo
    from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
    from torchrl_sglang.recording.recorder import RunRecorder
    from torchrl_sglang.requests.token_columns import TokenColumn
    from torchrl_sglang.rollouts import load_rollouts
    from torchrl_sglang.telemetry.figures import StepFigures
    from torchrl_sglang.telemetry.server import serve_metrics
    from torchrl_sglang.trainers.grpo import GRPO
    from torchrl_sglang.trainers.learner import Learner
    from torchrl_sglang.trainers.methods import overlong_penalty
    from torchrl_sglang.trainers.teacher import Teacher
    from torchrl_sglang.weight_update.encodings.base import WeightEncoding
    from torchrl_sglang.weight_update.scheme import (
        SGLangWeightReceiver,
        SGLangWeightSyncScheme,
    )
    from torchrl_sglang.weight_update.sender import SGLangWeightSender
    from torchrl_sglang.weight_update.sources.resolve import get_model_metadata

_HOME = {
    "AgentGroups": "gateway.agent_groups",
    "AgentProgram": "gateway.programs.program",
    "AsyncLLMCollector": "collectors.async_llm_collector",
    "AsyncSGLang": "backends.async_sglang",
    "Container": "gateway.programs.container",
    "CorrectedCISPOLoss": "objectives.losses",
    "CorrectedGRPOLoss": "objectives.losses",
    "CorrectedGSPOLoss": "objectives.losses",
    "Distillation": "objectives.divergences",
    "EnvironmentGroups": "collectors.groups.environments",
    "FunctionGroups": "collectors.groups.functions",
    "GRPO": "trainers.grpo",
    "Gateway": "gateway.gateway",
    "CollectorTimeouts": "collectors.timeouts",
    "GenerationInfo": "policies.outputs",
    "GroupAdvantage": "objectives.advantages",
    "Learner": "trainers.learner",
    "OffPolicyCorrection": "objectives.transform",
    "RLSGLangEngine": "backends.contract",
    "RayAsyncLLMCollector": "collectors.ray_collector",
    "RayLauncher": "backends.launch.ray_launcher",
    "RolloutCorrectionConfig": "objectives.config",
    "RunRecorder": "recording.recorder",
    "SFTLoss": "objectives.supervised",
    "SGLangLLMCollector": "collectors.llm_collector",
    "SGLangWeightReceiver": "weight_update.scheme",
    "SGLangWeightSender": "weight_update.sender",
    "SGLangWeightSyncScheme": "weight_update.scheme",
    "SGLangWrapper": "policies.sglang_wrapper",
    "SharedCollector": "collectors.shared_collector",
    "StepFigures": "telemetry.figures",
    "Teacher": "trainers.teacher",
    "TokenColumn": "requests.token_columns",
    "WeightEncoding": "weight_update.encodings.base",
    "attach_weight_sync": "collectors.weight_sync",
    "batch_to_dataset": "policies.dataset",
    "dataset_to_batch": "policies.dataset",
    "get_model_metadata": "weight_update.sources.resolve",
    "has_variance": "collectors.groups.filter",
    "load_rollouts": "rollouts",
    "make_sglang_server": "backends.launch.local",
    "overlong_penalty": "trainers.methods",
    "replay_routing": "objectives.routing",
    "replay_sampling": "objectives.sampling",
    "serve_metrics": "telemetry.server",
}
"""Public name -> its module."""

__all__ = [
    "GRPO",
    "AgentGroups",
    "AgentProgram",
    "AsyncLLMCollector",
    "AsyncSGLang",
    "CollectorTimeouts",
    "Container",
    "CorrectedCISPOLoss",
    "CorrectedGRPOLoss",
    "CorrectedGSPOLoss",
    "Distillation",
    "EnvironmentGroups",
    "FunctionGroups",
    "Gateway",
    "GenerationInfo",
    "GroupAdvantage",
    "Learner",
    "OffPolicyCorrection",
    "RLSGLangEngine",
    "RayAsyncLLMCollector",
    "RayLauncher",
    "RolloutCorrectionConfig",
    "RunRecorder",
    "SFTLoss",
    "SGLangLLMCollector",
    "SGLangWeightReceiver",
    "SGLangWeightSender",
    "SGLangWeightSyncScheme",
    "SGLangWrapper",
    "SharedCollector",
    "StepFigures",
    "Teacher",
    "TokenColumn",
    "WeightEncoding",
    "__version__",
    "attach_weight_sync",
    "batch_to_dataset",
    "dataset_to_batch",
    "get_model_metadata",
    "has_variance",
    "load_rollouts",
    "make_sglang_server",
    "overlong_penalty",
    "replay_routing",
    "replay_sampling",
    "serve_metrics",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
