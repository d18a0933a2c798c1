"""Group-relative advantages of responses.

A row of :data:`ADVANTAGES` is a pure function of the returns of groups, float64
``(groups, group_size)``. Batches come from this package's collectors: whole groups, in
which the turns of a conversation and the conversations of a group are consecutive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.objectives.roles import role_of
from torchrl_sglang.support.checks import (
    check_choice,
    check_count,
    refuse_unknown,
    suggest,
)
from torchrl_sglang.support.user_code import refuse_coroutine

REWARD = ("next", "reward")
DONE = ("next", "done")

TrajectoryReturn: TypeAlias = Literal["sum", "mean"]
"""Reduction of the rewards of a conversation's rows to its return."""

MIN_DEVIATION = 1e-6
"""Added to the standard deviation, as in TRL and verl."""


def standardized(returns: Tensor) -> Tensor:
    r"""GRPO: :math:`(R_i - \bar R) / (\sigma + 10^{-6})`, :math:`\sigma` of a sample.

    DeepSeekMath, https://arxiv.org/abs/2402.03300.

    Examples:
        >>> standardized(torch.tensor([[0.0, 0.0, 1.0, 1.0]])).round(decimals=3)
        tensor([[-0.8660, -0.8660,  0.8660,  0.8660]])
    """
    return centered(returns) / (returns.std(-1, keepdim=True) + MIN_DEVIATION)


def centered(returns: Tensor) -> Tensor:
    r"""Dr. GRPO: :math:`R_i - \bar R`, so that easy and hard prompts count alike.

    Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783.

    Examples:
        >>> centered(torch.tensor([[0.0, 0.0, 0.0, 1.0]]).double())
        tensor([[-0.2500, -0.2500, -0.2500,  0.7500]], dtype=torch.float64)
    """
    return returns - returns.mean(-1, keepdim=True)


def leave_one_out(returns: Tensor) -> Tensor:
    r"""RLOO: :math:`R_i` minus the mean of the *other* returns.

    Back to Basics, https://arxiv.org/abs/2402.14740.

    Examples:
        >>> leave_one_out(torch.tensor([[0.0, 0.0, 1.0]]).double())
        tensor([[-0.5000, -0.5000,  1.0000]], dtype=torch.float64)
    """
    size = returns.shape[-1]
    return centered(returns) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "standardized": standardized,
    "centered": centered,
    "leave_one_out": leave_one_out,
}
"""Name -> advantages ``(groups, group_size)`` of returns of the same shape."""


def row_rewards(rows: TensorDictBase) -> Tensor:
    """Returns each row's total ``(B,)`` of a single reward or of token rewards."""
    return torch.stack([row[REWARD].double().sum() for row in rows.unbind(0)])


def conversation_returns(
    rows: TensorDictBase, trajectory_return: TrajectoryReturn = "sum"
) -> tuple[Tensor, Tensor]:
    """Returns the float64 returns of whole conversations, and each row's conversation.

    The turns of a conversation are consecutive rows. ``trajectory_return`` is as for
    :class:`GroupAdvantage`.
    """
    done = rows[DONE].flatten().bool()
    conversation = done.cumsum(0) - done.long()
    count = int(conversation[-1]) + 1
    rewards = row_rewards(rows).double()
    returns = rewards.new_zeros(count).index_add_(0, conversation, rewards)
    if trajectory_return == "mean":
        returns /= torch.bincount(conversation, minlength=count)
    return returns, conversation


def groups_of_agents(
    rows: TensorDictBase, conversation: Tensor, group_size: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields the rows that are compared where agents of a session differ in rewards.

    An agent is known by the ``model`` of its requests. Agents of one role, such as
    ``solver`` and ``solver-2``, are compared with each other, in all sessions of their
    group. Yields the group's number, a mask ``(B,)`` of the role's rows, and their
    rewards.
    """
    rewards = row_rewards(rows)
    models = [_model(row) for row in rows.unbind(0)]
    group_of_row = (conversation // group_size).tolist()
    by_session: dict[int, dict[Any, float]] = defaultdict(dict)
    for number, model, reward in zip(
        conversation.tolist(), models, rewards.tolist(), strict=True
    ):
        by_session[number][model] = reward
    differ = (n for n, of in by_session.items() if len(set(of.values())) > 1)
    for group in sorted({number // group_size for number in differ}):
        names = {
            model
            for model, number in zip(models, group_of_row, strict=True)
            if number == group
        }
        roles = [
            role_of(model, names) if number == group else None
            for model, number in zip(models, group_of_row, strict=True)
        ]
        for role in dict.fromkeys(filter(None, roles)):
            mask = torch.tensor([value == role for value in roles])
            yield group, mask, rewards[mask]


def _model(row: TensorDictBase) -> str:
    request = row.get("request", None)
    return "policy" if request is None else str(request["model"])


class GroupAdvantage:
    """Adds ``"advantage"`` to a batch of whole groups, float32 of shape ``(B, 1, 1)``.

    All turns of a conversation share its advantage. Computed in float64: the advantage
    of equal rewards is zero. It keeps no state: unlike TorchRL's ``MCAdvantage`` it
    needs whole groups, and no prompt as a key of the group.

    Args:
        group_size: conversations per group; at least 2.
        kind: a name of :data:`ADVANTAGES`, or a function of the same signature.
            Defaults to ``"standardized"``.
        trajectory_return: ``"sum"`` adds the rewards of a conversation's turns up;
            ``"mean"`` is for agents, each of whose rows has the whole reward. Where
            the agents of a session have rewards of their own, each row of its group has
            an advantage of its own, among the rows of agents of its role. Defaults to
            ``"sum"``.

    Raises:
        ConfigurationError: if an argument is invalid, or, when called, a batch does not
            consist of whole groups.
        NotFiniteError: when called, if a function makes NaN or infinite advantages of
            finite returns. The loss handles NaN and infinite returns.

    Examples:
        >>> from tensordict import TensorDict
        >>> following = TensorDict(
        ...     reward=torch.tensor([0.0, 1.0]).view(2, 1, 1),
        ...     done=torch.ones(2, 1, dtype=torch.bool),
        ...     batch_size=2,
        ... )
        >>> batch = TensorDict(next=following, batch_size=2)
        >>> GroupAdvantage(2, "centered")(batch)["advantage"].flatten()
        tensor([-0.5000,  0.5000])
    """

    @refuse_unknown
    def __init__(
        self,
        group_size: int,
        kind: str | Callable[[Tensor], Tensor] = "standardized",
        *,
        trajectory_return: TrajectoryReturn = "sum",
    ) -> None:
        check_count("group_size", group_size, least=2)
        if not callable(kind) and kind not in ADVANTAGES:
            raise ConfigurationError(
                f"advantage={kind!r} is not one of {', '.join(ADVANTAGES)}, nor a "
                f"function of returns.{suggest(str(kind), ADVANTAGES)}"
            )
        refuse_coroutine("advantage", kind, "it is called without an event loop")
        check_choice("trajectory_return", trajectory_return, ("sum", "mean"))
        self.group_size = group_size
        self._compute = kind if callable(kind) else ADVANTAGES[kind]
        self._trajectory_return = trajectory_return

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """Adds advantages to the batch in place, and returns it."""
        returns, conversation = conversation_returns(batch, self._trajectory_return)
        if returns.numel() % self.group_size or not batch[DONE].flatten()[-1]:
            raise ConfigurationError(
                f"A batch of {returns.numel()} conversations in {len(conversation)} "
                f"rows does not consist of whole groups of {self.group_size}; give the "
                f"collector the same group_size."
            )
        advantages = self._advantages(returns.view(-1, self.group_size))
        of_rows = advantages.flatten()[conversation]
        if self._trajectory_return == "mean":
            groups = groups_of_agents(batch, conversation, self.group_size)
            for _, mask, rewards in groups:
                alone = rewards.numel() == 1
                of_rows[mask] = 0.0 if alone else self._advantages(rewards[None])[0]
        return batch.set("advantage", of_rows.view(-1, 1, 1))

    def _advantages(self, returns: Tensor) -> Tensor:
        """Returns the checked advantages of groups of the same size."""
        advantages = self._compute(returns)
        if not isinstance(advantages, Tensor) or advantages.shape != returns.shape:
            raise ConfigurationError(
                f"The advantage function was given returns of shape "
                f"{tuple(returns.shape)} and returned {advantages!r:.200}; it must "
                f"return a tensor of the same shape."
            )
        advantages = advantages.float()
        wrong = ~advantages.isfinite().all(-1)
        if wrong.any() and returns.isfinite().all():
            group = int(wrong.nonzero()[0])
            raise NotFiniteError(
                f"The advantage function returned {advantages[group].tolist()} for the "
                f"returns {returns[group].tolist()} of a group; it must return finite "
                f"numbers, also where all returns are equal: add a small number to a "
                f"deviation that it divides by."
            )
        return advantages
