"""Advantages in groups: against TorchRL's, by formula, and what is no group."""

from __future__ import annotations

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack
from torchrl.objectives.llm import MCAdvantage

from torchrl_sglang import GroupAdvantage, has_variance
from torchrl_sglang.collectors.groups.filter import GroupFilter
from torchrl_sglang.errors import ConfigurationError, NotFiniteError
from torchrl_sglang.objectives.advantages import ADVANTAGES

SIZE = 4


def batch_of(rewards, turns=None):
    """Returns a row for each turn; the reward is in the last one."""
    rows = []
    for number, reward in enumerate(rewards):
        count = 1 if turns is None else turns[number]
        for turn in range(count):
            last = turn == count - 1
            rows.append(
                TensorDict(
                    query=f"prompt {number // SIZE}",
                    next=TensorDict(
                        reward=torch.full((1, 1), float(reward) if last else 0.0),
                        done=torch.tensor([last]),
                    ),
                    tokens=TensorDict(response=torch.zeros(number + 1)),
                )
            )
    return lazy_stack(rows)


@pytest.mark.parametrize("several", [False, True])
def test_standardized_is_torchrls(several):
    torch.manual_seed(0)
    rewards = torch.randn(3 * SIZE).tolist()
    turns = [1 + number % 3 for number in range(len(rewards))] if several else None
    ours = GroupAdvantage(SIZE)(batch_of(rewards, turns))["advantage"]
    theirs = MCAdvantage(grpo_size=SIZE, trajectory_return="sum").inv(
        batch_of(rewards, turns)
    )["advantage"]
    assert ours.shape == theirs.shape == (sum(turns) if several else 12, 1, 1)
    # Theirs has another constant beside the standard deviation, and float32.
    torch.testing.assert_close(ours, theirs.to(ours.dtype), atol=1e-4, rtol=1e-4)


def test_a_reward_for_each_token_counts_as_their_sum():
    rewards = [3.0, 1.0, 0.0, 2.0]
    batch = batch_of(rewards)
    for number, (row, reward) in enumerate(zip(batch.unbind(0), rewards, strict=True)):
        of_tokens = torch.zeros(number + 2, 1)
        of_tokens[0], of_tokens[-1] = reward - 0.5, 0.5
        row["next", "reward"] = of_tokens
    found = GroupAdvantage(SIZE)(batch)["advantage"]
    assert torch.equal(found, GroupAdvantage(SIZE)(batch_of(rewards))["advantage"])


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_rewards_have_no_advantage(kind):
    found = GroupAdvantage(SIZE, kind)(batch_of([0.1] * SIZE))["advantage"]
    assert found.abs().max() < 1e-9
    assert found.dtype == torch.float32


def test_leave_one_out_by_hand():
    rewards = [3.0, 1.0, 0.0, 2.0]
    found = GroupAdvantage(SIZE, "leave_one_out")(batch_of(rewards))["advantage"]
    expected = [
        value - sum(other for o, other in enumerate(rewards) if o != n) / 3
        for n, value in enumerate(rewards)
    ]
    torch.testing.assert_close(found.flatten(), torch.tensor(expected))


def test_rows_of_agents_have_the_whole_reward():
    """A session with more trajectories does not count for more."""
    batch = batch_of([1.0, 0.0, 1.0, 0.0], turns=[3, 1, 1, 1])
    for row in batch.unbind(0)[:2]:
        row["next", "reward"].fill_(1.0)
    found = GroupAdvantage(SIZE, "centered", trajectory_return="mean")(batch)
    assert found["advantage"].flatten().tolist() == [0.5, 0.5, 0.5, -0.5, 0.5, -0.5]


def test_agents_with_rewards_of_their_own_are_compared_with_each_other():
    """As of a rubric that ranks the attempts in a session."""
    rewards = [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]
    batch = batch_of([0.0, 0.0, 5.0, 0.0], turns=[2, 2, 1, 1])
    for number, (row, reward) in enumerate(zip(batch.unbind(0), rewards, strict=True)):
        row["next", "reward"].fill_(reward)
        name = ("agent", "agent-2")[number % 2]
        row["request"] = TensorDict(model=NonTensorData(name))
    by_two = GroupAdvantage(2, "centered", trajectory_return="mean")
    found = by_two(batch)["advantage"].flatten().tolist()
    assert found == [1.0, -1.0, 1.0, -1.0, 0.5, -0.5]
    returns = GroupFilter(has_variance, of_agents=True).returns
    assert has_variance(returns(batch.unbind(0)[:4]))
    # Branches of one agent are one trajectory.
    for row in batch.unbind(0):
        row["request"] = TensorDict(model=NonTensorData("agent"))
    found = by_two(batch)["advantage"].flatten().tolist()
    assert found == [0.0, 0.0, 0.0, 0.0, 0.5, -0.5]
    assert not has_variance(returns(batch.unbind(0)[:4]))


def test_agents_of_different_roles_are_not_compared_with_each_other():
    rewards = [1.0, 5.0, 0.0, 3.0]
    batch = batch_of([0.0, 0.0], turns=[2, 2])
    for number, (row, reward) in enumerate(zip(batch.unbind(0), rewards, strict=True)):
        row["next", "reward"].fill_(reward)
        name = ("gpt-4", "critic")[number % 2]
        row["request"] = TensorDict(model=NonTensorData(name))
    by_two = GroupAdvantage(2, "centered", trajectory_return="mean")
    assert by_two(batch)["advantage"].flatten().tolist() == [0.5, 1.0, -0.5, -1.0]


def test_an_agent_without_another_of_its_role_has_no_advantage():
    batch = batch_of([0.0, 0.0], turns=[2, 1])
    models = ("solver", "helper", "solver")
    for number, (row, name) in enumerate(zip(batch.unbind(0), models, strict=True)):
        row["next", "reward"].fill_(float(number))
        row["request"] = TensorDict(model=NonTensorData(name))
    by_two = GroupAdvantage(2, trajectory_return="mean")
    found = by_two(batch)["advantage"].flatten()
    assert found[1] == 0
    assert found[0] == -found[2] < 0


def test_a_function():
    found = GroupAdvantage(SIZE, lambda returns: -returns)(batch_of([1, 2, 3, 4]))
    assert found["advantage"].flatten().tolist() == [-1, -2, -3, -4]
    with pytest.raises(ConfigurationError, match="must return a tensor of the same"):
        GroupAdvantage(SIZE, lambda returns: returns[0])(batch_of([1, 2, 3, 4]))


@pytest.mark.parametrize(
    "function",
    [
        lambda returns: (
            (returns - returns.mean(-1, keepdim=True)) / returns.std(-1, keepdim=True)
        ),
        lambda returns: (returns - returns.mean()) / returns.std(-1, keepdim=True),
        lambda returns: returns * 1e300,
    ],
    ids=["0/0", "1/0", "too large for float32"],
)
def test_a_function_that_divides_by_zero(function):
    """It is found where it is computed; a reward that is NaN is not its fault."""
    batch = batch_of([1.0, 2.0, 3.0, 4.0, 0.5, 0.5, 0.5, 0.5])
    with pytest.raises(NotFiniteError, match=r"function returned .*(nan|inf).*returns"):
        GroupAdvantage(SIZE, function)(batch)
    batch[0]["next", "reward"].fill_(torch.nan)
    assert "advantage" in GroupAdvantage(SIZE, function)(batch).keys()


async def waits(returns):
    return returns


def test_invalid_arguments_are_refused():
    with pytest.raises(ConfigurationError, match="advantage=.* coroutine function"):
        GroupAdvantage(SIZE, waits)
    with pytest.raises(ConfigurationError, match="groups of 4; give the collector"):
        GroupAdvantage(SIZE)(batch_of([1.0] * 6))
    cut_off = batch_of([1.0] * SIZE, turns=[2] * SIZE)[:-1]
    with pytest.raises(ConfigurationError, match="groups of 4"):
        GroupAdvantage(SIZE)(cut_off)
    with pytest.raises(ConfigurationError, match="Did you mean 'centered'"):
        GroupAdvantage(SIZE, "centred")
    with pytest.raises(ConfigurationError, match="group_size"):
        GroupAdvantage(1)
    with pytest.raises(ConfigurationError, match="'sum', 'mean'"):
        GroupAdvantage(SIZE, trajectory_return="max")
