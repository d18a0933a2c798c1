"""What can be called weights, and what becomes of it. PyTorch is the oracle."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.log_probs import difference
from helpers.weights import open_weights
from tensordict import TensorDict
from tensordict.nn import TensorDictParams
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torchrl.modules.llm import TransformersWrapper

from torchrl_sglang import SGLangWeightSyncScheme, get_model_metadata
from torchrl_sglang.errors import ConfigurationError, WeightMismatchError
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.sources import served as sources
from torchrl_sglang.weight_update.sources.base import SourceCache
from torchrl_sglang.weight_update.sources.fingerprints import (
    are_equal,
    take_fingerprints,
)
from torchrl_sglang.weight_update.sources.resolve import find_source
from torchrl_sglang.weight_update.sources.served import ServedTensors, plan_names
from torchrl_sglang.weight_update.weights import read_buckets, specs_of

pytestmark = pytest.mark.filterwarnings(
    # torch.compile imports what PyTorch itself calls deprecated.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.fixture
def served(hf_model):
    return get_model_metadata(hf_model)


@pytest.fixture
def new_model(tokenizer):
    return make_tiny_model(tokenizer, seed=int.from_bytes(os.urandom(3), "big"))


def sent(weights, served, fused=None) -> dict[str, torch.Tensor]:
    """What a transport would read, by name."""
    return dict(open_weights(weights, served, fused).read())


def compile_everything(model):
    model = copy.deepcopy(model)
    layers = model.model.layers
    layers[0] = torch.compile(checkpoint_wrapper(layers[0]))
    layers[1] = checkpoint_wrapper(torch.compile(layers[1]))
    return torch.compile(model)


class Shell(nn.Module):
    """Where DDP puts a module."""

    def __init__(self, module) -> None:
        super().__init__()
        self.module = module


class Exporter:
    """Yields copies, as converters do, and counts how often it was asked."""

    def __init__(self, model) -> None:
        self.model = model
        self.calls = 0

    def __iter__(self):
        self.calls += 1
        for name, value in self.model.named_parameters():
            yield name, value.clone()

    def export(self):
        return iter(self)


SOURCES = {
    "module": lambda model, wrapper: model,
    "state dict": lambda model, wrapper: model.state_dict(),
    "list": lambda model, wrapper: list(model.named_parameters()),
    "items": lambda model, wrapper: model.state_dict().items(),
    "iterator": lambda model, wrapper: model.named_parameters(),
    "exporting function": lambda model, wrapper: Exporter(model).export,
    "exporting object": lambda model, wrapper: Exporter(model),
    "function with a mapping": lambda model, wrapper: model.state_dict,
    "flat TensorDict": lambda model, wrapper: TensorDict(
        dict(model.named_parameters())
    ),
    "nested TensorDict": lambda model, wrapper: TensorDict.from_module(model),
    "TensorDictParams": lambda model, wrapper: TensorDictParams(
        TensorDict.from_module(model), no_convert=True
    ),
    "DDP": lambda model, wrapper: Shell(model),
    "DDP of compiled": lambda model, wrapper: Shell(compile_everything(model)),
    "compiled DDP": lambda model, wrapper: torch.compile(Shell(model)),
    "names of compiled DDP": lambda model, wrapper: {
        f"_orig_mod.module.{name}": value for name, value in model.state_dict().items()
    },
    "wrapper": lambda model, wrapper: wrapper,
    "TensorDict of the wrapper": lambda model, wrapper: TensorDict.from_module(wrapper),
}


every_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if "compiled" in kind else ())
        for kind in SOURCES
    ],
)


@every_kind
def test_every_source(hf_model, tokenizer, served, kind):
    wrapper = TransformersWrapper(hf_model, tokenizer=tokenizer, generate=False)
    found = sent(SOURCES[kind](hf_model, wrapper), served)
    assert set(found) == set(served)
    for name, parameter in hf_model.named_parameters():
        assert torch.equal(found[name], parameter)
        assert not found[name].requires_grad


def test_existing_tensors_are_not_copied(hf_model, served):
    weights = open_weights(hf_model, served)
    assert weights.stable
    found = dict(weights.read())
    for name, parameter in hf_model.named_parameters():
        assert found[name].data_ptr() == parameter.data_ptr()


@every_kind
def test_tied_weights_are_sent_once(tokenizer, kind):
    tied = make_tiny_model(tokenizer, tie_word_embeddings=True)
    served = get_model_metadata(tied)
    assert "lm_head.weight" not in served
    # A state dict lists the shared tensor under both names.
    assert "lm_head.weight" in tied.state_dict()
    wrapper = TransformersWrapper(tied, tokenizer=tokenizer, generate=False)
    weights = open_weights(SOURCES[kind](tied, wrapper), served)
    assert sorted(spec.name for spec in weights.specs) == sorted(served)
    found = dict(weights.read())
    assert torch.equal(found["model.embed_tokens.weight"], tied.lm_head.weight)


def test_tied_weights_of_a_model_that_is_served_untied(tokenizer, served):
    tied = make_tiny_model(tokenizer, tie_word_embeddings=True)
    found = sent(tied, served)
    assert torch.equal(found["lm_head.weight"], tied.model.embed_tokens.weight)


def test_two_tensors_where_the_served_model_has_one(hf_model, tokenizer):
    tied = get_model_metadata(make_tiny_model(tokenizer, tie_word_embeddings=True))
    with pytest.raises(WeightMismatchError, match="tie_word_embeddings=False"):
        open_weights(hf_model, tied)


def test_other_layouts_and_types(hf_model, served):
    turned = {
        name: value.t().contiguous().t() if value.ndim == 2 else value
        for name, value in hf_model.state_dict().items()
    }
    turned["model.norm.weight"] = turned["model.norm.weight"].double()
    weights = open_weights(turned, served)
    assert {spec.dtype for spec in weights.specs} == {torch.float32}
    found = dict(weights.read())
    for name, value in hf_model.state_dict().items():
        torch.testing.assert_close(
            found[name], value, check_dtype=False, rtol=0, atol=0
        )


def test_saved_buffers_are_sent(served):
    module = nn.Linear(2, 3)
    module.register_buffer("bias_of_experts", torch.ones(3))
    module.register_buffer("cache", torch.ones(3), persistent=False)
    assert set(get_model_metadata(module)) == {"weight", "bias", "bias_of_experts"}
    assert set(sent(module, get_model_metadata(module))) == set(module.state_dict())


def test_all_mismatches_are_listed(served, hf_model):
    weights = dict(hf_model.state_dict())
    del weights["model.norm.weight"]
    weights["extra"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(3, 4)
    for given in (weights, list(weights.items()), lambda: weights):
        with pytest.raises(WeightMismatchError) as caught:
            open_weights(given, served)
        message = str(caught.value)
        assert "1 missing: model.norm.weight" in message
        assert "1 unexpected: extra" in message
        assert "lm_head.weight: (3, 4), served (99, 64)" in message


def test_many_names_are_counted_and_not_all_listed(served):
    with pytest.raises(WeightMismatchError, match=r"27 missing: .*, \.\.\.; 1 unexp"):
        open_weights({"nope": torch.zeros(1)}, served)


def test_metadata_is_checked_before_there_are_weights(served):
    model = ServedTensors(metadata=served)
    plan_names(specs_of(served), model)
    with pytest.raises(WeightMismatchError, match="1 unexpected: more"):
        plan_names(specs_of({**served, "more": (torch.float32, (3,))}), model)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_integers_do_not_become_weights(served, hf_model, dtype):
    weights = dict(hf_model.state_dict())
    weights["model.norm.weight"] = weights["model.norm.weight"].to(dtype)
    with pytest.raises(WeightMismatchError, match="another kind"):
        open_weights(weights, served)


def test_a_name_that_is_there_twice(served, hf_model):
    weights = dict(hf_model.state_dict())
    weights["model.norm._orig_mod.weight"] = torch.zeros(64)
    with pytest.raises(WeightMismatchError, match=r"_orig_mod.weight \(it is model"):
        open_weights(weights, served)
    with pytest.raises(ConfigurationError, match="'a' twice"):
        find_source([("a", torch.zeros(1)), ("a", torch.ones(1))])


def test_tensors_without_values_are_refused(served, tokenizer, hf_model):
    with torch.device("meta"):
        hollow = make_tiny_model(tokenizer)
    with pytest.raises(ConfigurationError, match="on meta.*no values"):
        open_weights(hollow, served)
    weights = hf_model.state_dict()
    weights["model.norm.weight"] = weights["model.norm.weight"].to("meta")
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight is on meta"):
        open_weights(weights, served)


def test_a_sparse_tensor_is_refused(served, hf_model):
    weights = hf_model.state_dict()
    weights["model.norm.weight"] = weights["model.norm.weight"].to_sparse()
    with pytest.raises(
        ConfigurationError, match=r"model\.norm\.weight is .*sparse_coo"
    ):
        open_weights(weights, served)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (3, "got int"),
        ("model", "got str 'model'.*transport='lora'"),
        (Path("model"), "'model'.*transport='lora'"),
        (dict, "got type"),
        ({"a": 1}, "'a' is a int"),
        ({}, "no parameter"),
        (nn.Module(), "no parameter"),
        (lambda: 3, "returned a int"),
        (lambda: (), "no parameter"),
        (lambda: nn.Linear(1, 1).parameters(), "named_parameters"),
        (nn.Linear(1, 1).parameters(), "named_parameters"),
    ],
)
def test_sources_without_weights_are_refused(weights, words):
    with pytest.raises(ConfigurationError, match=words):
        find_source(weights)


# Exporters.


def test_an_exporter_is_asked_for_names_once(hf_model, served):
    exporter = Exporter(hf_model)
    remembered = SourceCache()
    # A bound method is a new object every time, and means the same exporter.
    for expected in (2, 3, 4):
        weights = open_weights(find_source(exporter.export, remembered), served)
        assert not weights.stable
        assert len(dict(weights.read())) == len(served)
        assert exporter.calls == expected
    remembered.forget()
    find_source(exporter.export, remembered)
    assert exporter.calls == 5
    # Another one is another exporter.
    other = Exporter(hf_model)
    find_source(other.export, remembered)
    assert (exporter.calls, other.calls) == (5, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, value: (name + "x", value), "no such tensor"),
        (lambda name, value: (name, value[:1]), r"shape \(1,.* yielded \(torch.float"),
        (lambda name, value: (name, value.int()), "yields .* of torch.int32"),
    ],
)
def test_an_exporter_that_changes_its_mind(hf_model, served, change, words):
    answers = iter([lambda *pair: pair, change])

    def export():
        alter = next(answers)
        return (alter(*pair) for pair in hf_model.named_parameters())

    weights = open_weights(export, served)
    with pytest.raises(WeightMismatchError, match=words):
        dict(weights.read())


class Watch:
    """How many bytes of watched tensors were alive at once."""

    def __init__(self) -> None:
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self._alive = [each for each in self._alive if not each[0].expired()]
        storage = tensor.untyped_storage()
        self._alive.append((StorageWeakRef(storage), storage.nbytes()))
        self.most = max(self.most, sum(size for _, size in self._alive))
        return tensor


BUCKET = 70_000
"""Holds the largest tensor of the tiny model, 256 times 64 values, and some others."""


def read_in_buckets(weights) -> int:
    count = 0
    for _bucket, tensors in read_buckets(weights, BUCKET):
        count += 1
        del tensors
    return count


def test_one_bucket_of_an_exporter_is_alive(hf_model, served):
    watch = Watch()

    def export():
        return (
            (name, watch(value.clone())) for name, value in hf_model.named_parameters()
        )

    gc.disable()
    try:
        assert read_in_buckets(open_weights(export, served)) > 5
        assert 0 < watch.most <= BUCKET
        # What is collected is alive at once.
        read_in_buckets(open_weights(export(), served))
        assert watch.most > 2 * BUCKET
    finally:
        gc.enable()


def test_an_exporter_reaches_the_engine(restored_engine, new_model, compare):
    scheme = SGLangWeightSyncScheme(restored_engine, bucket_bytes=BUCKET)
    sender = scheme.create_sender()
    exporter = Exporter(new_model)
    sender.register_model(exporter)
    sender.update_weights()
    assert compare(new_model) < 1e-4
    with torch.no_grad():
        new_model.lm_head.weight.mul_(-1)
    report = sender.update_weights()
    assert report.num_buckets > 5
    assert compare(new_model) < 1e-4
    assert exporter.calls == 3
    scheme.shutdown()


@pytest.fixture
def compare(engine):
    """Greatest difference of the engine's log-probs from a model's."""
    return partial(difference, engine)


class Unviewable(torch.Tensor):
    """A tensor subclass that implements few operations, as those of quantizers do."""

    @staticmethod
    def __new__(cls, inner):
        return cls._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            return NotImplemented
        return cls(args[0].inner)


def test_a_tensor_without_views_counts_as_changed():
    """Its bits cannot be compared, and PyTorch raises a TypeError."""
    weights = {"weight": Unviewable(torch.ones(2, 2))}
    with pytest.raises(TypeError, match="NotImplemented"):
        weights["weight"].view(-1)
    prints = {}
    source = take_fingerprints(find_source(weights), prints)
    ((name, tensor),) = source.read({"weight": torch.float32})
    assert name == "weight"
    assert type(tensor) is Unviewable
    assert prints == {"weight": None}
    assert not are_equal(prints, prints)


# Tensors that stay where they are.


def planned(weights, served, cache):
    return sources.open_weights(find_source(weights, cache), served, cache)


def swapped(model: nn.Module) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.clone()


def cast(model: nn.Module) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data.double()


def turned(model: nn.Module) -> None:
    weight = model.lm_head.weight
    weight.data = weight.data.t().contiguous().t()


def test_tensors_in_the_same_memory_are_planned_once(hf_model):
    model, cache = copy.deepcopy(hf_model), SourceCache()
    served = ServedTensors(metadata=get_model_metadata(model))
    first = planned(model, served, cache)
    assert first.memory is not None
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    again = planned(model, served, cache)
    assert again.memory is first.memory
    assert again.specs is first.specs
    for name, tensor in again.read():
        assert torch.equal(tensor, model.get_parameter(name))
    # Other servers have other names.
    other = replace(served, metadata=dict(served.metadata))
    assert planned(model, other, cache).specs is not (first.specs)


@pytest.mark.parametrize("change", [swapped, cast, turned])
def test_other_memory_is_planned_anew(hf_model, change):
    model, cache = copy.deepcopy(hf_model), SourceCache()
    served = ServedTensors(metadata=get_model_metadata(model))
    first = planned(model, served, cache)
    change(model)
    changed = planned(model, served, cache)
    assert changed.memory is not first.memory
    assert (changed.memory is None) == (change is turned)
    for name, tensor in changed.read():
        assert torch.equal(tensor, model.get_parameter(name))


def test_other_names_are_refused_though_the_memory_is_the_same(hf_model):
    cache = SourceCache()
    served = ServedTensors(metadata=get_model_metadata(hf_model))
    weights = dict(hf_model.named_parameters())
    planned(weights, served, cache)
    weights["other"] = weights.pop("lm_head.weight")
    with pytest.raises(WeightMismatchError, match="unexpected: other"):
        planned(weights, served, cache)
    del weights["other"]
    with pytest.raises(WeightMismatchError, match="missing: lm_head"):
        planned(weights, served, cache)


def test_nothing_is_kept_of_tensors_that_are_described(served):
    cache = SourceCache()
    weights = {name: torch.zeros(shape) for name, (_, shape) in served.items()}
    reference = weakref.ref(next(iter(weights.values())))
    metadata = ServedTensors(metadata=served)
    planned(weights, metadata, cache)
    del weights
    assert reference() is None
