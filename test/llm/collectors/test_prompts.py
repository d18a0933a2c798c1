"""Tasks by position, from datasets, data loaders and iterables."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, IterableDataset

from torchrl_sglang.collectors.scheduling.prompts import (
    Passes,
    count_tasks,
    is_read_by_index,
    make_prompts,
)
from torchrl_sglang.errors import ConfigurationError

TASKS = [{"query": f"q{number}", "answer": number} for number in range(5)]


def make(given, shuffle=False, seed=0):
    return make_prompts(given, query_key="query", shuffle=shuffle, seed=seed)


def queries(prompts, positions) -> list[str]:
    return [prompts.fetch(position)["query"] for position in positions]


class Numbers(Dataset):
    def __len__(self):
        return len(TASKS)

    def __getitem__(self, index):
        return TASKS[index]


@pytest.mark.parametrize("given", [TASKS, Numbers(), [t["query"] for t in TASKS]])
def test_a_dataset_is_read_epoch_after_epoch(given):
    assert queries(make(given), range(7)) == ["q0", "q1", "q2", "q3", "q4", "q0", "q1"]


def test_a_seed_is_an_order():
    orders = {
        seed: tuple(queries(make(Numbers(), True, seed), range(10)))
        for seed in range(4)
    }
    assert orders[0] == tuple(queries(make(Numbers(), True, 0), range(10)))
    assert len(set(orders.values())) > 1
    for order in orders.values():
        epochs = order[:5], order[5:]
        assert all(sorted(epoch) == sorted(set(order)) for epoch in epochs)
    # At any position, in any order.
    prompts = make(Numbers(), True, 0)
    backwards = queries(prompts, reversed(range(10)))
    assert tuple(reversed(backwards)) == orders[0]


LOADERS = {
    "mappings": lambda: DataLoader(TASKS, batch_size=2),
    "lists": lambda: DataLoader(TASKS, batch_size=2, collate_fn=list),
    "elements": lambda: DataLoader(TASKS, batch_size=None),
    "sampler": lambda: DataLoader(TASKS, batch_sampler=[[0, 1], [2, 3, 4]]),
    "tensordicts": lambda: [
        TensorDict({"query": ["q0", "q1"], "answer": torch.arange(2)}, batch_size=2),
        TensorDict({"query": ["q2"], "answer": torch.tensor([2])}, batch_size=1),
    ],
    "generator": lambda: iter(TASKS),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_are_taken_apart(kind):
    prompts = make(iter(LOADERS[kind]()) if kind == "tensordicts" else LOADERS[kind]())
    for position in range(3):
        task = prompts.fetch(position)
        assert task["query"] == f"q{position}"
        assert int(task["answer"]) == position


def test_an_iterable_is_iterated_again_and_an_iterator_ends():
    assert queries(make(DataLoader(TASKS, batch_size=2)), range(6))[5] == "q0"
    prompts = make(iter(TASKS))
    assert prompts.fetch(4) is not None
    assert prompts.fetch(5) is None
    assert prompts.fetch(6) is None


@pytest.mark.parametrize("given", [TASKS, DataLoader(TASKS, batch_size=2)])
def test_prompts_end_after_their_passes(given):
    def again():
        return make(Passes(given, 2))

    prompts = again()
    order = queries(prompts, range(10))
    assert order == [f"q{number}" for number in range(5)] * 2
    assert prompts.fetch(10) is None
    assert prompts.fetch(11) is None
    # In the second pass.
    resumed = again()
    resumed.resume(saved(prompts), 7, [3, 6])
    assert queries(resumed, [3, 6, 7, 8, 9]) == ["q3", "q1", "q2", "q3", "q4"]
    assert resumed.fetch(10) is None


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (TASKS, 5),
        (iter(TASKS), None),
        (DataLoader(TASKS, batch_size=None), 5),
        (DataLoader(TASKS, batch_size=2), 5),
        (DataLoader(TASKS, batch_size=2, drop_last=True), 4),
        (DataLoader(TASKS, batch_sampler=[[0, 1], [2, 3, 4]]), None),
        (DataLoader(TASKS, batch_size=2, sampler=[4, 2, 0]), 3),
    ],
)
def test_tasks_are_counted_and_not_batches(given, count):
    assert count_tasks(given) == count


def saved(prompts) -> dict:
    return json.loads(json.dumps(prompts.state_dict()))


@pytest.mark.parametrize("given", [TASKS, "iterator"])
def test_a_run_goes_on(given):
    def again():
        return make(iter(TASKS) if given == "iterator" else given)

    prompts = again()
    prompts.fetch(3)
    state = saved(prompts)
    prompts = again()
    prompts.resume(state, 4, [1, 3])
    assert queries(prompts, [1, 3, 4]) == ["q1", "q3", "q4"]
    # Until it is done, a task can be asked for again.
    assert queries(prompts, [3]) == ["q3"]
    for position in (1, 3, 4):
        prompts.done(position)
    if given == "iterator":
        assert not prompts._open
        with pytest.raises(ConfigurationError, match="The prompts end at 5"):
            prompts.resume(state, 9, [])


def test_a_dataset_keeps_the_seed_of_its_state():
    prompts = make(TASKS, True, 1)
    state = saved(prompts)
    again = make(TASKS, True, 2)
    assert queries(again, range(10)) != queries(prompts, range(10))
    again.resume(state, 3, [])
    assert queries(again, range(10)) == queries(prompts, range(10))
    for other in (make(TASKS, False, 1), make(TASKS[:4], True, 1)):
        with pytest.raises(ConfigurationError, match="give the prompts that"):
            other.resume(state, 3, [])


def test_an_iterable_in_another_order_is_refused():
    def loader(seed):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(TASKS, batch_size=2, shuffle=True, generator=generator)

    prompts = make(loader(0))
    order = queries(prompts, range(8))
    again = make(loader(0))
    again.resume(saved(prompts), 8, [6])
    assert queries(again, [6]) == order[6:7]
    orders = {seed: queries(make(loader(seed)), [7]) for seed in range(5)}
    other = next(seed for seed, last in orders.items() if last != order[7:])
    with pytest.raises(ConfigurationError, match=f'was .*{order[7]}.* and is .*"q'):
        make(loader(other)).resume(saved(prompts), 8, [])


def test_an_iterable_that_fails_does_not_end():
    def fails():
        yield TASKS[0]
        raise OSError("the disk is gone")

    prompts = make(fails())
    assert prompts.fetch(0) is TASKS[0]
    for _ in range(3):
        with pytest.raises(OSError, match="the disk"):
            prompts.fetch(1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a text", "one str"),
        ({"query": "a"}, "one dict"),
        (TensorDict(query="a"), "one TensorDict"),
        ([], "is empty"),
        (7, "got int"),
    ],
)
def test_what_is_no_source_of_prompts(given, message):
    with pytest.raises(ConfigurationError, match=message):
        make(given)


def test_only_a_dataset_is_shuffled():
    with pytest.raises(ConfigurationError, match="shuffle there"):
        make(itertools.count(), shuffle=True)
    with pytest.raises(ConfigurationError, match="A task must be"):
        make(itertools.count()).fetch(0)


class Streamed(IterableDataset):
    """As those of the datasets library: PyTorch gives it a ``__getitem__``."""

    def __iter__(self):
        return iter([{"query": "a"}])

    def __len__(self):
        return 1


def test_what_is_read_by_index():
    rows = [{"query": "a"}]
    assert is_read_by_index(rows)
    assert hasattr(Streamed(), "__getitem__")
    assert count_tasks(DataLoader(Streamed(), batch_size=8)) == 1
    others = (Streamed(), iter(rows), DataLoader(rows, batch_size=1))
    assert not any(map(is_read_by_index, others))
