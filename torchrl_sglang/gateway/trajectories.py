"""Paths through the turns of a session, with what they are worth. Pure."""

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
    """Turns, each of which begins with the tokens of the one before."""
    trained: Sequence[bool]
    """True for each turn that the gateway's rule selects, and that is of no earlier
    trajectory: only these are to be trained on."""
    rewards: Sequence[float]
    """Reward that stands at each turn: its own; at the last one, those of the session
    and of branches on the path, too; at the last one of an agent, that agent's."""
    discount: float = 1.0
    """Factor of a reward for each turn before it."""
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
        last = self.turns[-1]
        return [*last.prompt.messages, last.reply]

    def spans(self) -> Iterator[tuple[Turn, bool, int, int]]:
        """Yields each turn, whether it is trained, and where its response lies."""
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
    """Returns all paths to trained responses that no other one goes on from.

    Each trained token is trained in one of them: in the first that has it.

    Args:
        turns: of the session, in the order of their numbers.
        is_trained: says of a turn whether it is trained.
        session: name of the session.
        reward: of the session as a whole.
        agent_rewards: of agents, by the ``model`` that they name.
        branch_rewards: of branches, by the number of their first turn.
        discount: of a reward, for each turn before it.
    """
    known = {turn.number: turn for turn in turns}
    chosen = {number for number, turn in known.items() if is_trained(turn)}
    inner = _before(known, chosen)
    own = _own_rewards(known, chosen | inner)

    def place(path: Sequence[Turn]) -> list[list[float]]:
        """Returns the rewards that stand at each turn of a path."""
        placed = [list(own.get(turn.number, ())) for turn in path]
        if reward is not None:
            placed[-1].append(reward)
        for turn in path:
            if turn.number in branch_rewards:
                placed[-1].append(branch_rewards[turn.number])
        last = {turn.model: index for index, turn in enumerate(path)}
        for agent, its_reward in agent_rewards.items():
            if agent in last:
                placed[last[agent]].append(its_reward)
        return placed

    seen: set[int] = set()
    found = []
    for leaf in known.values():
        if leaf.number in inner or leaf.number not in chosen:
            continue
        path = [leaf]
        while (parent := path[-1].prompt.parent) is not None:
            path.append(known[parent])
        path.reverse()
        fresh = chosen - seen
        trained = [turn.number in fresh for turn in path]
        seen.update(turn.number for turn in path)
        placed = place(path)
        found.append(
            Trajectory(
                session=session,
                turns=path,
                trained=trained,
                rewards=[sum(each) for each in placed],
                discount=discount,
                has_reward=any(placed),
            )
        )
    return found


def _before(turns: Mapping[int, Turn], chosen: Set[int]) -> set[int]:
    """Returns the numbers of the turns that chosen ones go on from."""
    found: set[int] = set()
    # A turn has a greater number than those before it.
    for number in sorted(turns, reverse=True):
        parent = turns[number].prompt.parent
        if parent is not None and (number in chosen or number in found):
            found.add(parent)
    return found


def _own_rewards(turns: Mapping[int, Turn], kept: Set[int]) -> dict[int, list[float]]:
    """Returns the rewards of turns alone, by number.

    That of a turn of no path is its parent's: what follows a turn is to its credit.
    """
    found: dict[int, list[float]] = {}
    for number in sorted(turns, reverse=True):
        turn = turns[number]
        if turn.reward is not None:
            found.setdefault(number, []).append(turn.reward)
        parent = turn.prompt.parent
        if number in found and number not in kept and parent is not None:
            found.setdefault(parent, []).extend(found.pop(number))
    return found
