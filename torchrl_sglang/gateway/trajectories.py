"""Paths through the turns of a session, with their rewards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from torchrl_sglang.chat.messages import Message
from torchrl_sglang.gateway.credit import TrainedRule, discounted
from torchrl_sglang.gateway.turns import Turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A path through a session, from a first prompt to a last response."""

    session: str
    """Name of the session."""
    turns: Sequence[Turn]
    """Turns, each of which begins with the tokens of its predecessor."""
    trained: Sequence[bool]
    """True for each turn of the gateway's rule without an earlier trajectory: only
    these are trained."""
    rewards: Sequence[float]
    """Reward at each turn: its own; at the last turn, the session's and the path's
    branches' as well; at the last turn of an agent, the agent's."""
    discount: float = 1.0
    """Discount of a reward for each turn before it."""
    has_reward: bool = True
    """Whether a reward was set; otherwise all are 0."""

    @property
    def returns(self) -> list[float]:
        """Return of each turn, see :func:`.discounted`."""
        return discounted(self.rewards, self.discount)

    @property
    def reward(self) -> float | None:
        """Return of the first turn; ``None``: no reward was set."""
        return self.returns[0] if self.has_reward else None

    @property
    def token_ids(self) -> list[int]:
        """All tokens."""
        return self.turns[-1].token_ids

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        final = self.turns[-1]
        return [*final.prompt.messages, final.reply]

    def spans(self) -> Iterator[tuple[Turn, bool, int, int]]:
        """Yields each turn, whether it is trained, and the bounds of its response."""
        for turn, trained in zip(self.turns, self.trained, strict=True):
            yield turn, trained, turn.prompt.num_tokens, turn.num_tokens


def find_trajectories(
    turns: Sequence[Turn],
    is_trained: TrainedRule,
    *,
    session: str,
    reward: float | None,
    agent_rewards: Mapping[str, float],
    branch_rewards: Mapping[int, float],
    discount: float,
) -> list[Trajectory]:
    """Returns all paths to trained responses without trained continuations.

    Each trained token is trained in its first path.
    """
    by_number = {turn.number: turn for turn in turns}
    chosen = {number for number, turn in by_number.items() if is_trained(turn)}
    inner = _before(by_number, chosen)
    turn_rewards = _own_rewards(by_number, chosen | inner)

    def place(path: Sequence[Turn]) -> list[list[float]]:
        """Returns the rewards at each turn of a path."""
        placed = [list(turn_rewards.get(turn.number, ())) for turn in path]
        if reward is not None:
            placed[-1].append(reward)
        for turn in path:
            if turn.number in branch_rewards:
                placed[-1].append(branch_rewards[turn.number])
        last_index = {turn.model: index for index, turn in enumerate(path)}
        for agent, its_reward in agent_rewards.items():
            if agent in last_index:
                placed[last_index[agent]].append(its_reward)
        return placed

    seen: set[int] = set()
    trajectories = []
    for leaf in by_number.values():
        if leaf.number in inner or leaf.number not in chosen:
            continue
        path = [leaf]
        while (parent := path[-1].prompt.parent) is not None:
            path.append(by_number[parent])
        path.reverse()
        fresh = chosen - seen
        trained = [turn.number in fresh for turn in path]
        seen.update(turn.number for turn in path)
        placed = place(path)
        trajectories.append(
            Trajectory(
                session=session,
                turns=path,
                trained=trained,
                rewards=[sum(values) for values in placed],
                discount=discount,
                has_reward=any(placed),
            )
        )
    return trajectories


def _before(turns: Mapping[int, Turn], chosen: Set[int]) -> set[int]:
    """Returns the numbers of the turns continued by chosen turns."""
    inner: set[int] = set()
    # A turn has a greater number than its predecessors.
    for number in sorted(turns, reverse=True):
        parent = turns[number].prompt.parent
        if parent is not None and (number in chosen or number in inner):
            inner.add(parent)
    return inner


def _own_rewards(turns: Mapping[int, Turn], kept: Set[int]) -> dict[int, list[float]]:
    """Returns the rewards of turns, by number.

    A turn outside of all paths credits its parent with its reward.
    """
    by_turn: dict[int, list[float]] = {}
    for number in sorted(turns, reverse=True):
        turn = turns[number]
        if turn.reward is not None:
            by_turn.setdefault(number, []).append(turn.reward)
        parent = turn.prompt.parent
        if number in by_turn and number not in kept and parent is not None:
            by_turn.setdefault(parent, []).extend(by_turn.pop(number))
    return by_turn
