"""Model, loss, optimizer and learner of a run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.advantages import GroupAdvantage, TrajectoryReturn
from torchrl_sglang.objectives.config import as_config
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.objectives.loss_arguments import (
    check_denominator,
    check_loss_arguments,
)
from torchrl_sglang.objectives.transform import MaskingStrategy, OffPolicyCorrection
from torchrl_sglang.support.checks import check_keywords
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.learner import Learner
from torchrl_sglang.trainers.methods import find_method
from torchrl_sglang.trainers.models import check_adapter, load_model, scorer
from torchrl_sglang.trainers.optimizers import (
    check_schedule,
    make_schedule,
    optimizer_of,
)
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.teacher import Teacher

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types of trained weights."""


def check_dtype(name: str, dtype: Any) -> torch.dtype:
    """Returns a type of trained weights, by itself or by its name."""
    key = str(dtype).removeprefix("torch.")
    if key not in DTYPES:
        raise ConfigurationError(
            f"{name}={dtype!r} is no type that weights are trained in; give 'float32', "
            f"or 'bfloat16' where memory is short."
        )
    return DTYPES[key]


class Training:
    """Checks and makes a run's model, loss and learner."""

    def __init__(
        self, arguments: RunArguments, distillation: Distillation | None = None
    ) -> None:
        self.arguments, self.distillation = arguments, distillation
        self.method = find_method(arguments.method)
        correction = arguments.correction
        self.correction = None if correction is None else as_config(correction)
        self.recomputes = self.correction is not None and self.correction.recomputes
        """Whether the old policy is recomputed, which needs a pass before the loss."""
        self.masking: MaskingStrategy = "sft" if arguments.agent is None else "rlhf"
        self.dtype = check_dtype("dtype", arguments.dtype)
        default = 1e-6 if arguments.lora is None else 1e-5
        self.make_optimizer = optimizer_of(arguments.optimizer, arguments.lr, default)
        loss = arguments.loss
        if callable(loss):
            self._check_beside_function()
        if arguments.lora is not None:
            check_adapter(arguments.lora)
        if isinstance(loss, Mapping):
            check_keywords("loss", loss, self.method.loss)
            check_loss_arguments(loss)
            _check_of_run(loss)
        if not callable(loss):
            self._check_denominator()
        total = arguments.total_steps
        check_schedule(arguments.schedule, arguments.warmup_steps, total)

    def make_advantage(self, trajectory_return: TrajectoryReturn) -> GroupAdvantage:
        """Returns the advantage of a batch."""
        return GroupAdvantage(
            self.arguments.group_size,
            self.arguments.advantage or self.method.advantage,
            trajectory_return=trajectory_return,
        )

    def _check_beside_function(self) -> None:
        """Refuses arguments of the loss beside a function that makes the loss."""
        arguments = self.arguments
        corrects = self.correction is not None and not self.recomputes
        learner = "give loss={...}, or the loss and reference=... to a Learner"
        for name, is_given, remedy in (
            ("packing", arguments.packing != "auto", "give it there"),
            ("correction", corrects, "give it there, or loss={...}"),
            ("kl_to_ref_coeff", bool(arguments.kl_to_ref_coeff), learner),
            ("teacher", arguments.teacher is not None, learner),
        ):
            if is_given:
                raise ConfigurationError(
                    f"{name}={getattr(arguments, name)!r:.200} is an argument of the "
                    f"loss, and loss is a function that makes one; {remedy}."
                )

    def _check_denominator(self) -> None:
        """Checks the denominator of the loss."""
        arguments = self._loss_arguments
        aggregation, limit = (arguments.get(n) for n in ("aggregation", "max_tokens"))
        if self.method.needs_max_tokens and (aggregation, limit) == ("constant", None):
            raise ConfigurationError(
                "This method divides the loss by the longest response that there can "
                "be, and generate_kwargs has max_new_tokens=None; give it there."
            )
        check_denominator(aggregation, limit)

    def load(self, ranks: TrainerRanks, *, trained: bool = True) -> Any:
        """Returns the model that is trained, or the model before training."""
        device, checkpointing = ranks.device(), self.arguments.gradient_checkpointing
        if checkpointing is None:
            checkpointing = device.type == "cuda"
        return load_model(
            self.arguments.model,
            device=device,
            dtype=self.dtype,
            attn_implementation=self.arguments.attn_implementation,
            lora=self.arguments.lora if trained else None,
            gradient_checkpointing=trained and checkpointing,
            ranks=ranks,
        )

    def make_learner(
        self,
        model: Any,
        tokenizer: Any,
        ranks: TrainerRanks,
        *,
        reference: Any = None,
        teacher: Teacher | None = None,
    ) -> Learner:
        """Returns the learner of a model of :meth:`load` and the servers' tokenizer."""
        arguments = self.arguments
        loss = self._make_loss(scorer(model, tokenizer), ranks.device())
        optimizer = self.make_optimizer(
            [parameter for parameter in model.parameters() if parameter.requires_grad]
        )
        total = arguments.total_steps
        if total is not None:
            total *= arguments.minibatches * arguments.epochs_per_batch
        return Learner(
            loss,
            optimizer,
            make_schedule(arguments.schedule, optimizer, arguments.warmup_steps, total),
            correct=self._make_correction(loss),
            reference=reference,
            teacher=teacher,
            minibatches=arguments.minibatches,
            epochs=arguments.epochs_per_batch,
            max_tokens_per_pass=arguments.max_tokens_per_pass,
            clip_grad_norm=arguments.clip_grad_norm,
            autocast=ranks.device().type == "cuda" and ranks.size == 1,
            ranks=ranks,
        )

    def make_reference(self, model: Any, ranks: TrainerRanks) -> Any:
        """Returns the reference of the loss's divergence, before the model is trained.

        It is made before routing is replayed: the copy of a module routes by itself.
        """
        arguments = self.arguments
        if not arguments.kl_to_ref_coeff:
            return None
        if arguments.lora is not None:
            return "adapter"
        if not isinstance(arguments.model, nn.Module):
            return self.load(ranks, trained=False).requires_grad_(False)
        if ranks.size > 1:
            raise ConfigurationError(
                f"kl_to_ref_coeff={arguments.kl_to_ref_coeff} needs the model before "
                f"training, and model is a module that the ranks have shared out; give "
                f"its folder or name, or lora=...."
            )
        # The module is the one that is trained.
        return copy.deepcopy(model).requires_grad_(False)

    def _make_loss(self, actor: Any, device: torch.device) -> Any:
        if callable(self.arguments.loss):
            return self.arguments.loss(actor)
        arguments = {"device": device, **self._loss_arguments}
        return self.method.loss(actor, **arguments)

    @property
    def _loss_arguments(self) -> dict[str, Any]:
        """Arguments of the method's loss: the run's, the method's, and those given."""
        assert not callable(self.arguments.loss)
        of_method = dict(self.method.arguments)
        if self.method.needs_max_tokens:
            of_method["max_tokens"] = self.arguments.sampling["max_new_tokens"]
        return {
            "entropy_bonus": False,
            "masking_strategy": self.masking,
            "kl_to_ref_coeff": self.arguments.kl_to_ref_coeff or None,
            "correction": None if self.recomputes else self.correction,
            "packing": self.arguments.packing,
            "distillation": self.distillation,
            **of_method,
            **(self.arguments.loss or {}),
        }

    def _make_correction(self, loss: Any) -> OffPolicyCorrection | None:
        """Returns the correction of a minibatch before the loss, if there is one."""
        if not self.recomputes:
            return None
        assert self.correction is not None
        by_prompt = loss.aggregation == "prompt_mean"
        return OffPolicyCorrection(
            self.correction,
            masking_strategy=self.masking,
            aggregation="prompt_mean" if by_prompt else "token_mean",
        )


def _check_of_run(loss: Mapping[str, Any]) -> None:
    """Refuses arguments of a loss that a run does not support."""
    if loss.get("kl_to_ref_coeff"):
        raise ConfigurationError(
            f"loss has kl_to_ref_coeff={loss['kl_to_ref_coeff']!r}, for which nobody "
            f"would keep the model before training; give kl_to_ref_coeff=... to GRPO."
        )
    if loss.get("distillation") is not None:
        raise ConfigurationError(
            f"loss has distillation={loss['distillation']!r}, for which no teacher "
            f"would score batches; give teacher=... and distillation=... to GRPO."
        )
    if loss.get("correction") is not None:
        raise ConfigurationError(
            f"loss has correction={loss['correction']!r}, and a run chooses where "
            f"it is applied; give correction=... to GRPO."
        )
    for name in ("aggregation", "reduction"):
        if loss.get(name) == "none":
            raise ConfigurationError(
                f"loss has {name}='none', which leaves the average to the caller; a "
                f"run needs a mean, such as aggregation='token_mean'."
            )
