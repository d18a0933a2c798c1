"""The loader that servers run: what it traces equals what ``load_weights`` does."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

from torchrl_sglang.backends.launch.loaders import torchrl_sglang_loader as loader
from torchrl_sglang.types import TRACED_LOADER

RANK, RANKS = 1, 2


class Model(nn.Module):
    """Loads in the ways that SGLang's layers do, as the second of two ranks."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Linear(8, 12)
        self.row = nn.Linear(4, 8, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 8, 6))
        self.embedding = nn.Embedding(10, 8)
        self.tied = nn.ModuleDict({"head": self.embedding})
        self.register_buffer("bias", torch.zeros(4))
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def load_weights(self, weights):
        for name, tensor in weights:
            getattr(self, f"load_{name}")(tensor)

    def load_q(self, tensor):
        part = tensor.narrow(0, 4 * RANK, 4)
        self.fused.weight.data.narrow(0, 0, 4).copy_(part)

    def load_k(self, tensor):
        self.fused.weight.data[4:8].copy_(tensor.t())

    def load_v(self, tensor):
        self.fused.weight[8:].data.copy_(tensor.chunk(RANKS)[RANK].to("cpu"))

    def load_bias(self, tensor):
        self.fused.bias.data[...] = tensor
        self.bias.copy_(tensor[:4])

    def load_row(self, tensor):
        self.row.weight.data.copy_(tensor.narrow(1, 4 * RANK, 4).contiguous())

    def load_experts(self, tensor):
        for index, expert in enumerate(tensor.unbind(0)):
            self.experts.data[index].copy_(expert.transpose(0, 1))

    def load_embedding(self, tensor):
        self.embedding.weight[:7].data.copy_(tensor)
        self.embedding.weight[7:].data.fill_(0)


SHAPES = {
    "q": (8, 8),
    "k": (8, 4),
    "v": (8, 8),
    "bias": (12,),
    "row": (8, 8),
    "experts": (3, 6, 8),
    "embedding": (7, 8),
}


def weights(dtype=torch.float32):
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def specs_of(tensors):
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, two):
    return one.keys() == two.keys() and all(
        torch.equal(one[name], two[name]) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traced_copies_equal_the_models_own_loader(dtype):
    tensors = weights(dtype)
    expected = Model()
    expected.load_weights(tensors.items())
    model, state = Model(), loader.LoaderState()
    before = values(model)
    specs = specs_of(tensors)
    assert loader.prepare(model, state, specs), state.untraced
    assert same(values(model), before), "Tracing has changed a parameter."
    loader.apply_weights(model, state, specs, list(tensors.values()))
    assert same(values(model), values(expected))
    # All of one tensor goes to one place: it can be received there.
    whole = {s[0] for s in specs if loader.whole_place(s, state.plans[s]) is not None}
    assert whole == set()


def test_a_tensor_that_goes_to_one_place_is_received_there():
    class Whole(Model):
        def load_q(self, tensor):
            self.fused.weight.data.narrow(0, 4, 8).copy_(tensor)

    model, state = Whole(), loader.LoaderState()
    spec = ("q", "float32", SHAPES["q"])
    assert loader.prepare(model, state, [spec])
    place = loader.whole_place(spec, state.plans[spec])
    assert place.data_ptr() == model.fused.weight[4:].data_ptr()
    assert place.numel() == 64
    assert loader.whole_place(("q", "bfloat16", SHAPES["q"]), state.plans[spec]) is None


def compute(model, tensor):
    model.fused.bias.data.copy_(2 * tensor)


def read(model, tensor):
    model.fused.bias.data.fill_(tensor.sum().item())


def derive(model, tensor):
    model.fused.bias.data.copy_(tensor)
    model.derived = model.fused.bias.data.clone()


def write_elsewhere(model, tensor):
    torch.empty(12).copy_(tensor)


def write_twice(model, tensor):
    model.fused.bias.data.copy_(tensor)
    model.fused.bias.data.copy_(tensor)


def swap_the_data(model, tensor):
    model.fused.bias.data = tensor


def swap_the_parameter(model, tensor):
    model.fused.bias = nn.Parameter(tensor)


def fail(model, tensor):
    raise KeyError("a weight of another model")


@pytest.mark.parametrize(
    "load",
    [
        compute,
        read,
        derive,
        write_elsewhere,
        write_twice,
        swap_the_data,
        swap_the_parameter,
        fail,
    ],
)
def test_a_loader_that_does_more_is_not_traced(load):
    class Other(Model):
        def load_bias(self, tensor):
            load(self, tensor)

    model, state = Other(), loader.LoaderState()
    before, parameters = values(model), list(model.parameters())
    assert not loader.prepare(model, state, [("bias", "float32", (12,))])
    assert state.untraced
    assert same(values(model), before)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))


def test_a_parameter_that_was_replaced_is_traced_again():
    """SGLang may give a layer another parameter between two updates."""
    tensors = weights()
    specs = specs_of(tensors)
    model, state = Model(), loader.LoaderState()
    loader.apply_weights(model, state, specs, list(tensors.values()))
    old = model.fused.weight
    model.fused.weight = nn.Parameter(torch.zeros(12, 8), requires_grad=False)
    other = {name: -tensor for name, tensor in tensors.items()}
    kept = copy.deepcopy(old)
    loader.apply_weights(model, state, specs, list(other.values()))
    expected = Model()
    expected.load_weights(other.items())
    assert same(values(model), values(expected))
    assert torch.equal(old, kept), "The one that nobody uses was written to."


def test_questions_are_answered_beside_those_for_parameters():
    class Tells(Model):
        def get_weights_by_name(self, name, size, tp_size=1):
            return [name, size, tp_size]

    model, state = Tells(), loader.LoaderState(update=7, requests=2, error="no space")
    loader.take_questions(model, state)
    assert model.get_weights_by_name("lm_head.weight", 3, tp_size=2) == [
        *("lm_head.weight", 3, 2)
    ]
    update, requests, failed, traced, kept, *text = model.get_weights_by_name(
        loader.QUESTION, 1, tp_size=1
    )
    assert (update, requests, failed, traced, kept) == (7, 2, 1, 1, 0)
    assert "".join(chr(int(letter)) for letter in text) == "no space"
    state.kept = loader.OpenMemory(number=5, pid=1, copies=loader.Copies())
    for number, kept in ((4, True), (5, False)):
        model.get_weights_by_name(f"{loader.QUESTION}/forget/{number}", 1)
        assert (state.kept is not None) == kept


def test_memory_is_not_kept_where_the_end_of_its_process_is_unknown():
    """Of a process in another container, the number is that of another one here."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as sender:
        began = loader.process_start(sender.pid)
        model, state = Model(), loader.LoaderState()
        loader.STATES[model] = state
        for known in (None, "1"):
            assert not loader.watch_sender(sender.pid, known)
        assert loader.watch_sender(sender.pid, began)
        state.kept = loader.OpenMemory(number=1, pid=sender.pid, copies=loader.Copies())
        (waiting,) = (t for t in threading.enumerate() if "-sender" in t.name)
        sender.kill()
        sender.wait(60)
    waiting.join(60)
    assert not waiting.is_alive()
    assert state.kept is None
    assert not loader.watch_sender(sender.pid, began)


def test_the_name_is_the_one_that_servers_are_given():
    module, _, function = TRACED_LOADER.partition(".")
    assert (loader.__name__.rpartition(".")[2], loader.load.__name__) == (
        module,
        function,
    )
    assert module == loader.QUESTION


def test_open_memory_is_read_again():
    """The memory of a GPU stands in here for a trainer's tensors in this process."""
    tensors = weights()
    specs = specs_of(tensors)
    model, state = Model(), loader.LoaderState()
    loader.apply_weights(model, state, specs, list(tensors.values()))
    pairs = loader.pair_tensors(state, specs, list(tensors.values()))
    copies = loader.make_copies(loader.join_steps(pairs))
    state.kept = loader.OpenMemory(number=3, pid=1, copies=copies)
    for tensor in tensors.values():
        tensor.mul_(-0.5)
    loader.copy_again(model, state, {"memory": 3}, torch.empty(0))
    expected = Model()
    expected.load_weights(tensors.items())
    assert same(values(model), values(expected))
    with pytest.raises(LookupError, match="not open here any more"):
        loader.copy_again(model, state, {"memory": 4}, torch.empty(0))
    model.row.weight = nn.Parameter(torch.zeros(8, 4), requires_grad=False)
    with pytest.raises(LookupError, match="not open here any more"):
        loader.copy_again(model, state, {"memory": 3}, torch.empty(0))


class Mixture(nn.Module):
    """Fuses two matrices of each expert, as SGLang's layers do."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(3, 4, 6), requires_grad=False)

    def load_weights(self, weights):
        for name, tensor in weights:
            index, half = int(name[0]), 2 * (name[1:] == "up")
            self.fused.data[index, half : half + 2].copy_(tensor)


@pytest.mark.parametrize(
    ("parts", "runs"),
    [(lambda trained: trained, 1), (lambda trained: trained.flip(0), 3)],
    ids=["in-order", "reversed"],
)
def test_copies_that_lie_together_become_one(parts, runs):
    trained = torch.randn(3, 4, 6)
    served = parts(trained)
    tensors = {f"{i}gate": trained[i, :2] for i in range(3)}
    tensors |= {f"{i}up": trained[i, 2:] for i in range(3)}
    if runs == 3:
        tensors = {f"{2 - int(n[0])}{n[1:]}": each for n, each in tensors.items()}
    specs = specs_of(tensors)
    model, state = Mixture(), loader.LoaderState()
    assert loader.prepare(model, state, specs)
    pairs = loader.pair_tensors(state, specs, list(tensors.values()))
    copies = loader.make_copies(loader.join_steps(pairs))
    ((targets, sources),) = copies.grouped.values()
    assert len(targets) == len(sources) == runs
    copies.run()
    assert model.fused.equal(served)


def test_a_run_of_bytes_is_loaded_wherever_it_lies():
    tensors = weights()
    specs = specs_of(tensors)
    model, state = Model(), loader.LoaderState()
    for offset in (0, 8):
        for tensor in tensors.values():
            tensor.mul_(-0.5)
        flat = torch.cat(
            [each.reshape(-1).view(torch.uint8) for each in tensors.values()]
        )
        elsewhere = torch.zeros(len(flat) + offset, dtype=torch.uint8)[offset:]
        loader.load_flat(model, state, specs, elsewhere.copy_(flat))
        expected = Model()
        expected.load_weights(tensors.items())
        assert same(values(model), values(expected))


class Broadcast:
    """A broadcast that never ends by itself."""

    ended = False

    def is_completed(self) -> bool:
        return self.ended


@pytest.fixture
def abandoned(monkeypatch):
    """Names of the groups whose broadcasts were ended."""
    names: list[str] = []
    monkeypatch.setattr(loader, "_abandon", names.append)
    return names


def guarded(order) -> Broadcast:
    work = Broadcast()
    loader.guard_broadcast("group", work, order, 0.01)
    return work


def wait_for_guards():
    for thread in threading.enumerate():
        if thread.name == "torchrl_sglang-guard":
            thread.join(30)
            assert not thread.is_alive()


def test_broadcasts_end_when_their_sender_does(abandoned):
    with subprocess.Popen(["sleep", "60"]) as sender:
        began = loader.process_start(sender.pid)
        order = {"timeout": 60.0, "pid": sender.pid, "began": began}
        guarded(order)
        time.sleep(0.1)
        assert abandoned == []
        sender.kill()
        # Nobody has asked yet how it ended.
        wait_for_guards()
    assert abandoned == ["group"]


@pytest.mark.parametrize("began", [None, "1"], ids=["unknown", "of another container"])
def test_broadcasts_end_when_they_take_too_long(abandoned, began):
    guarded({"timeout": 0.1, "pid": os.getpid(), "began": began})
    wait_for_guards()
    assert abandoned == ["group"]


def test_broadcasts_that_end_are_left_alone(abandoned):
    began = loader.process_start(os.getpid())
    work = guarded({"timeout": 60.0, "pid": os.getpid(), "began": began})
    work.ended = True
    wait_for_guards()
    assert abandoned == []


def test_a_sender_that_gives_up_has_broadcasts_ended(monkeypatch):
    """NCCL ends nothing on the receiver's device when the sender leaves."""
    ended = []

    class Group:
        def __init__(self, device: str) -> None:
            self.device = device

        def _get_backend(self, device: torch.device):
            if device.type != self.device:
                raise RuntimeError("no backend for it")
            return self

        def abort(self) -> None:
            ended.append(self)

    groups = {"nccl": Group("cuda"), "gloo": Group("cpu")}
    monkeypatch.setattr(loader, "_find_group", groups.__getitem__)
    state = loader.LoaderState()
    for name in ("gloo", "unknown", "nccl"):
        state.answer(f"abandon/{name}")
    assert ended == [groups["nccl"]]
