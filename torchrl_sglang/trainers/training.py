"""Model, loss and learner of a run, as its arguments ask for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.config import RolloutCorrectionConfig
from torchrl_sglang.objectives.loss_arguments import (
    check_denominator,
    check_loss_arguments,
)
from torchrl_sglang.objectives.packing import Packing, check_packing
from torchrl_sglang.objectives.transform import MaskingStrategy, OffPolicyCorrection
from torchrl_sglang.support.checks import check_keywords, check_positive
from torchrl_sglang.trainers.learner import Learner
from torchrl_sglang.trainers.methods import Method
from torchrl_sglang.trainers.models import check_adapter, load_model, scorer
from torchrl_sglang.trainers.optimizers import check_schedule, make_schedule
from torchrl_sglang.trainers.ranks import TrainerRanks

BESIDE_FUNCTION = {
    "packing": "give it there",
    "correction": "give it there, or loss={...}",
    "kl_to_ref_coeff": "give loss={...}, or the loss and reference=... to a Learner",
}
"""Argument of a run's loss -> what to do where a function makes the loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What a run trains, and how. The arguments are those of ``GRPO``."""

    model: Any
    method: Method
    loss: Mapping[str, Any] | Callable[[Any], Any] | None
    masking: MaskingStrategy
    """Which tokens the loss is of."""
    max_new_tokens: int | None
    packing: Packing
    correction: RolloutCorrectionConfig | None
    kl_to_ref_coeff: float
    make_optimizer: Callable[[Any], torch.optim.Optimizer]
    schedule: str
    warmup_steps: int
    steps: int | None
    minibatches: int
    epochs_per_batch: int
    max_tokens_per_pass: int
    clip_grad_norm: float | None
    lora: Mapping[str, Any] | None
    gradient_checkpointing: bool | None
    dtype: torch.dtype
    attn_implementation: str | None

    def __post_init__(self) -> None:
        check_packing(self.packing)
        check_positive("kl_to_ref_coeff", self.kl_to_ref_coeff, zero=True)
        if self.clip_grad_norm is not None:
            check_positive("clip_grad_norm", self.clip_grad_norm)
        if callable(self.loss):
            self._check_beside_function()
        if self.lora is not None:
            check_adapter(self.lora)
        if isinstance(self.loss, Mapping):
            check_keywords("loss", self.loss, self.method.loss)
            check_loss_arguments(self.loss)
            _check_of_run(self.loss)
        if not callable(self.loss):
            self._check_denominator()
        check_schedule(self.schedule, self.warmup_steps, self.steps)

    def _check_beside_function(self) -> None:
        """Refuses what a loss is to apply that a function makes."""
        given = {
            "packing": (self.packing, self.packing != "auto"),
            "correction": (
                self.correction,
                self.correction is not None and not self._recomputes,
            ),
            "kl_to_ref_coeff": (self.kl_to_ref_coeff, bool(self.kl_to_ref_coeff)),
        }
        for name, (value, is_given) in given.items():
            if is_given:
                raise ConfigurationError(
                    f"{name}={value!r:.200} is an argument of the loss, and loss is a "
                    f"function that makes one; {BESIDE_FUNCTION[name]}."
                )

    def _check_denominator(self) -> None:
        """Checks what the loss is divided by."""
        arguments = self._loss_arguments
        aggregation, most = (arguments.get(n) for n in ("aggregation", "max_tokens"))
        if self.method.needs_max_tokens and (aggregation, most) == ("constant", None):
            raise ConfigurationError(
                "This method divides the loss by the longest response that there can "
                "be, and generate_kwargs has max_new_tokens=None; give it there."
            )
        check_denominator(aggregation, most)

    def load(self, ranks: TrainerRanks, *, trained: bool = True) -> Any:
        """Returns the model that is trained, or what it was before."""
        device, checkpointing = ranks.device(), self.gradient_checkpointing
        if checkpointing is None:
            checkpointing = device.type == "cuda"
        return load_model(
            self.model,
            device=device,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            lora=self.lora if trained else None,
            gradient_checkpointing=trained and checkpointing,
            ranks=ranks,
        )

    def make_learner(
        self, model: Any, tokenizer: Any, ranks: TrainerRanks, *, reference: Any = None
    ) -> Learner:
        """Returns what takes the optimizer steps of a loaded model.

        Args:
            model: of :meth:`load`.
            tokenizer: of the servers.
            ranks: of the trainer.
            reference: of :meth:`make_reference`.
        """
        loss = self._make_loss(scorer(model, tokenizer), ranks.device())
        optimizer = self.make_optimizer(
            [each for each in model.parameters() if each.requires_grad]
        )
        total = None
        if self.steps is not None:
            total = self.steps * self.minibatches * self.epochs_per_batch
        return Learner(
            loss,
            optimizer,
            make_schedule(self.schedule, optimizer, self.warmup_steps, total),
            correct=self._make_correction(loss),
            reference=reference,
            minibatches=self.minibatches,
            epochs=self.epochs_per_batch,
            max_tokens_per_pass=self.max_tokens_per_pass,
            clip_grad_norm=self.clip_grad_norm,
            autocast=ranks.device().type == "cuda" and ranks.size == 1,
            ranks=ranks,
        )

    def make_reference(self, model: Any, ranks: TrainerRanks) -> Any:
        """Returns what the loss's divergence is to, before the model is trained.

        It is made before routing is replayed: the copy of a module routes by itself.
        """
        if not self.kl_to_ref_coeff:
            return None
        if self.lora is not None:
            return "adapter"
        if not isinstance(self.model, nn.Module):
            return self.load(ranks, trained=False).requires_grad_(False)
        if ranks.size > 1:
            raise ConfigurationError(
                f"kl_to_ref_coeff={self.kl_to_ref_coeff} needs the model before "
                f"training, and model is a module that the ranks have shared out; give "
                f"its folder or name, or lora=...."
            )
        # The module is the one that is trained.
        return copy.deepcopy(model).requires_grad_(False)

    @property
    def _recomputes(self) -> bool:
        """Whether the old policy is recomputed, which needs a pass before the loss."""
        correction = self.correction
        return correction is not None and not (
            correction.bypass_mode or correction.proximal == "interpolated"
        )

    def _make_loss(self, actor: Any, device: torch.device) -> Any:
        if callable(self.loss):
            return self.loss(actor)
        arguments = {"device": device, **self._loss_arguments}
        return self.method.loss(actor, **arguments)

    @property
    def _loss_arguments(self) -> dict[str, Any]:
        """Arguments of the method's loss: the run's, the method's, and those given."""
        assert not callable(self.loss)
        of_method = dict(self.method.arguments)
        if self.method.needs_max_tokens:
            of_method["max_tokens"] = self.max_new_tokens
        return {
            "entropy_bonus": False,
            "masking_strategy": self.masking,
            "kl_to_ref_coeff": self.kl_to_ref_coeff or None,
            "correction": None if self._recomputes else self.correction,
            "packing": self.packing,
            **of_method,
            **(self.loss or {}),
        }

    def _make_correction(self, loss: Any) -> OffPolicyCorrection | None:
        """Returns what corrects a minibatch before the loss sees it."""
        if not self._recomputes:
            return None
        assert self.correction is not None
        by_prompt = loss.aggregation == "prompt_mean"
        return OffPolicyCorrection(
            self.correction,
            masking_strategy=self.masking,
            aggregation="prompt_mean" if by_prompt else "token_mean",
        )


def _check_of_run(loss: Mapping[str, Any]) -> None:
    """Refuses arguments of a loss that do not go with how a run trains."""
    if loss.get("kl_to_ref_coeff"):
        raise ConfigurationError(
            f"loss has kl_to_ref_coeff={loss['kl_to_ref_coeff']!r}, for which nobody "
            f"would keep the model before training; give kl_to_ref_coeff=... to GRPO."
        )
    if loss.get("correction") is not None:
        raise ConfigurationError(
            f"loss has correction={loss['correction']!r}, and a run says itself who "
            f"applies it; give correction=... to GRPO."
        )
    for name in ("aggregation", "reduction"):
        if loss.get(name) == "none":
            raise ConfigurationError(
                f"loss has {name}='none', which leaves the average to the caller; a "
                f"run needs a mean, such as aggregation='token_mean'."
            )
