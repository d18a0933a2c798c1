"""SGLangLLMCollector yields what TorchRL's LLMCollector yields, key by key."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from helpers.slow import diagonal
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    is_tensor_collection,
    lazy_stack,
)
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.envs.llm import ChatEnv
from torchrl.envs.transforms import StepCounter, Transform
from torchrl.modules.llm.policies import Text

from torchrl_sglang import SGLangLLMCollector, SGLangWrapper
from torchrl_sglang.collectors.copies import copy_tree, has_private_keys
from torchrl_sglang.errors import ConfigurationError

SIZE = 3
"""Conversations in an environment."""


class Ends(Transform):
    """Ends conversation ``i`` after ``i + 1`` turns, and rewards each turn."""

    def _step(self, tensordict, next_tensordict):
        turns = tensordict.get("turns", torch.zeros(SIZE, 1, dtype=torch.int64)) + 1
        next_tensordict["turns"] = turns
        next_tensordict["done"] = turns > torch.arange(SIZE).unsqueeze(-1)
        next_tensordict["terminated"] = next_tensordict["done"].clone()
        next_tensordict["reward"] = turns.float()
        return next_tensordict


class Tool(Transform):
    """Answers each turn of the assistant with a message of a tool."""

    def _step(self, tensordict, next_tensordict):
        prompt = next_tensordict["history"].prompt
        answer = lazy_stack(
            [
                History(role="tool", content=f"result {i}", batch_size=()).unsqueeze(0)
                for i in range(SIZE)
            ]
        )
        next_tensordict["history"].prompt = prompt.extend(answer, inplace=False, dim=-1)
        next_tensordict["_scratch"] = torch.ones(SIZE, 1)
        next_tensordict["tool", "_private"] = torch.ones(SIZE, 1)
        next_tensordict["tool", "calls"] = torch.ones(SIZE, 1)
        return next_tensordict


class Hook(Transform):
    """Changes a turn, and what the next one begins with, after the step."""

    def _post_step_mdp_hooks(self, tensordict, tensordict_):
        tensordict["hooked"] = torch.ones(SIZE, 1)
        return tensordict, tensordict_.set("begun", torch.ones(SIZE, 1))


def steps(turns: int) -> list[Transform]:
    return [StepCounter(max_steps=turns)]


TRANSFORMS = {
    "none": list,
    "one turn": lambda: steps(1),
    "two turns": lambda: steps(2),
    "tool": lambda: [*steps(2), Tool()],
    "hook": lambda: [*steps(2), Hook()],
}

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two steps": {"dialog_turns_per_batch": 2 * SIZE},
    "policy version": {"track_policy_version": True},
    "reset": {"reset_at_each_iter": True},
    "two steps, reset": {
        "dialog_turns_per_batch": 2 * SIZE,
        "reset_at_each_iter": True,
    },
    "flat": {"flatten_data": True},
    "postproc": {"postproc": lambda data: data.set("mark", torch.ones(data.shape))},
    "trajectories": {"yield_completed_trajectories": True},
    "short trajectories": {
        "yield_completed_trajectories": True,
        "dialog_turns_per_batch": 1,
    },
    "last steps": {"yield_only_last_steps": True, "yield_completed_trajectories": True},
}


def make(kind, engine, transforms, *, wrapper=None, env=None, **form):
    tokenizer = engine.get_tokenizer()
    queries = [
        TensorDict(query=[f"{i} {j}" for j in range(SIZE)], batch_size=SIZE)
        for i in range(9)
    ]
    chat = ChatEnv.from_dataloader(
        queries, tokenizer=tokenizer, batch_size=(SIZE,), **(env or {})
    )
    for transform in transforms():
        chat.append_transform(transform)
    options = {"generate_kwargs": {"max_new_tokens": 4}, **(wrapper or {})}
    policy = SGLangWrapper(engine, **options)
    options = {"dialog_turns_per_batch": SIZE, "total_dialog_turns": 4 * SIZE, **form}
    return kind(chat, policy=policy, **options)


def describe(value: Any) -> Any:
    """Returns everything about a nested value that another one can differ in."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), str(value.tolist())
    inner = vars(value) if is_tensor_collection(value) else {}
    if "_non_tensordict" in inner:
        others = {
            name: describe(other)
            for name, other in inner["_non_tensordict"].items()
            # A field that is None is there, or not, by the release of tensordict.
            if other is not None
        }
        return type(value), describe(inner["_tensordict"]), others
    if isinstance(value, LazyStackedTensorDict):
        items = [describe(each) for each in value.tensordicts]
        return type(value), value.stack_dim, value.batch_size, value.is_locked, items
    if isinstance(value, TensorDict):
        entries = {key: describe(each) for key, each in value._tensordict.items()}
        return type(value), value.batch_size, value.device, value.is_locked, entries
    return type(value), repr(value)


def tensors(value: Any) -> list[torch.Tensor]:
    """Returns the tensors that a nested value holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    inner = vars(value).get("_tensordict", getattr(value, "tensordicts", None))
    if isinstance(inner, (dict, list)):
        parts = inner.values() if isinstance(inner, dict) else inner
        return [each for part in parts for each in tensors(part)]
    return [] if inner is None else tensors(inner)


def containers(value: Any) -> list[int]:
    """Returns the identities of all nested TensorDicts."""
    if isinstance(value, torch.Tensor):
        return []
    inner = vars(value).get("_tensordict", getattr(value, "tensordicts", ()))
    if isinstance(inner, (dict, list, tuple)):
        parts = list(inner.values() if isinstance(inner, dict) else inner)
    else:
        parts = [inner]
    return [id(value), *(place for part in parts for place in containers(part))]


def collect(kind, engine, transforms, **form) -> list[Any]:
    buffer = form.get("replay_buffer")
    batches = list(make(kind, engine, transforms, **form))
    return list(buffer[:]) if buffer is not None else batches


def assert_same(engine, transforms, forms) -> None:
    theirs, ours = (
        [describe(batch) for batch in collect(kind, engine, transforms, **forms())]
        for kind in (LLMCollector, SGLangLLMCollector)
    )
    assert theirs
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == other


pytestmark = [
    pytest.mark.filterwarnings("ignore:The env passed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:frames_per_batch:UserWarning"),
]


@pytest.mark.parametrize(("form", "transforms"), diagonal(FORMS, TRANSFORMS))
def test_batches_are_the_same(fake_engine, transforms, form):
    if transforms == "none" and FORMS[form].get("yield_completed_trajectories"):
        pytest.skip("No conversation ends.")
    assert_same(fake_engine, TRANSFORMS[transforms], lambda: FORMS[form])


@pytest.mark.parametrize("form", ["plain", "trajectories"])
@pytest.mark.parametrize("mode", ["text", "tokens"])
def test_other_modes(fake_engine, form, mode):
    forms = {
        "wrapper": {"input_mode": mode},
        "env": {"input_mode": mode},
        **FORMS[form],
    }
    assert_same(fake_engine, TRANSFORMS["two turns"], lambda: forms)


def test_padded_batches_with_generation_info(fake_engine):
    forms = {"wrapper": {"pad_output": True, "return_generation_info": True}}
    assert_same(fake_engine, TRANSFORMS["one turn"], lambda: forms)


@pytest.mark.parametrize(
    "options", [{"input_mode": "tokens", "pad_output": True}, {"prefer_tokens": True}]
)
def test_what_a_turn_reads_of_the_last_one(fake_engine, options):
    env = {"input_mode": options.get("input_mode", "history")}
    forms = {"wrapper": options, "env": env, "dialog_turns_per_batch": 2 * SIZE}
    assert_same(fake_engine, TRANSFORMS["none"], lambda: forms)


@pytest.mark.parametrize("form", ["reset", "two steps, reset", "trajectories"])
def test_conversations_of_different_lengths(fake_engine, form):
    assert_same(fake_engine, lambda: [Ends()], lambda: FORMS[form])


@pytest.mark.parametrize("form", ["plain", "trajectories"])
def test_a_replay_buffer(fake_engine, form):
    def forms():
        buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=SIZE)
        return {"replay_buffer": buffer, **FORMS[form]}

    assert_same(fake_engine, TRANSFORMS["one turn"], forms)


def test_batches_share_nothing(fake_engine):
    batches = collect(SGLangLLMCollector, fake_engine, TRANSFORMS["none"])
    kept = [id(tensor) for batch in batches for tensor in tensors(batch)]
    places = {tensor.data_ptr() for batch in batches for tensor in tensors(batch)}
    assert len(places) == len(set(kept)) == len(kept) > 0
    objects = [place for batch in batches for place in containers(batch)]
    assert len(set(objects)) == len(objects)


@pytest.mark.parametrize(
    "options", [{"num_samples": 2}, {"generate_kwargs": {"n": 2}}], ids=["num", "n"]
)
def test_several_samples_of_a_policy_are_refused(fake_engine, options):
    with pytest.raises(ConfigurationError, match=r"num_samples=2 .*repeats=2"):
        make(SGLangLLMCollector, fake_engine, TRANSFORMS["one turn"], wrapper=options)


def test_garbage_is_collected_again(fake_engine):
    collect(SGLangLLMCollector, fake_engine, TRANSFORMS["one turn"])
    assert gc.isenabled()


def test_copies():
    """Each kind of nested value that TorchRL clones."""
    text = Text(prompt=["a", "b"], batch_size=2)
    whole = TensorDict(
        text=text,
        query=NonTensorData({"k": [1]}, batch_size=(2,)),
        nested=TensorDict(x=torch.ones(2, 3), batch_size=(2, 3), names=["n", "t"]),
        batch_size=2,
    )
    for value in (whole, lazy_stack(list(whole.unbind(0))), whole.to("cpu"), text):
        for recurse in (True, False):
            copied = copy_tree(value, recurse)
            assert describe(copied) == describe(value.clone(recurse))
    deep = copy_tree(whole, recurse=True)
    deep["nested", "x"].zero_()
    deep["query"]["k"].append(2)
    assert whole["nested", "x"].all()
    assert whole["query"] == {"k": [1]}
    assert not has_private_keys(whole)
    rows = whole.unbind(0)
    rows[1].set("_z", torch.ones(()))
    assert not has_private_keys(lazy_stack(list(rows)))
    assert has_private_keys(whole.set(("nested", "_y"), torch.ones(2, 3)))
    assert has_private_keys(lazy_stack(list(whole.unbind(0))))
