"""Supervised fine-tuning on recorded rows: cross entropy of masked tokens."""

from __future__ import annotations

from math import nan
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.columns import read
from torchrl_sglang.objectives.losses import CorrectedGRPOLoss
from torchrl_sglang.objectives.packing import Packing
from torchrl_sglang.objectives.transform import MaskingStrategy
from torchrl_sglang.requests.token_columns import ATTENTION_MASK, TOKENS


class SFTLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Loss of a batch."""

    loss_objective: Tensor


class SFTLoss(CorrectedGRPOLoss):
    r"""Cross entropy of the tokens that a policy wrote, for a :class:`.Learner`.

    .. math::

        L = -\frac1{|M|} \sum_{t \in M} \log \pi_\theta(t)

    over the loss tokens :math:`M` of a batch, at temperature 1: the loss of
    transformers for ``labels`` that are -100 elsewhere. It reads rows of a collector,
    a :class:`.Gateway` or :func:`.load_rollouts`; these need no log-probs and no
    advantage. Which rows are good enough is the caller's choice.

    Args:
        actor_network: a ``TransformersWrapper`` of tokens: ``input_mode="tokens"``,
            ``generate=False``.

    Keyword Args:
        masking_strategy: ``"rlhf"``: all assistant tokens; ``"sft"``: the last
            response; ``"generic"``: all tokens. The first token of a row is in no loss.
            Defaults to ``"rlhf"``.
        packing: as for :class:`.CorrectedGRPOLoss`. Defaults to ``"auto"``.

    Raises:
        ConfigurationError: if an argument is invalid, or it is another actor.

    Examples:
        >>> from torchrl.modules.llm import TransformersWrapper
        >>> actor = TransformersWrapper(
        ...     model, tokenizer=tokenizer, input_mode="tokens", generate=False
        ... )
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        >>> learner = Learner(SFTLoss(actor), optimizer, minibatches=8)
        >>> rows = load_rollouts("runs/x")  # doctest: +SKIP
        >>> good = rows.filter(lambda row: row["reward"] == 1)  # doctest: +SKIP
        >>> learner.train(dataset_to_batch(good))  # doctest: +SKIP
    """

    output_type: Any = SFTLossOutput
    reads_rollouts = False

    def __init__(
        self,
        actor_network: Any,
        *,
        masking_strategy: MaskingStrategy = "rlhf",
        packing: Packing = "auto",
    ) -> None:
        super().__init__(
            actor_network,
            masking_strategy=masking_strategy,
            packing=packing,
            replay_sampling=False,
            entropy_bonus=False,
        )
        if not self._reads_tokens():
            raise ConfigurationError(
                "SFTLoss needs an actor of tokens: TransformersWrapper(model, "
                "input_mode='tokens', generate=False, pad_model_input=True)."
            )

    def sampling_of(self, batch: TensorDictBase) -> None:
        """Returns None: the loss is at temperature 1 for any sampler."""

    def _forward(self, tensordict: TensorDictBase) -> Any:
        real = read(tensordict, ATTENTION_MASK, padding_value=False)
        if real is None or TOKENS not in tensordict.keys(True):
            raise ConfigurationError(
                f"The batch lacks {TOKENS!r} or {ATTENTION_MASK!r}; collect it with "
                f"SGLangWrapper(...), a Gateway, or dataset_to_batch(...)."
            )
        log_prob, terms, _ = self._get_cur_log_prob(tensordict)
        # Nothing is before the first token of a sequence.
        self._mask = mask = terms.mask & (real.cumsum(-1) > 1)
        if self.on_scored is not None:
            self.on_scored(tensordict, log_prob.detach().masked_fill(~mask, nan))
        loss = -torch.where(mask, log_prob, 0).sum() / mask.sum().clamp_min(1)
        return SFTLossOutput(loss_objective=loss, batch_size=())
