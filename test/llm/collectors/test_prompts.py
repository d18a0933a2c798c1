"""Tasks by position, from datasets, data loaders and iterables."""

from __future__ import annotations

import itertools
import json
import random
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from torchrl_sglang.collectors.scheduling.prompts import (
    Passes,
    count_tasks,
    is_read_by_index,
    make_prompts,
)
from torchrl_sglang.errors import ConfigurationError, UserFunctionError

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


class Point(NamedTuple):
    name: str
    place: tuple[int, int]


def random_value(rng: random.Random, depth: int):
    """Returns a function that makes values of one structure, as tasks have them."""
    kinds = ["text", "number", "truth", "tensor", "array", "bytes", "list", "tuple"]
    kinds += ["mapping", "point", "messages"]
    kind = rng.choice(kinds[:6] if depth == 0 else kinds)
    inner = [
        random_value(rng, depth - 1) for _ in range(rng.randint(0, 4) * (depth > 0))
    ]
    return {
        "text": lambda: f"text {rng.random()}",
        "number": lambda: rng.choice([rng.randint(0, 9), rng.randint(0, 99)]),
        "truth": lambda: rng.random() < 0.5,
        "tensor": lambda: torch.rand(
            4, generator=torch.manual_seed(rng.randint(0, 99))
        ),
        "array": lambda: np.array([rng.random() for _ in range(4)]),
        "bytes": lambda: str(rng.random()).encode(),
        "list": lambda: [make() for make in inner],
        "tuple": lambda: tuple(make() for make in inner),
        "mapping": lambda: {str(place): make() for place, make in enumerate(inner)},
        "point": lambda: Point(str(rng.random()), (rng.randint(0, 9), 1)),
        "messages": lambda: [{"role": "user", "content": str(rng.random())}],
    }[kind]


def same(one, other) -> bool:
    """Compares two values; numbers, arrays and tensors by what they hold."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return len(one) == len(other) and all(same(*pair) for pair in pairs)
    if isinstance(one, (str, bytes)):
        return one == other
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


@pytest.mark.parametrize("seed", range(60))
def test_collated_tasks_are_those_of_the_dataset(seed):
    """PyTorch's own collate function, with columns as long as a batch among them."""
    rng = random.Random(seed)
    makers = {f"column {n}": random_value(rng, 2) for n in range(4)}
    query = random_value(rng, 0) if seed % 2 else lambda: [{"role": "user"}] * 2
    rows = [
        {"query": query(), **{name: make_() for name, make_ in makers.items()}}
        for _ in range(9)
    ]
    size = rng.randint(1, 4)
    loader = DataLoader(rows, batch_size=size, drop_last=bool(seed % 3))
    prompts = make(Passes(loader, 1))
    count = 9 - 9 % size if seed % 3 else 9
    assert prompts.fetch(count) is None
    prompts = make(loader)
    tasks = [prompts.fetch(place) for place in range(count)]
    assert all(same(row, task) for row, task in zip(rows, tasks, strict=False))
    again = list(DataLoader(tasks, batch_size=size, drop_last=bool(seed % 3)))
    assert all(map(same, loader, again))


def by_column(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


CHOICES = [
    {"query": f"q{n}", "choices": [f"A{n}", f"B{n}"], "truth": {"value": str(n)}}
    for n in range(4)
]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("collate", [by_column, list, tuple, default_collate])
def test_collate_functions_that_keep_tasks(size, collate):
    prompts = make(DataLoader(CHOICES, batch_size=size, collate_fn=collate))
    assert [prompts.fetch(place) for place in range(4)] == CHOICES


NUMBERS = [{"query": f"q{n}", "numbers": [n, n + 10]} for n in range(4)]


@pytest.mark.parametrize(
    ("rows", "collate", "message"),
    [
        # PyTorch refuses lists of unequal lengths, and None.
        ([{"query": "a", "x": [1]}, {"query": "b", "x": []}], None, "equal size"),
        ([{"query": "a", "x": None}] * 2, None, "NoneType"),
        # A function of the user that calls PyTorch's: what a column is, is not known.
        (NUMBERS, partial(default_collate), "'numbers' of"),
        (NUMBERS, lambda rows: {**by_column(rows), "step": 3}, "'step' of"),
        (NUMBERS, lambda rows: {**by_column(rows), "source": "ab"}, "'source' of"),
        (NUMBERS, lambda rows: {**by_column(rows), "x": [1, 2, 3]}, "'x' of"),
        (NUMBERS, lambda rows: "ab", "yields a str"),
        (NUMBERS, lambda rows: None, "yields a NoneType"),
    ],
)
def test_batches_that_cannot_be_taken_apart(rows, collate, message):
    loader = DataLoader(rows, batch_size=2, collate_fn=collate)
    prompts = make(loader)
    with pytest.raises(ConfigurationError, match=rf"{message}.*collate_fn=list\)"):
        prompts.fetch(0)


@pytest.mark.slow
def test_tasks_that_a_worker_cannot_put_together():
    rows = [{"query": "a", "x": [1]}, {"query": "b", "x": []}]
    prompts = make(DataLoader(rows, batch_size=2, num_workers=1))
    with pytest.raises(ConfigurationError, match=r"batch: .*equal size; .*=list\)"):
        prompts.fetch(0)


def test_columns_of_another_collate_function_that_hold_one_task():
    """A column with one entry is read as the function wrote it, or refused."""
    rows = [{"query": [{"role": "user", "content": "q"}], "answer": None}]
    prompts = make(DataLoader(rows, batch_size=1, collate_fn=by_column))
    assert prompts.fetch(0) == rows[0]


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
        with pytest.raises(UserFunctionError, match=r"the disk.*prompt 1;") as caught:
            prompts.fetch(1)
        assert isinstance(caught.value.__cause__, OSError)


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
def test_values_that_are_no_prompts_are_refused(given, message):
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
