"""Arguments of a run: names, types, defaults, documentation and checks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, TypeAlias

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.collectors.scheduling.prompts import count_tasks
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.attention import PACKED
from torchrl_sglang.objectives.config import RolloutCorrectionConfig
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.objectives.packing import Packing, check_packing
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.support.checks import (
    check_auto,
    check_count,
    check_flag,
    check_keywords,
    check_positive,
)
from torchrl_sglang.support.fields import check_fields
from torchrl_sglang.support.user_code import refuse_coroutine
from torchrl_sglang.trainers.checkpoints import Resume
from torchrl_sglang.trainers.deterministic import check_repeatable
from torchrl_sglang.trainers.placement import check_engine, check_placement
from torchrl_sglang.trainers.progress import StepsShown
from torchrl_sglang.trainers.sampling import read_sampling, warn_of_greedy_groups
from torchrl_sglang.types import LogProbsMode
from torchrl_sglang.weight_update.scheme import SGLangWeightSyncScheme

MAPPING, FUNCTION = "a mapping of arguments", "a function"


def check_part(*kinds: str, awaited: bool = False) -> Callable[[str, Any], Any]:
    """Returns a check of a part of a run, accepted as ``MAPPING`` or ``FUNCTION``.

    A coroutine function is refused unless it is ``awaited``.
    """

    def check(name: str, value: Any) -> Any:
        kind = MAPPING if isinstance(value, Mapping) else FUNCTION
        if kind not in kinds or not (kind == MAPPING or callable(value)):
            raise ConfigurationError(
                f"{name} must be {' or '.join(kinds)}, got {value!r}."
            )
        if not awaited:
            refuse_coroutine(name, value, "what it returns is not awaited")
        return value

    return check


def check_model(name: str, model: Any) -> Any:
    """Returns a model, or its folder or hub name with the user's home."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigurationError(
            f"{name} must be a folder, a hub name or a model, got {model!r}."
        )
    return os.path.expanduser(model)


def check_attention(name: str, attention: Any) -> Any:
    """Checks the name of an attention of transformers, but not for its packages."""
    registered = ALL_ATTENTION_FUNCTIONS.valid_keys()
    names = ["eager", *(key for key in registered if key != PACKED)]
    # Kernels on the hub have names with a slash.
    is_kernel = isinstance(attention, str) and "/" in attention
    if attention not in names and not is_kernel:
        raise ConfigurationError(
            f"{name}={attention!r} is not one of transformers': {', '.join(names)}."
        )
    return attention


def check_weight_sync(name: str, options: Any) -> Any:
    """Checks the options of a weight-sync scheme."""
    SGLangWeightSyncScheme(None, None, **check_part(MAPPING)(name, options))
    return options


def check_distillation(name: str, value: Any) -> Distillation:
    """Returns a distillation, from itself or its arguments."""
    if isinstance(value, Distillation):
        return value
    check_keywords(name, check_part(MAPPING)(name, value), Distillation)
    return Distillation(**value)


def _no_reward(conversation: Any, task: Any) -> float:
    """Returns the reward of a run that learns from its teacher alone."""
    return 0.0


def check_recorder(name: str, recorder: Any) -> Any:
    """Returns a recorder, or whether the run makes one."""
    if isinstance(recorder, (bool, RunRecorder)):
        return recorder
    raise ConfigurationError(
        f"{name} must be a bool or a RunRecorder, got {recorder!r}; give "
        f"RunRecorder(folder), or False."
    )


Options: TypeAlias = Annotated[Mapping[str, Any] | None, check_part(MAPPING)]
Count: TypeAlias = Annotated[int, check_count]
CountOrZero: TypeAlias = Annotated[int, partial(check_count, least=0)]
CountOrNone: TypeAlias = Annotated[int | None, check_count]
Flag: TypeAlias = Annotated[bool, check_flag]


# Without a representation, which would have the keys of servers.
@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RunArguments:
    """The arguments of a :class:`.GRPO` run, which has their documentation."""

    model: Annotated[str | os.PathLike[str] | nn.Module, check_model] = field(
        kw_only=False
    )
    """Folder or hub name of the model; or a model of transformers, which needs an
    ``engine`` that already serves it."""
    prompts: Any = None
    """Tasks to train on, as for :class:`.AsyncLLMCollector`."""
    rewards: Any = None
    """Reward functions of a conversation and its task, as for
    :class:`.AsyncLLMCollector`."""
    group_rewards: Any = None
    """Reward functions of a group, as for :class:`.AsyncLLMCollector`."""
    step: Any = None
    """Function that continues a conversation after a response, as for
    :class:`.AsyncLLMCollector`."""
    tools: Any = None
    """Functions that the model can call, as for :class:`.AsyncLLMCollector`."""
    agent: Annotated[Callable[..., Any] | None, check_part(FUNCTION, awaited=True)] = (
        None
    )
    """Program that holds a conversation with a gateway, as for
    :class:`.AsyncLLMCollector`, instead of functions."""
    env: Annotated[Callable[[], Any] | None, check_part(FUNCTION)] = None
    """Function that makes an environment of TorchRL, instead of functions."""
    max_turns: int | None = None
    """Most responses of a conversation, as for :class:`.AsyncLLMCollector`."""
    query_key: str = "query"
    """Key of a task's prompt."""
    system_prompt: str | None = None
    """System message before each prompt."""
    chat_template: str | None = None
    """Chat template of the policy and of the saved model. By default the model's."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template, such as ``{"enable_thinking": False}``. The
    requests of an ``agent`` have their own."""
    generate_kwargs: Mapping[str, Any] | None = None
    """Sampling parameters. By default 512 tokens at temperature 1."""
    group_size: Annotated[int, partial(check_count, least=2)] = 8
    """Responses to each prompt, whose rewards are compared."""
    groups_per_batch: Count = 16
    """Prompts of a batch."""
    steps: CountOrNone = None
    """Batches to train on. By default ``epochs`` passes over the prompts."""
    epochs: Count = 1
    """Passes over the prompts. The last batch has the remaining prompts; with fewer
    responses than ranks it is left out, with a warning."""
    max_staleness: CountOrZero = 0
    """Weight updates by which a trained token may be behind the trainer's weights, as
    for :class:`.AsyncLLMCollector`; 0 is synchronous training."""
    on_stale: str = "drop"
    """Treatment of groups with older tokens, as for :class:`.AsyncLLMCollector`."""
    keep_group: Callable[..., bool] | None = None
    """Filter of groups, as for :class:`.AsyncLLMCollector`; ``has_variance`` is one."""
    method: str = "grpo"
    """``"grpo"``, ``"dapo"``, ``"dr_grpo"``, ``"gspo"``, ``"cispo"`` or ``"rloo"``; see
    ``trainers.methods``."""
    advantage: str | Callable[..., Any] | None = None
    """A name in ``objectives.advantages.ADVANTAGES``, or a function. By default the
    method's."""
    loss: Annotated[
        Mapping[str, Any] | Callable[[Any], Any] | None, check_part(MAPPING, FUNCTION)
    ] = None
    """Arguments of the method's loss, or a function that makes a loss of an actor."""
    correction: str | RolloutCorrectionConfig | None = None
    """Preset or configuration of off-policy correction. By default there is none."""
    kl_to_ref_coeff: Annotated[float, partial(check_positive, zero=True)] = 0.0
    """Coefficient of the divergence from the model before training."""
    teacher: (
        Mapping[Any, Any]
        | str
        | os.PathLike[str]
        | Sequence[str]
        | RLSGLangEngine
        | None
    ) = None
    """Model that the policy learns from beside the rewards, or without rewards: a
    folder or hub name; a mapping of ``"model"`` and arguments of
    :meth:`.AsyncSGLang.from_pretrained`; the URL of a running server, or an engine. It
    has the student's tokenizer. ``"initial"`` is the model before training, in servers
    of its own, ``"student"`` the trained one, in its own servers."""
    teacher_key: str | None = None
    """Column of a task with the name of its teacher: ``teacher`` is a mapping of names
    to teachers. By default there is one."""
    teacher_prompt: Annotated[Callable[..., Any] | None, check_part(FUNCTION)] = None
    """Function of a task that returns the teacher's prompt, a text or messages, such as
    one with a solution. By default the teacher has the student's."""
    distillation: Annotated[
        Mapping[str, Any] | Distillation | None, check_distillation
    ] = None
    """A :class:`.Distillation` or its arguments, for a ``teacher``. By default the
    reverse divergence of the teacher's top 64 tokens, with weight 1."""
    lr: float | None = None
    """Learning rate, unless ``optimizer`` has one. By default 1e-6, or 1e-5 with
    ``lora``."""
    optimizer: Annotated[
        Mapping[str, Any] | Callable[[Any], torch.optim.Optimizer] | None,
        check_part(MAPPING, FUNCTION),
    ] = None
    """Further arguments of AdamW, or a function that makes an optimizer of parameters.
    By default there is no weight decay."""
    schedule: str = "constant_with_warmup"
    """Schedule of the learning rate, by its name in transformers."""
    warmup_steps: CountOrZero = 0
    """Optimizer steps of the schedule's warmup."""
    minibatches: Count = 1
    """Optimizer steps of a pass over a batch."""
    epochs_per_batch: Count = 1
    """Passes over a batch."""
    max_tokens_per_pass: Count = 16_384
    """Most tokens of a forward and backward pass, as for :class:`.Learner`."""
    packing: Annotated[Packing, check_packing] = "auto"
    """Whether passes have responses without padding, as for
    :class:`.CorrectedGRPOLoss`; ``"auto"``: if the model supports it; ``"tree"``: and
    the prefixes that they share once, as ``"auto"`` has it where that pays."""
    clip_grad_norm: Annotated[float | None, check_positive] = 1.0
    """Largest norm of a gradient; None for no limit."""
    lora: Options = None
    """Arguments of PEFT's ``LoraConfig``, to train an adapter alone."""
    gradient_checkpointing: bool | None = None
    """Whether activations are recomputed in the backward pass. By default on GPUs."""
    dtype: torch.dtype | str = torch.float32
    """Type of the trainer's weights, gradients and optimizer. Passes are computed in
    bfloat16 on GPUs anyway. ``"bfloat16"`` needs half the memory, and loses updates
    that are small beside a weight."""
    attn_implementation: Annotated[str | None, check_attention] = None
    """Attention of the trainer's model in transformers, such as ``"sdpa"`` or
    ``"flash_attention_2"``."""
    replay_routing: Flag = False
    """Whether a mixture of experts is trained with the experts that the engine chose;
    see :func:`.replay_routing`."""
    logprobs_mode: LogProbsMode = "model"
    """Kind of the engine's log-probs, as for :class:`.SGLangWrapper`. ``"behaviour"``
    trains the distribution that tokens are drawn from, with any ``temperature``,
    ``top_k``, ``top_p`` and ``min_p`` of ``generate_kwargs``; see ``replay_sampling``
    of :class:`.CorrectedGRPOLoss`. ``"model"`` is the same at temperature 1 without the
    other three, and warns of them. Evaluation is greedy with both."""
    colocated: Flag = False
    """Whether the servers run on the trainer's GPUs, and sleep while it trains."""
    engine: Annotated[
        Mapping[str, Any] | str | Sequence[str] | RLSGLangEngine | None, check_engine
    ] = None
    """Arguments of :meth:`.AsyncSGLang.from_pretrained`; the URL of a running server, a
    list of URLs, or arguments of :meth:`.AsyncSGLang.connect`, such as ``router_url``,
    with the key in ``TORCHRL_SGLANG_API_KEY``; or an engine, which the run does not
    shut down."""
    weight_sync: Annotated[Mapping[str, Any] | None, check_weight_sync] = None
    """Arguments of :class:`.SGLangWeightSyncScheme`."""
    collector: Annotated[
        Mapping[str, Any] | Callable[[SGLangWrapper], Any] | None,
        check_part(MAPPING, FUNCTION),
    ] = None
    """Further arguments of :class:`.AsyncLLMCollector`, or a function that makes a
    collector of a policy, with its own prompts, rewards and other arguments."""
    gateway: Options = None
    """Arguments of :class:`.Gateway`, for an ``agent``."""
    eval_prompts: Any = None
    """Held-out prompts, which the engine answers greedily and the same rewards score;
    ``eval/prompts`` counts the scored ones. The requests of an ``agent`` have their own
    sampling parameters, and otherwise the run's. The folder ``best`` has the first
    model with the greatest ``eval/reward``, if that exceeds the one before training."""
    eval_every: Count = 10
    """Steps between two evaluations."""
    checkpoint_every: Count = 10
    """Steps between two checkpoints."""
    keep_checkpoints: Count = 2
    """Number of checkpoints that stay in the folder."""
    output: str | os.PathLike[str] = "runs/grpo"
    """Folder of the run."""
    resume: Annotated[Resume, check_auto] = False
    """Whether the run continues from the newest checkpoint of ``output``; ``"auto"``:
    if there is one. With False, a folder with results is refused."""
    logger: Any = "csv"
    """``"csv"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"trackio"``, a logger
    of TorchRL or None."""
    project: str = "torchrl_sglang"
    """Project of W&B and Trackio, and experiment of MLflow."""
    metrics_port: int | None = None
    """Port of this machine that Prometheus scrapes, 0 for a free one; see
    :func:`.serve_metrics`. By default there is no port."""
    progress: Annotated[StepsShown, check_auto] = "auto"
    """Whether a bar shows the progress of the run; ``"auto"``: in a terminal or a
    notebook, while a log file has a line each minute of a long step. Lines of complete
    steps are printed anyway, by the first rank alone."""
    show_samples: CountOrNone = 10
    """Steps between two printed responses, and between two tables of responses in a
    logger with tables; None for none."""
    recorder: Annotated[RunRecorder | bool, check_recorder] = True
    """Records the run for ``torchrl-sglang view``. True records to the folder
    ``record`` of ``output``, at most 1 GiB."""
    seed: CountOrZero = 0
    """Seed of an adapter's weights, of the order of prompts and minibatches, and of the
    servers."""
    deterministic: Flag = False
    """Whether a second run on the same machine is the same: with seeds for all samples,
    batches in the order of prompts, and deterministic kernels; the guide on repeatable
    runs has the limits. It needs ``max_staleness=0`` and servers on GPUs."""

    def __post_init__(self) -> None:
        makers = (self.rewards, self.group_rewards, self.step, self.agent, self.env)
        if self.teacher is not None and not any((*makers, callable(self.collector))):
            object.__setattr__(self, "rewards", _no_reward)
        check_fields(self)
        self._check_minibatches()
        check_placement(self.model, self.engine, self.colocated, self.max_staleness)
        self._warn_of_staleness()
        if self.deterministic:
            check_repeatable(
                self.engine,
                max_staleness=self.max_staleness,
                collector=self.collector,
                agent=self.agent,
            )
        self._check_epochs()
        warn_of_greedy_groups(self.sampling, stacklevel=6)

    @cached_property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters, with the run's defaults."""
        return read_sampling(self.generate_kwargs)

    @cached_property
    def groups(self) -> int | None:
        """Groups of the run; None if they are not known before the prompts are read."""
        if self.steps is not None:
            return self.steps * self.groups_per_batch
        tasks = count_tasks(self.prompts)
        return None if tasks is None else self.epochs * tasks

    @property
    def total_steps(self) -> int | None:
        """Batches of the run, of which the last may be smaller; None likewise."""
        return None if self.groups is None else -(-self.groups // self.groups_per_batch)

    def _check_minibatches(self) -> None:
        responses = self.group_size * self.groups_per_batch
        if self.minibatches > responses:
            raise ConfigurationError(
                f"minibatches={self.minibatches} are more than the {responses} "
                f"responses of a batch, group_size * groups_per_batch; give fewer."
            )

    def _check_epochs(self) -> None:
        if self.epochs == 1:
            return
        if self.steps is not None:
            raise ConfigurationError(
                f"steps={self.steps} and epochs={self.epochs} say twice when to end; "
                f"give one."
            )
        if isinstance(self.prompts, Iterator):
            raise ConfigurationError(
                f"epochs={self.epochs} needs prompts that can be read again, and an "
                f"iterator ends; give a list or another iterable, steps=..., or one "
                f"pass."
            )

    def _warn_of_staleness(self) -> None:
        # A loss that a function makes may have its own correction.
        if self.max_staleness and self.correction is None and not callable(self.loss):
            warnings.warn(
                f"max_staleness={self.max_staleness} trains on tokens of earlier "
                f"weights, and nothing corrects for that: give "
                f"correction='decoupled_token_is', or max_staleness=0.",
                RuntimeWarning,
                stacklevel=6,
            )
