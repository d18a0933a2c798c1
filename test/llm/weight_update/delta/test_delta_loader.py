"""The loader in the server: what it takes and refuses, and that it stands alone."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from helpers.loading_server import FusedModel
from torch import nn

from torchrl_sglang.backends.launch.loaders import FOLDER, search_path
from torchrl_sglang.backends.launch.loaders import torchrl_sglang_delta as loader
from torchrl_sglang.weight_update.transports.delta_messages import (
    DeltaState,
    DeltaWriter,
    all_of,
    bits_of,
    changes_of,
)
from torchrl_sglang.weight_update.weights import TensorSpec

FIRST, SECOND = "ab" * 12, "cd" * 12
DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64]


def specs_of(weights):
    return tuple(
        TensorSpec(name=name, dtype=value.dtype, shape=value.shape)
        for name, value in weights.items()
    )


def give(model, data):
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    loader.load(model, [(loader.PAYLOAD, content)])


def told(model):
    return DeltaState.read(loader.state_of(model).tell())


def send_all(model, weights, update=FIRST):
    writer = DeltaWriter(update=update, base="", specs=specs_of(weights))
    for number, value in enumerate(weights.values()):
        bits = bits_of(value.reshape(-1))
        # In two parts, the second one first.
        half = len(bits) // 2
        writer.add(all_of(number, half, bits[half:]))
        if half:
            writer.add(all_of(number, 0, bits[:half]))
    give(model, writer.message())
    give(model, writer.message(last=True))


def changes(weights, before, base=FIRST, update=SECOND):
    writer = DeltaWriter(update=update, base=base, specs=specs_of(weights))
    for number, (name, value) in enumerate(weights.items()):
        old = bits_of(before[name].reshape(-1))
        part, _ = changes_of(number, 0, bits_of(value.reshape(-1)), old)
        if part is not None:
            writer.add(part)
    return writer.message(last=True)


def changed(value, share):
    """Returns a tensor of which this share of elements has other bits, any bits."""
    bits = bits_of(value.reshape(-1)).clone()
    chosen = torch.rand(len(bits)) < share
    bits[chosen] += torch.randint(-100, 100, (int(chosen.sum()),)).to(bits.dtype)
    return bits.view(value.dtype).view(value.shape)


def random_weights(dtype):
    def some(*shape):
        size = torch.Size(shape).numel()
        bits = torch.randint(-(1 << 7), 1 << 7, (size,)).to(
            loader.INTEGERS[dtype.itemsize]
        )
        return bits.view(dtype).view(shape)

    torch.manual_seed(0)
    return {
        "m.q_proj.weight": some(8, 6),
        "m.k_proj.weight": some(4, 6),
        "m.o_proj.weight": some(6, 400),
        "m.down_proj.weight": some(3, 100_000),
        "m.norm.weight": some(1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.02, 0.4, 1.0])
def test_every_bit_arrives(dtype, share):
    """NaNs and negative zeros, too: bits are sent, and no numbers."""
    weights = random_weights(dtype)
    model = FusedModel(weights)
    send_all(model, weights)
    state = told(model)
    assert (state.token, state.intact, state.indivisible) == (FIRST, True, ())
    after = {name: changed(value, share) for name, value in weights.items()}
    give(model, changes(after, weights))
    assert told(model).token == SECOND
    for name, value in after.items():
        assert torch.equal(bits_of(model.held(name)), bits_of(value)), name


@pytest.mark.slow
def test_a_damaged_message_is_found():
    weights = random_weights(torch.bfloat16)
    data = changes(weights, {n: changed(v, 0.5) for n, v in weights.items()})
    assert loader.read_message(data) is not None
    for place in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert loader.read_message(bytes(damaged)) is None
    assert loader.read_message(data[:-1]) is None
    assert loader.read_message(b"") is None


@pytest.mark.parametrize("base", [SECOND, FIRST], ids=["another base", "twice"])
def test_changes_that_do_not_follow_are_refused(base):
    weights = random_weights(torch.bfloat16)
    after = {name: changed(value, 0.1) for name, value in weights.items()}
    model = FusedModel(weights)
    send_all(model, weights)
    message = changes(after, weights, base=base)
    if base == FIRST:
        give(model, message)
    before = loader.fingerprint(model)
    give(model, message)
    assert told(model).outcome == loader.REFUSED
    assert loader.fingerprint(model) == before


class OddModel(nn.Module):
    """A model that does more than to copy."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.zeros(4, 3))
        self.other = nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights):
        for name, value in weights:
            if name == "plain":
                self.other.data.copy_(value)
            elif self.how == "scaled":
                self.weight.data.copy_(value * 2)
            elif self.how == "scaled later":
                self.weight.data.copy_(value)
                self.weight.data.mul_(2)
            elif self.how == "one number":
                self.weight.data.fill_(value[0, 0].item())
            elif self.how == "in a thread":
                copy = self.weight.data.copy_
                thread = threading.Thread(target=copy, args=(value,))
                thread.start()
                thread.join()
            else:
                self.weight.data.copy_(value.t().reshape(4, 3))


HOWS = ["scaled", "scaled later", "one number", "in a thread", "shuffled"]


@pytest.mark.parametrize("how", HOWS)
def test_a_tensor_that_is_computed_with_goes_as_a_whole(how):
    weights = {"plain": torch.randn(4, 3), "odd": torch.randn(4, 3)}
    model = OddModel(how)
    send_all(model, weights)
    assert told(model).indivisible == (1,)


class Group:
    """Two ranks in threads, with what SGLang's group of ranks has."""

    world_size = 2

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=60)
        self.values = {}

    def of(self, rank):
        made = Group.__new__(Group)
        made.__dict__.update(self.__dict__, rank=rank)
        return made

    def all_gather_object(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        both = [self.values[0], self.values[1]]
        self.barrier.wait()
        return both

    def broadcast_object(self, value, src):
        return self.all_gather_object(value)[src]


def both(models, call):
    threads = [threading.Thread(target=call, args=(m,), daemon=True) for m in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_ranks_share_one_message_and_agree():
    """The first rank is sent it; each keeps its own rows and columns."""
    weights = random_weights(torch.bfloat16)
    group = Group()
    models = [FusedModel(weights, rank, 2) for rank in range(2)]
    for rank, model in enumerate(models):
        loader.state_of(model).group = group.of(rank)

    def give_first(data):
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8)

        def load(model):
            first = [(loader.PAYLOAD, content)] if model is models[0] else []
            loader.load(model, first)

        both(models, load)

    writer = DeltaWriter(update=FIRST, base="", specs=specs_of(weights))
    for number, value in enumerate(weights.values()):
        writer.add(all_of(number, 0, bits_of(value.reshape(-1))))
    give_first(writer.message(last=True))
    after = {name: changed(value, 0.1) for name, value in weights.items()}
    give_first(changes(after, weights))
    states = {}
    both(models, lambda model: states.update({id(model): told(model)}))
    assert {(s.token, s.intact, s.indivisible) for s in states.values()} == {
        (SECOND, True, ())
    }
    for name, value in after.items():
        dim = models[0].places[name][1]
        halves = [model.held(name) for model in models]
        whole = halves[0] if halves[0].shape == value.shape else torch.cat(halves, dim)
        assert torch.equal(bits_of(whole), bits_of(value)), name
    # What one rank cannot load, none has.
    models[1].load_weights = None
    give_first(writer.message(last=True))
    loader.state_of(models[0]).next = 0
    both(models, lambda model: states.update({id(model): told(model)}))
    assert all(state.outcome != loader.OK for state in states.values())


def test_it_imports_neither_this_package_nor_a_pickle():
    tree = ast.parse((FOLDER / "torchrl_sglang_delta.py").read_text())
    names = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert names <= {*sys.stdlib_module_names, "torch"}
    assert not names & {"pickle", "marshal", "shelve"}


@pytest.mark.slow
def test_a_python_without_the_package_imports_it():
    code = (
        "import sys, torchrl_sglang_delta as d; "
        "print(d.LOADER, 'torchrl_sglang' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(FOLDER)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == [loader.LOADER, "False"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, "/old"),
        ("mine.load", "/old"),
        (loader.LOADER, f"/old:{FOLDER}"),
        (["mine.load", loader.LOADER], f"/old:{FOLDER}"),
    ],
)
def test_servers_that_name_it_can_import_it(given, found):
    arguments = {"custom_weight_loader": given}
    assert search_path(arguments, "/old") == found
    assert Path(FOLDER).is_dir()
