"""TorchRL's GRPOLoss and CISPOLoss with corrections."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import CISPOLoss as TorchRLCISPOLoss
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import (
    check_finite,
    read,
    read_mask,
    read_versions,
    read_written,
)
from torchrl_sglang.objectives.config import RolloutCorrectionConfig, as_config
from torchrl_sglang.objectives.correct import (
    NOT_SCORED,
    Corrected,
    Sampled,
    correct,
    scale_advantage,
)
from torchrl_sglang.objectives.distillation import (
    DistillationTerms,
    compared_ids,
    distillation_terms,
    with_distillation,
)
from torchrl_sglang.objectives.divergences import Distillation
from torchrl_sglang.objectives.formulas import masked_mean
from torchrl_sglang.objectives.loss_arguments import (
    check_denominator,
    check_loss_arguments,
)
from torchrl_sglang.objectives.packing import (
    Packing,
    PassTerms,
    packed_terms,
    prepare_packing,
)
from torchrl_sglang.objectives.parts import LossRanks, own_gradients
from torchrl_sglang.objectives.routing import replaying
from torchrl_sglang.objectives.sampling import padded_terms
from torchrl_sglang.objectives.statistics import (
    Statistic,
    add_up,
    moments,
    of_all_ranks,
    values_of,
    weighted_mean,
)
from torchrl_sglang.objectives.support import (
    Drawn,
    read_sampling,
    replays_sampling,
    warn_of_sampling,
)
from torchrl_sglang.requests.token_columns import (
    ATTENTION_MASK,
    POLICY_VERSIONS,
    TOKENS,
)
from torchrl_sglang.support.checks import check_keywords

_LARGEST_LOG_WEIGHT = 300.0
"""Largest log-ratio in the effective sample size, in float64."""


class CorrectedGRPOLoss(TorchRLGRPOLoss):
    r"""TorchRL's ``GRPOLoss`` with averages over the loss tokens, and corrections.

    Objective and policy gradient equal TorchRL's. The differences are:

    - ``clip_fraction``, ``kl_approx``, ``entropy``, ``kl_to_ref``,
      ``kl_to_inference`` and the losses of the last two are averages over the loss
      tokens. TorchRL 0.14 averages over padding and prompts, too: a batch with a long
      sequence has a weaker KL penalty;
    - an advantage per token is padded on the left in a ragged batch, as log-probs are;
      TorchRL pads it on the right, where it meets other tokens;
    - ``kl_approx`` is the mean of :math:`-\log r`, with the loss's ratio :math:`r`: its
      base is the correction's old policy;
    - ``kl_mask_threshold`` masks tokens with :math:`\frac12 \log^2(\pi_\theta /
      \pi_{rollout})` above it. TorchRL does the same, and documents the reference
      policy;
    - ESS is 0 instead of NaN for a batch in which every token is masked;
    - the sequences of a batch go through the model in one row, without padding
      (``packing``), and only loss tokens have logits. TorchRL 0.14 pads, and picks
      logits with a mask of their own shape, which with a vocabulary of 150,000 takes
      more memory and time than the model;
    - with ``aggregation="prompt_mean"`` the KL penalties are means over sequences, too,
      and with ``"none"`` they are per token: all losses are of the same kind;
    - ``aggregation="constant"`` divides the sum over tokens by the number of sequences
      times ``max_tokens``, as Dr. GRPO does (https://arxiv.org/abs/2503.20783): the
      tokens of long and of short responses count alike;
    - :meth:`accumulate` computes the gradient of a batch from its parts;
    - log-probs and entropies are of the sampling distribution of a token, if the batch
      has it (``logprobs_mode="behaviour"``): the ratio of the first step is 1 with any
      sampler. See ``replay_sampling``;
    - a NaN or infinite advantage or reference log-prob of a loss token is refused;
    - ``correction`` applies a configuration of off-policy correction in every forward
      pass, with the log-probs of the loss itself. Batches may be split, and used
      several times. :class:`.OffPolicyCorrection` is for the other configurations,
      whose old policy is recomputed before the step.

    Args:
        actor_network: as for TorchRL's class.

    Keyword Args:
        correction: a :class:`.RolloutCorrectionConfig` with ``bypass_mode=True`` or
            ``proximal="interpolated"``, or the name of such a preset. Defaults to None.
        version_key: as for :class:`.OffPolicyCorrection`. Defaults to
            ``"token_policy_version"``.
        consumer_version: version of the trainer's weights at the start of the step, for
            ``max_staleness`` and ``proximal="interpolated"``; an attribute to set after
            each update. Defaults to None.
        max_tokens: for ``aggregation="constant"``: the length of the longest possible
            response. Defaults to None.
        packing: True concatenates the sequences of a batch in one row, where each
            begins at position 0 and attends only to itself: nothing is computed for
            padding. ``"tree"`` also computes a prefix that sequences share once, with
            the same gradient: the prompt of a group, or the turns of a conversation.
            False pads them. ``"auto"`` packs if the model can, and
            :attr:`padded_because` has the reason if not; :class:`.Learner` sets
            :attr:`trees` for batches where that pays. A model whose attention is
            ``"sdpa"`` gets ``"torchrl_sglang_packed"`` instead, which is the same for
            other rows; FlashAttention and flex attention remain. Defaults to
            ``"auto"``.
        replay_sampling: for batches of ``logprobs_mode="behaviour"``: divide a token's
            logits by its sampling temperature, and exclude the tokens excluded by
            top-k, top-p and min-p:

            .. math::

                \log \pi_\theta(t) = \frac{z_t}{T} -
                    \log \sum_{v \in S_t} \exp \frac{z_v}{T}

            as DeepSeek-V3.2's "keep sampling mask", https://arxiv.org/abs/2512.02556.
            The old policy, the entropy and the divergences, to the reference, too, have
            the same temperature and support. Biases, penalties and grammars are not
            replayed. The actor is a ``TransformersWrapper`` of tokens. False computes
            the whole vocabulary at temperature 1, and warns once of such a batch.
            Defaults to True.
        distillation: a :class:`.Distillation`; the batch has the columns of a
            :class:`.Teacher`. Defaults to None: no teacher.
        **kwargs: as for TorchRL's class.

    Raises:
        ConfigurationError: if a value is invalid, ``correction`` needs a recomputed old
            policy, only one of ``max_tokens`` and ``aggregation="constant"`` is given,
            or ``packing`` is True and the model cannot pack.

    Examples:
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> actor = TransformersWrapper(
        ...     model, tokenizer=tokenizer, input_mode="tokens", generate=False
        ... )
        >>> loss = CorrectedGRPOLoss(actor, correction="bypass_ppo_clip_k3_rs")
        >>> loss.correction.rollout_rs
        'seq_mean_k3'
    """

    reads_rollouts = True
    """Whether the loss reads advantages and log-probs of the rollout."""

    def __init__(
        self,
        actor_network: Any = None,
        *,
        correction: RolloutCorrectionConfig | str | None = None,
        version_key: NestedKey = POLICY_VERSIONS,
        consumer_version: int | None = None,
        max_tokens: int | None = None,
        packing: Packing = "auto",
        replay_sampling: bool = True,
        distillation: Distillation | None = None,
        **kwargs: Any,
    ) -> None:
        check_keywords(type(self).__name__, kwargs, TorchRLGRPOLoss)
        check_loss_arguments(
            {
                **kwargs,
                "max_tokens": max_tokens,
                "packing": packing,
                "replay_sampling": replay_sampling,
                "distillation": distillation,
            }
        )
        super().__init__(actor_network, **kwargs)
        check_denominator(self.aggregation, max_tokens)
        self.max_tokens = max_tokens
        self.correction = None if correction is None else as_config(correction)
        if self.correction is not None and self.correction.recomputes:
            raise ConfigurationError(
                f"correction={correction!r} compares with an old policy that is "
                f"recomputed before the step, which a loss cannot do; give it to "
                f"OffPolicyCorrection, or choose bypass_mode=True or "
                f"proximal='interpolated'."
            )
        self.version_key = version_key
        self.consumer_version = consumer_version
        self.packing = packing
        self.trees = packing == "tree"
        """Whether a packed pass runs once on what sequences share."""
        self.replay_sampling = replay_sampling
        self.distillation = distillation
        if distillation is not None:
            kind: Any = type(self)
            self.output_type: Any = with_distillation(kind.output_type)
        other = "" if self._reads_tokens() else "the actor is not one of tokens"
        self.padded_because = prepare_packing(
            getattr(self.actor_network, "model", None), packing, other
        )
        """Reason why batches are padded; empty if they are packed."""
        # Of the last batch, or the last forward pass.
        self._correction_statistics: dict[str, Statistic] = {}
        self._sample_size: dict[str, Statistic] = {}
        # Of the last forward pass: tokens of the loss, after the correction.
        self._mask: Tensor | None = None
        # Of the last forward pass.
        self._distilled: DistillationTerms | None = None
        # Of the last forward pass: whether tokens were written, and have log-probs.
        self._scored: tuple[Tensor, Tensor] | None = None
        self.on_scored: Callable[[TensorDictBase, Tensor], None] | None = None
        """Called in each forward pass with the batch and the trained policy's log-probs
        ``(B, T)``, NaN outside of the loss tokens."""

    @property
    def _vocabulary(self) -> int:
        """Number of tokens of the trained policy."""
        model = self.actor_network.model
        config = getattr(model, "module", model).config
        return int(config.get_text_config().vocab_size)

    @property
    def packs(self) -> bool:
        """Whether batches go through the model without padding."""
        return not self.padded_because

    @contextmanager
    def correcting(self, correction: RolloutCorrectionConfig) -> Iterator[None]:
        """Replaces the loss's correction; the old policy is the forward pass's.

        It is the old policy of the first optimizer step after the recomputation: a
        batch with a single step needs no forward pass before.
        """
        previous, self.correction = self.correction, correction
        try:
            yield
        finally:
            self.correction = previous

    @property
    def correction_metrics(self) -> dict[str, float]:
        """Verl's metrics of the last batch; reading them waits for the device.

        After :meth:`accumulate`, they cover all its parts, on all ranks.
        """
        statistics = values_of(self._correction_statistics)
        return {name: value.item() for name, value in statistics.items()}

    def forward(self, tensordict: TensorDictBase) -> Any:
        """Returns the losses and metrics of a batch, in TorchRL's class of outputs.

        Raises:
            ConfigurationError: if the batch lacks a column, a token is not in its
                support, or, with a correction, no token of the policy has a log-prob.
            NotFiniteError: if an advantage or a reference log-prob of a loss token is
                NaN or infinite.
        """
        with replaying(self.actor_network, tensordict):
            output = self._forward(tensordict)
        self._check_scored([self._scored], LossRanks(None, self))
        return output

    def _forward(self, tensordict: TensorDictBase) -> Any:
        batch = tensordict.copy()
        keys, present = self.tensor_keys, batch.keys(True)
        advantage = read(batch, keys.advantage, padding_value=0.0)
        if advantage is None or keys.action not in present:
            raise ConfigurationError(
                f"The batch lacks {keys.advantage!r} or {keys.action!r}; compute the "
                f"advantage first, for instance with MCAdvantage."
            )
        if keys.sample_log_prob not in present:
            raise ConfigurationError(
                f"The batch lacks {keys.sample_log_prob!r}. {NOT_SCORED}"
            )
        log_weight, dist, _, mask = self._log_weight(
            batch, adv_shape=advantage.shape[:-1]
        )
        if self.on_scored is not None:
            log_probs = batch.get("_cur_log_prob").detach()
            self.on_scored(tensordict, log_probs.masked_fill(~mask, math.nan))
        if advantage.ndim != log_weight.ndim:
            raise ConfigurationError(
                f"The advantage must have shape (B, 1, 1) or (B, T, 1), got "
                f"{tuple(advantage.shape)}."
            )
        if 1 < mask.shape[1] < advantage.shape[1]:
            # Padded on the left for a larger batch.
            advantage = advantage[:, -mask.shape[1] :]
        check_finite(self.tensor_keys.advantage, advantage.squeeze(-1), mask)
        # Zero times NaN is NaN: values outside of the loss tokens must be finite, too.
        advantage = torch.where(mask.unsqueeze(-1), advantage, 0)
        if self.kl_mask_threshold is not None and self.kl_mask_threshold > 0:
            distance = 0.5 * log_weight.detach().squeeze(-1).square()
            mask = mask & (distance <= self.kl_mask_threshold)
        log_prob = batch.get("_cur_log_prob").unsqueeze(-1)
        if self.distillation is not None:
            self._distilled = distillation_terms(
                self.distillation,
                batch,
                dist,
                mask,
                rollout_key=keys.sample_log_prob,
                vocabulary=self._vocabulary,
            )
            advantage = advantage + self._distilled.advantage
        if self.correction is not None:
            corrected = self._correct(batch, log_prob, advantage, mask, dist.mask)
            mask = corrected.keep
            log_weight = torch.where(
                mask.unsqueeze(-1), log_prob - corrected.old.unsqueeze(-1), 0
            )
            aggregation = "none" if self.reduction == "none" else self.aggregation
            advantage = scale_advantage(
                advantage.squeeze(-1), corrected, aggregation
            ).unsqueeze(-1)
        self._mask = mask
        output = self._policy_terms(log_weight, log_prob, advantage, mask, batch)
        output["kl_approx"] = masked_mean(-log_weight.detach().squeeze(-1), mask)
        output |= self._entropy_terms(dist, advantage, mask, batch)
        output |= self._kl_terms(batch, log_prob.squeeze(-1), mask)
        output |= self._distillation_terms(batch, mask)
        return self.output_type.from_tensordict(TensorDict(output))

    def accumulate(
        self,
        parts: Iterable[TensorDictBase],
        *,
        process_group: dist.ProcessGroup | None = None,
    ) -> Any:
        """Adds the gradient of a batch to the parameters, from parts of the batch.

        The gradient equals a single pass over the whole batch, however it is cut: each
        part counts by its tokens, or with ``aggregation="prompt_mean"`` its sequences,
        that the correction leaves in the loss. It replaces ``backward()``; the memory
        is the largest part's. Existing gradients are kept, and added to.

        A batch corrected by :class:`.OffPolicyCorrection` may be cut, too.

        Args:
            parts: the batch, cut along its first dimension; read one after the other.
            process_group: the ranks of the trainer, each with a share of the batch,
                which call this together. Parts of all ranks count as if one rank had
                them. The model is FSDP2's, DistributedDataParallel's, or a copy on each
                rank. Defaults to None: this rank has the whole batch.

        Returns:
            Losses and metrics of the batch, in TorchRL's class of outputs, detached, as
            of a single pass.

        Raises:
            ConfigurationError: if ``aggregation="none"`` leaves the average to the
                caller, the correction divides by a mean over the batch
                (``rollout_is_batch_normalize``), or there is no part.
            NotFiniteError: as :meth:`forward`; on all ranks, if any rank has it.
            SGLangError: if another rank failed with its part, such as out of memory.

        Examples:
            >>> loss = CorrectedGRPOLoss(actor, clip_epsilon=0.2)  # doctest: +SKIP
            >>> for minibatch in buffer:  # doctest: +SKIP
            ...     output = loss.accumulate(minibatch.split(4))
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        self._check_can_be_cut()
        total, scored = dict[str, Statistic](), list[Any]()
        ranks, failure = LossRanks(process_group, self), None
        with own_gradients(self.parameters(), ranks) as gradients:
            for part, counts in ranks.same_number(parts):
                output = self._try_forward(part, ranks, failure)
                losses = _fields(output, losses=True)
                count = self._count() * counts
                value = torch.stack([loss.sum() for loss in losses.values()]).sum()
                with torch.autocast(value.device.type, enabled=False):
                    failure = _try_backward(value * gradients.weigh(count))
                scored.append(self._scored)
                if counts:
                    total = add_up(total, self._statistics_of(output, count))
            ranks.agree(failure)
        if not total:
            raise ConfigurationError(
                "accumulate() was given no part of a batch; give batch.split(size)."
            )
        self._check_scored(scored, ranks)
        reduced = of_all_ranks(total.values(), ranks)
        total = dict(zip(total, reduced, strict=True))
        self._correction_statistics = {
            name: total.pop(name) for name in self._correction_statistics
        }
        return self.output_type.from_tensordict(TensorDict(values_of(total)))

    def _statistics_of(self, output: Any, count: Tensor) -> dict[str, Statistic]:
        """Returns additive losses, means of ``count``, and metrics of the last pass."""
        assert self._mask is not None
        statistics = dict[str, Statistic]()
        for values, weight in (
            (_fields(output, losses=True), count),
            (_fields(output, losses=False), self._mask.sum()),
        ):
            statistics |= {name: weighted_mean(v, weight) for name, v in values.items()}
        if self._distilled is not None:
            statistics |= self._distilled.statistics
        return statistics | self._sample_size | self._correction_statistics

    def _try_forward(
        self, part: TensorDictBase, ranks: LossRanks, failure: Exception | None
    ) -> Any:
        """Returns the output of a part, unless a rank failed with this or the last."""
        output = None
        try:
            if failure is None:
                with replaying(self.actor_network, part):
                    output = self._forward(part)
        except Exception as error:  # noqa: BLE001 - Shared with the other ranks.
            failure = error
        ranks.agree(failure)
        return output

    def _check_scored(self, parts: list[Any], ranks: LossRanks) -> None:
        """Refuses a batch in which no token of the policy has a log-prob."""
        if self.correction is None:
            return
        flags = torch.tensor(parts, dtype=torch.int64)
        written, scored = ranks.reduce(flags.amax(0), dist.ReduceOp.MAX).tolist()
        if written and not scored:
            raise ConfigurationError(NOT_SCORED)

    def _check_can_be_cut(self) -> None:
        """Refuses settings whose result depends on the cut of a batch."""
        if "none" in (self.aggregation, self.reduction):
            raise ConfigurationError(
                "aggregation='none' and reduction='none' leave the average over the "
                "batch to the caller; choose aggregation='token_mean' or 'prompt_mean' "
                "to accumulate gradients."
            )
        if self.correction is not None and self.correction.rollout_is_batch_normalize:
            raise ConfigurationError(
                "rollout_is_batch_normalize=True divides the weights by their mean "
                "over the batch, which parts of it do not know; leave it out, or "
                "correct the whole batch with OffPolicyCorrection."
            )

    def _count(self) -> Tensor:
        """Returns the denominator of the losses of the last forward pass."""
        assert self._mask is not None
        if self.aggregation == "constant":
            return torch.tensor(len(self._mask), device=self._mask.device)
        if self.aggregation != "prompt_mean":
            return self._mask.sum()
        # With a correction, sequences without a token left do not count.
        rows = self._mask.any(-1)
        return (rows if self.correction is not None else torch.ones_like(rows)).sum()

    def _aggregate_loss_value(
        self, value: Tensor, mask: Tensor, tensordict: TensorDictBase | None = None
    ) -> Tensor:
        """Returns the loss of a batch from each token's loss."""
        if self.aggregation == "constant" and self.reduction != "none":
            assert self.max_tokens is not None
            selected = torch.where(mask.unsqueeze(-1), value, 0)
            return selected.sum((0, 1)) / (len(mask) * self.max_tokens)
        loss: Tensor = super()._aggregate_loss_value(value, mask, tensordict)
        return loss

    def _mean(self, value: Tensor, batch: TensorDictBase) -> Tensor:
        """Returns a loss of each token, aggregated as the policy's."""
        mask = self._mask
        assert mask is not None
        loss: Tensor = self._aggregate_loss_value(value, mask, batch)
        if self.aggregation == "prompt_mean" and self.reduction != "none":
            # TorchRL's mean is over all sequences.
            loss = loss * mask.shape[0] / self._count().clamp_min(1)
        return loss

    def _get_cur_log_prob(self, tensordict: TensorDictBase) -> Any:
        """Returns log-probs of the tokens and their distribution."""
        actor = self.actor_network
        reads = self._reads_tokens() and ATTENTION_MASK in tensordict.keys(True)
        if not reads:
            if not replays_sampling(actor):
                warn_of_sampling(tensordict)
            return super()._get_cur_log_prob(tensordict)
        padding = actor.tokenizer.pad_token_id
        tokens = read(tensordict, TOKENS, padding_value=padding)
        attention = read(tensordict, ATTENTION_MASK, padding_value=False)
        assert tokens is not None
        assert attention is not None
        mask = read_mask(tensordict, self.masking_strategy, tokens.shape[1])
        sampling = self.sampling_of(tensordict)
        options: dict[str, Any] = {"entropy": self.entropy_bonus, "sampling": sampling}
        if self.distillation is not None:
            options["ids"] = compared_ids(
                self.distillation, tensordict, tokens, self._vocabulary
            )
        if self.packs:
            options["tree"] = self.trees
            terms = packed_terms(actor.model, tokens, attention, mask, **options)
        else:
            terms = padded_terms(actor, tokens, attention, mask, **options)
        return terms.log_prob, terms, False

    def sampling_of(self, batch: TensorDictBase) -> Drawn | None:
        """Returns the sampling distributions of a batch's tokens, if replayed."""
        sampling = read_sampling(batch) if self.replay_sampling else None
        if sampling is None:
            warn_of_sampling(batch)
        return sampling

    def _reads_tokens(self) -> bool:
        """Returns whether the actor scores tokens, so that logits are read in place."""
        actor = self.actor_network
        return (
            type(actor) is TransformersWrapper
            and actor.input_mode == "tokens"
            and actor.input_key == self.tensor_keys.action == TOKENS
            and actor.pad_model_input
            and not (actor.pad_output or actor.generate)
        )

    def _get_entropy(self, dist: Any, adv_shape: torch.Size) -> Any:
        if isinstance(dist, PassTerms):
            return dist.entropy.unsqueeze(-1)
        return super()._get_entropy(dist, adv_shape=adv_shape)

    def _correct(
        self,
        batch: TensorDictBase,
        log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        tokens: Tensor,
    ) -> Corrected:
        """Applies the correction with the log-probs of this forward pass."""
        assert self.correction is not None
        rollout = read(batch, self.tensor_keys.sample_log_prob, padding_value=0.0)
        assert rollout is not None
        written = read_written(batch, tokens)
        self._scored = written.any(), (written & ~rollout.isnan()).any()
        versions = None
        if self.correction.needs_versions:
            versions = read_versions(batch, self.version_key, mask.shape)
        with torch.no_grad():
            corrected = correct(
                self.correction,
                Sampled(
                    rollout=rollout,
                    # The mask lacks the tokens whose log-probs are unknown.
                    mask=mask | (tokens & ~rollout.isfinite()),
                    advantage=advantage.squeeze(-1).expand(mask.shape),
                    train=log_prob.detach().squeeze(-1),
                    versions=versions,
                    version=self.consumer_version,
                ),
            )
        self._correction_statistics = corrected.statistics
        return corrected

    def _policy_terms(
        self,
        log_weight: Tensor,
        log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        batch: TensorDictBase,
    ) -> dict[str, Tensor]:
        """Returns the loss of the policy, the share of clipped tokens, and the ESS."""
        gain = self._gain(log_weight, log_prob, advantage)
        weight = log_weight.detach()
        clipped = weight.clamp(*self._clip_bounds) != weight
        self._sample_size = {"ESS": _sample_size(weight.squeeze(-1), mask)}
        return {
            "loss_objective": self._aggregate_loss_value(-gain, mask, batch),
            "clip_fraction": masked_mean(clipped.squeeze(-1).to(weight.dtype), mask),
            **values_of(self._sample_size),
        }

    def _gain(self, log_weight: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """Returns the objective of each token, to be maximised."""
        del log_prob
        loss: Tensor = self._compute_policy_objective(log_weight, advantage)[0]
        return -loss

    def _entropy_terms(
        self, dist: Any, advantage: Tensor, mask: Tensor, batch: TensorDictBase
    ) -> dict[str, Tensor]:
        if not self.entropy_bonus:
            return {}
        entropy = self._get_entropy(dist, adv_shape=advantage.shape[:-1])
        loss = -self.entropy_coeff * entropy
        return {
            "entropy": masked_mean(entropy.detach().squeeze(-1), mask),
            "loss_entropy": self._mean(loss, batch),
        }

    def _kl_terms(
        self, batch: TensorDictBase, log_prob: Tensor, mask: Tensor
    ) -> dict[str, Tensor]:
        """Returns the divergences from reference and inference policy."""
        terms = {}
        if self.kl_to_ref_coeff is not None and self.kl_to_ref_coeff > 0:
            terms["kl_to_ref"] = (self.tensor_keys.ref_log_probs, self.kl_to_ref_coeff)
        if self.kl_to_inference_coeff is not None:
            key = self.tensor_keys.sample_log_prob
            terms["kl_to_inference"] = (key, self.kl_to_inference_coeff)
        output = {}
        for name, (key, coeff) in terms.items():
            other = self._read_log_probs(batch, key, mask)
            difference = torch.where(mask, other - log_prob, 0)
            divergence = difference.expm1() - difference
            output[f"loss_{name}"] = coeff * self._mean(divergence.unsqueeze(-1), batch)
            output[name] = masked_mean(divergence.detach(), mask)
        return output

    def _distillation_terms(
        self, batch: TensorDictBase, mask: Tensor
    ) -> dict[str, Tensor]:
        """Returns the loss and the metrics of the divergence from a teacher."""
        terms = self._distilled
        if terms is None:
            return {}
        output = terms.metrics(mask)
        if terms.loss is not None:
            output["loss_distillation"] = self._mean(terms.loss.unsqueeze(-1), batch)
        return output

    def _read_log_probs(
        self, batch: TensorDictBase, key: NestedKey, mask: Tensor
    ) -> Tensor:
        """Returns log-probs of another policy, ``(B, T)``."""
        value = batch.get(
            key,
            None,
            as_padded_tensor=True,
            padding_side=self.ref_log_prob_padding_side,
            padding_value=self.ref_log_prob_padding_value,
        )
        if value is None:
            raise ConfigurationError(
                f"The batch has no log-probs {key!r}, which the divergence is to; "
                f"compute them first, for instance with TorchRL's RetrieveLogProb."
            )
        value = value.squeeze(-1) if value.ndim == mask.ndim + 1 else value
        if value.shape != mask.shape:
            raise ConfigurationError(
                f"The log-probs {key!r} have shape {tuple(value.shape)}, the policy's "
                f"{tuple(mask.shape)}: they are not of the same tokens."
            )
        check_finite(key, value, mask)
        return torch.where(mask, value, 0)


def _sample_size(log_weight: Tensor, mask: Tensor) -> Statistic:
    """Returns the effective sample size of weights, as a share of their number."""

    def size(total: Tensor, squares: Tensor, count: Tensor) -> Tensor:
        return (total.square() / (squares * count)).nan_to_num(0.0)

    # The square of a larger weight would be infinite.
    weight = log_weight.double().clamp(max=_LARGEST_LOG_WEIGHT).exp()
    return replace(moments(weight, mask, size), dtype=log_weight.dtype)


def _try_backward(value: Tensor) -> Exception | None:
    """Adds to the gradients; returns the error, for the ranks to agree on."""
    try:
        torch.autograd.backward(value)
    except Exception as error:  # noqa: BLE001 - Shared with the other ranks.
        return error
    return None


def _fields(output: Any, *, losses: bool) -> dict[str, Tensor]:
    """Returns the losses of an output, or its metrics."""
    fields = output.to_tensordict(retain_none=False).items()
    return {name: value for name, value in fields if name.startswith("loss_") is losses}


class CorrectedCISPOLoss(CorrectedGRPOLoss, TorchRLCISPOLoss):
    r"""CISPO: REINFORCE with a clipped importance weight without a gradient.

    .. math::

        L = - sg(clip(r_t, 1 - \epsilon_{low}, 1 + \epsilon_{high}))
            \, A_t \log \pi_\theta(t), \qquad
        r_t = \pi_\theta(t) / \pi_{rollout}(t)

    so that every token has a gradient, however far its ratio is clipped. MiniMax-M1,
    https://arxiv.org/abs/2506.13585. TorchRL 0.14's ``CISPOLoss`` differentiates the
    clipped weight itself: it has no gradient for clipped tokens. Averages and arguments
    are as in :class:`.CorrectedGRPOLoss`. The paper sets no lower bound:
    ``clip_epsilon=(0.999, high)``.

    Examples:
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> actor = TransformersWrapper(
        ...     model, tokenizer=tokenizer, input_mode="tokens", generate=False
        ... )
        >>> loss = CorrectedCISPOLoss(actor, clip_epsilon=(0.999, 2.0))
        >>> round(loss.clip_epsilon_high.item(), 3)
        2.0
    """

    def _gain(self, log_weight: Tensor, log_prob: Tensor, advantage: Tensor) -> Tensor:
        """Returns the log-prob, weighted without gradient."""
        weight = log_weight.detach().clamp(*self._clip_bounds).exp()
        return weight * advantage * log_prob


class CorrectedGSPOLoss(CorrectedGRPOLoss):
    r"""GSPO: the ratio of a whole response, clipped as a whole.

    .. math::

        L = -\frac1B \sum_i \min(s_i A_i, clip(s_i, 1 - \epsilon_{low},
            1 + \epsilon_{high}) A_i), \qquad
        s_i = \Big(\frac{\pi_\theta(y_i)}{\pi_{rollout}(y_i)}\Big)^{1/|y_i|}

    Group Sequence Policy Optimization, https://arxiv.org/abs/2507.18071. Arguments are
    as in :class:`.CorrectedGRPOLoss`, but for the paper's clipping bounds, 3e-4 and
    4e-4, which are much smaller than GRPO's, and for ``aggregation="prompt_mean"``.

    Examples:
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> actor = TransformersWrapper(
        ...     model, tokenizer=tokenizer, input_mode="tokens", generate=False
        ... )
        >>> CorrectedGSPOLoss(actor).aggregation
        'prompt_mean'
    """

    def __init__(
        self,
        actor_network: Any = None,
        *,
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        aggregation: str = "prompt_mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, **kwargs
        )

    def _policy_terms(
        self,
        log_weight: Tensor,
        log_prob: Tensor,
        advantage: Tensor,
        mask: Tensor,
        batch: TensorDictBase,
    ) -> dict[str, Tensor]:
        """Returns the terms with the mean log-ratio of each sequence for its tokens."""
        mean = masked_mean(log_weight.squeeze(-1), mask, -1).view(-1, 1, 1)
        return super()._policy_terms(
            mean.expand_as(log_weight), log_prob, advantage, mask, batch
        )
