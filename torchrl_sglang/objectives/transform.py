"""OffPolicyCorrection: a TorchRL transform that corrects a batch for GRPOLoss."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.transforms import Transform

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import (
    check_finite,
    read,
    read_advantage,
    read_mask,
    read_versions,
    read_written,
    write_rows,
)
from torchrl_sglang.objectives.config import RolloutCorrectionConfig, as_config
from torchrl_sglang.objectives.correct import (
    Corrected,
    Sampled,
    check_scored,
    correct,
    scale_advantage,
)
from torchrl_sglang.objectives.parts import LossRanks
from torchrl_sglang.objectives.routing import replaying
from torchrl_sglang.objectives.statistics import values_of
from torchrl_sglang.objectives.support import replays_sampling, warn_of_sampling
from torchrl_sglang.requests.token_columns import POLICY_VERSIONS, TOKENS
from torchrl_sglang.support.checks import check_choice

MaskingStrategy = Literal["sft", "rlhf", "generic"]
Aggregation = Literal["token_mean", "prompt_mean", "none"]


class OffPolicyCorrection(Transform):
    """Corrects a batch for the gap between the rollout policy and the trainer's.

    Called on a batch, or attached to a replay buffer, whose samples it corrects, it
    returns a batch for which TorchRL's ``GRPOLoss`` has exactly the gradient of the
    chosen formula:

    - weights multiply the advantage, which becomes a value per token. The clipped
      objective is proportional to the advantage, so this equals a weighted objective;
    - rejected tokens get a NaN log-prob. ``GRPOLoss`` excludes them from the loss and
      its denominators;
    - in decoupled mode the log-probs become the old (proximal) policy's;
    - with ``aggregation="prompt_mean"``, sequences without remaining tokens do not
      count, as in verl, although the loss divides by all: the advantage compensates.

    The input batch is not changed. Correct the batch of an optimizer step, not a larger
    batch: denominators are over the batch, and :meth:`.CorrectedGRPOLoss.accumulate`
    takes parts of a corrected batch. ``metrics`` has verl's metrics of the last batch.

    NaN or infinite log-probs are unknown; these tokens are excluded. A batch in which
    every token was masked after sampling, such as stale tokens by ``on_stale="mask"``,
    has zero weight.

    Args:
        config: a :class:`.RolloutCorrectionConfig`, or the name of one of its presets.
        actor_network: computes the trainer's log-probs, as ``GRPOLoss`` does, with a
            forward pass without gradients. If None, they are read from the batch.
            Defaults to None.
        masking_strategy: as given to ``GRPOLoss``. Defaults to ``"sft"``.
        aggregation: as given to ``GRPOLoss``. Defaults to ``"token_mean"``.
        train_log_probs_key: the trainer's log-probs of ``("tokens", "full")``, if there
            is no ``actor_network``; TorchRL's ``RetrieveLogProb`` writes them. Defaults
            to ``("train_log_probs", "full")``.
        log_probs_key: the engine's log-probs of ``("tokens", "full")``; read by the
            loss, and replaced here. Defaults to ``("log_probs", "full")``.
        advantage_key: of shape ``(B, 1, 1)`` or ``(B, T, 1)``. Defaults to
            ``"advantage"``.
        version_key: versions of the response's tokens, ``(Lr,)`` for each row, or one
            for each row, such as ``("next", "policy_version")``. Defaults to
            ``"token_policy_version"``, which an :class:`.AsyncLLMCollector` writes.
            Other collectors have the servers' own versions, ``("generation_info",
            "weight_version")``.
        consumer_version: version of the trainer's weights in the same count, for
            ``max_staleness`` and ``proximal="interpolated"``: the collector's
            ``policy_version``, or ``int(engine.weight_version)`` for the servers' own
            versions. An attribute to set after each update, as in TorchRL's
            ``StalenessAwareSampler``. Defaults to None.
        process_group: the ranks of the trainer, each with a share of the batch, which
            call this together, as for :meth:`.CorrectedGRPOLoss.accumulate`; a
            :class:`.Learner` sets it. Denominators, means and ``metrics`` are over the
            whole batch. An attribute, too. Defaults to None: this rank has the whole
            batch.

    Raises:
        ConfigurationError: if the configuration is not valid, a batch lacks a column of
            a method, or no token of the policy has a log-prob.
        NotFiniteError: if any rank's loss token has a NaN or infinite advantage.

    Examples:
        >>> from tensordict import TensorDict
        >>> row = {
        ...     "tokens": {"full": torch.tensor([[5, 6, 7]])},
        ...     "masks": {"all_assistant_mask": torch.tensor([[False, True, True]])},
        ...     "log_probs": {"full": torch.tensor([[torch.nan, 0.25, 0.5]]).log()},
        ...     "train_log_probs": {"full": torch.tensor([[0.1, 0.25, 0.25]]).log()},
        ...     "advantage": torch.ones(1, 1, 1),
        ... }
        >>> correction = OffPolicyCorrection("decoupled_token_is")
        >>> batch = correction(TensorDict(row, batch_size=1))
        >>> batch["advantage"].squeeze(-1)
        tensor([[0.0000, 1.0000, 0.5000]])
        >>> batch["log_probs", "full"].exp()
        tensor([[   nan, 0.2500, 0.2500]])
        >>> round(correction.metrics["rollout_corr/rollout_is_mean"], 6)
        0.75
    """

    def __init__(
        self,
        config: RolloutCorrectionConfig | str,
        *,
        actor_network: Any = None,
        masking_strategy: MaskingStrategy = "sft",
        aggregation: Aggregation = "token_mean",
        train_log_probs_key: NestedKey = ("train_log_probs", "full"),
        log_probs_key: NestedKey = ("log_probs", "full"),
        advantage_key: NestedKey = "advantage",
        version_key: NestedKey = POLICY_VERSIONS,
        consumer_version: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        check_choice("masking_strategy", masking_strategy, get_args(MaskingStrategy))
        check_choice("aggregation", aggregation, get_args(Aggregation))
        self.config = as_config(config)
        # In a tuple: a submodule would put the trainer's weights into the state dict.
        self._actor = (actor_network,)
        self.masking_strategy = masking_strategy
        self.aggregation = aggregation
        self.train_log_probs_key = train_log_probs_key
        self.log_probs_key = log_probs_key
        self.advantage_key = advantage_key
        self.version_key = version_key
        self.consumer_version = consumer_version
        self.process_group = process_group
        self._metrics: dict[str, Tensor] = {}

    @property
    def actor_network(self) -> Any:
        """Actor of the trainer's log-probs; None if they are read from the batch."""
        return self._actor[0]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch; reading them waits for the device."""
        return {name: value.item() for name, value in self._metrics.items()}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a corrected copy of a batch.

        Args:
            tensordict: a batch with a single batch dimension.

        Raises:
            ConfigurationError: if the batch lacks a column, or has another shape.
        """
        if tensordict.ndim != 1:
            raise ConfigurationError(
                f"A batch to be corrected has one batch dimension, got "
                f"{tuple(tensordict.batch_size)}; give batch.reshape(-1)."
            )
        ranks = LossRanks(self.process_group, self)
        with torch.no_grad():
            sampled = ranks.together(lambda: self._read(tensordict))
            check_scored(sampled, ranks)
            local = ranks.together(lambda: correct(self.config, sampled))
            corrected = local.of_all_ranks(ranks)
            self._metrics = values_of(corrected.statistics)
            return self._write(tensordict, sampled, corrected)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Writes to a replay buffer unchanged; its samples are corrected."""
        return tensordict

    def _read(self, batch: TensorDictBase) -> Sampled:
        """Returns the columns of the configuration."""
        rollout = read(batch, self.log_probs_key, padding_value=0.0)
        if rollout is None:
            raise ConfigurationError(
                f"The batch has no log-probs {self.log_probs_key!r}; generate with "
                f"SGLangWrapper(..., return_log_probs=True)."
            )
        shape = rollout.shape
        train, mask = self._train_log_probs(batch, shape)
        versions = None
        if self.config.needs_versions:
            versions = read_versions(batch, self.version_key, shape)
        advantage = read_advantage(batch, self.advantage_key, shape)
        check_finite(self.advantage_key, advantage, mask & rollout.isfinite())
        return Sampled(
            rollout=rollout,
            mask=mask,
            advantage=advantage,
            train=train,
            versions=versions,
            version=self.consumer_version,
            written=read_written(batch, mask),
        )

    def _train_log_probs(
        self, batch: TensorDictBase, shape: torch.Size
    ) -> tuple[Tensor | None, Tensor]:
        """Returns the trainer's log-probs, if needed or present, and the loss mask."""
        (actor,) = self._actor
        if actor is not None and self.config.needs_train_log_probs:
            if not replays_sampling(actor):
                warn_of_sampling(batch)
            with replaying(actor, batch):
                distribution = getattr(actor, f"_get_{self.masking_strategy}_dist")(
                    batch.copy()
                )
            tokens = read(batch, TOKENS, padding_value=-100)
            train, mask = distribution.log_prob(tokens), distribution.mask
        else:
            train = read(batch, self.train_log_probs_key, padding_value=0.0)
            mask = read_mask(batch, self.masking_strategy, shape[1])
        for name, value in (("log-probs of the trainer", train), ("mask", mask)):
            if value is not None and value.shape != shape:
                raise ConfigurationError(
                    f"The {name} have shape {tuple(value.shape)}, the log-probs of the "
                    f"rollout {tuple(shape)}: they are not of the same tokens; give "
                    f"masking_strategy as GRPOLoss has it."
                )
        return train, mask

    def _write(
        self, batch: TensorDictBase, sampled: Sampled, corrected: Corrected
    ) -> TensorDictBase:
        """Returns a copy of the batch with another advantage and other log-probs."""
        advantage = scale_advantage(sampled.advantage, corrected, self.aggregation)
        result = batch.copy()
        result.set(self.advantage_key, advantage.unsqueeze(-1))
        log_probs = torch.where(corrected.keep, corrected.old, torch.nan)
        write_rows(result, self.log_probs_key, log_probs.to(sampled.rollout.dtype))
        return result
