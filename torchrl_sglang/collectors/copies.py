"""Copies of nested TensorDicts, as TorchRL's collectors and environments make them.

TorchRL's ``clone`` passes through several layers of dispatch at each message of each
conversation, which takes most of the time of a rollout. :func:`copy_tree` walks the
same tree directly.

The private names of TensorDict and TorchRL that are used here are needed for the speed:
their public counterparts (``clone``, ``step_mdp``, the checked constructors) make a
rollout's own share of the time 5 times longer, and the constructors alone 1.3 times.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Set
from copy import copy, deepcopy
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
)
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from torchrl_sglang.policies.outputs import filled, wrap


def copy_tree(value: Any, recurse: bool) -> Any:
    """Returns ``value.clone(recurse)``: leaves are shared unless ``recurse``."""
    kind = type(value)
    if kind is torch.Tensor or (kind is NonTensorData and not recurse):
        return value.clone() if recurse else value
    if kind is TensorDict:
        items = value._tensordict.items()
        return _filled(value, {key: copy_tree(part, recurse) for key, part in items})
    if kind in _STACKS:
        return _stacked(value, [copy_tree(v, recurse) for v in value.tensordicts])
    if hasattr(value, "_non_tensordict"):
        attributes = value._non_tensordict
        if kind is NonTensorData and type(attributes["data"]) is not str:
            attributes = {**attributes, "data": deepcopy(attributes["data"])}
        return wrap(kind, copy_tree(value._tensordict, recurse), attributes)
    return value.clone(recurse) if is_tensor_collection(value) else copy(value)


def copy_turns(output: TensorDictBase, fresh: Set[str]) -> TensorDictBase:
    """Returns ``output.clone()``, but entries of ``fresh`` themselves.

    Nothing else may refer to those, except to those that the next observation has, too.
    """
    rows = output.tensordicts if type(output) is LazyStackedTensorDict else []
    if not fresh or {TensorDict} != set(map(type, rows)):
        copied: TensorDictBase = copy_tree(output, recurse=True)
        return copied
    entries = fresh - set(rows[0]["next"].keys())
    return _stacked(
        output,
        [
            _filled(
                row,
                {
                    key: part if key in entries else copy_tree(part, recurse=True)
                    for key, part in row._tensordict.items()
                },
            )
            for row in rows
        ],
    )


def _filled(like: TensorDict, items: dict[str, Any]) -> TensorDict:
    """Returns a TensorDict of the same form with other entries, unchecked."""
    names = None if like._td_dim_names is None else like._maybe_names()
    return filled(items, like._batch_size, like._device, names)


def _stacked(
    like: LazyStackedTensorDict, items: Iterable[TensorDictBase]
) -> LazyStackedTensorDict:
    """Returns a stack of as many other elements of the same shapes, unchecked."""
    stack = LazyStackedTensorDict.__new__(LazyStackedTensorDict)
    stack._is_locked = stack.hook_out = stack.hook_in = None
    stack.stack_dim, stack._batch_size = like.stack_dim, like._batch_size
    stack.tensordicts = list(items)
    if like._td_dim_name is not None:
        stack._td_dim_name = like._td_dim_name
    return stack


class FastCopied(LazyStackedTensorDict):
    """A batch that TorchRL is about to clone: :func:`copy_tree` does it."""

    def _clone(self, recurse: bool = True) -> LazyStackedTensorDict:
        batch: LazyStackedTensorDict = copy_tree(self, recurse)
        return batch


class StepInput(LazyStackedTensorDict):
    """Input of an environment's step, whose containers are read and written directly.

    ``ChatEnv`` reads a container of conversations from its input, and writes another
    one, without a batch size, to an empty copy of it. TensorDict checks and clones
    every message for that.
    """

    def _clone(self, recurse: bool = True) -> LazyStackedTensorDict:
        rows = [copy_tree(row, recurse) for row in self.tensordicts]
        return StepInput(
            *rows, stack_dim=self.stack_dim, stack_dim_name=self._td_dim_name
        )

    def _get_str(self, key: str, *args: Any, **kwargs: Any) -> Any:
        values: list[Any] = [
            row._tensordict.get(key) if type(row) is TensorDict else None
            for row in self.tensordicts
        ]
        kind = type(values[0])
        if kind not in _CONTAINERS or {kind} != set(map(type, values)):
            return super()._get_str(key, *args, **kwargs)
        rows = [value._tensordict for value in values]
        stack = StepInput(*rows, stack_dim=self.stack_dim)
        return wrap(kind, stack, values[0]._non_tensordict)

    def _set_str(self, key: str, value: Any, **kwargs: Any) -> Any:
        content: Any = getattr(value, "_tensordict", None)
        if (
            type(value) not in _CONTAINERS
            or type(content) is not TensorDict
            or content.batch_size
            or kwargs["inplace"]
            or self.is_locked
            or not all(map(self._is_column, content.values()))
        ):
            return super()._set_str(key, value, **kwargs)
        for index, row in enumerate(self.tensordicts):
            parts = {
                name: wrap(
                    type(part),
                    copy_tree(part._tensordict.tensordicts[index], recurse=False),
                    part._non_tensordict,
                )
                for name, part in content.items()
            }
            container = wrap(type(value), _filled(row, parts), value._non_tensordict)
            row._tensordict[key] = container
        return self

    def _is_column(self, part: Any) -> bool:
        """Returns whether an entry has one conversation for each row."""
        stack = getattr(part, "_tensordict", None)
        return (
            type(stack) is StepInput
            and stack.stack_dim == self.stack_dim == 0
            and len(stack.tensordicts) == len(self.tensordicts)
            and all(type(row) is TensorDict for row in self.tensordicts)
        )


_CONTAINERS = frozenset({ChatHistory, History, Text, Tokens})


class Fresh(LazyStackedTensorDict):
    """A batch that TorchRL is about to clone, though nothing else refers to it."""

    def _clone(self, recurse: bool = True) -> LazyStackedTensorDict:
        return _stacked(self, self.tensordicts)


_STACKS = (LazyStackedTensorDict, FastCopied, Fresh)


def step(env: Any, batch: TensorDictBase) -> TensorDictBase:
    """Returns ``env.step(batch)``; transforms work on a clone of their input."""
    if type(batch) is LazyStackedTensorDict and batch.device == env.device:
        batch = StepInput(*batch.tensordicts, stack_dim=batch.stack_dim)
    output: TensorDictBase = env.step(batch)
    if type(output) is StepInput:
        return _stacked(output, output.tensordicts)
    return output


def has_private_keys(value: Any) -> bool:
    """Returns whether a key at any level begins with an underscore.

    The keys of a stack are those that all of its elements have.
    """
    if isinstance(value, LazyStackedTensorDict):
        return any(map(has_private_keys, value.tensordicts[:1]))
    content = getattr(value, "_tensordict", None)
    if not isinstance(content, dict):
        return content is not None and has_private_keys(content)
    return any(key[0] == "_" or has_private_keys(content[key]) for key in content)


def next_input(
    step_mdp: Any, output: LazyStackedTensorDict, unused: Container[str] = ()
) -> LazyStackedTensorDict:
    """Returns ``step_mdp(output)``, the input of the next step.

    Entries of ``unused`` are left out unless the next observation has them.
    """
    items = [_next_input(step_mdp, element, unused) for element in output.tensordicts]
    return LazyStackedTensorDict(*items, stack_dim=output.stack_dim)


def _next_input(
    step_mdp: Any, output: TensorDictBase, unused: Container[str]
) -> TensorDictBase:
    if type(output) is LazyStackedTensorDict:
        return next_input(step_mdp, output, unused)
    observed = output.get("next", None)
    if type(output) is not TensorDict or type(observed) is not TensorDict:
        result: TensorDictBase = step_mdp(output)
        return result
    following = _filled(output, dict(_kept(step_mdp, output, unused)))
    for key, subtree in step_mdp.keys_from_next.items():
        value = observed.get(key, None)
        if value is None:
            continue
        if subtree is None or key in unused:
            copied = copy_tree(value, recurse=type(value) is NonTensorData)
            following._tensordict[key] = copied
        else:
            step_mdp._grab_and_place({key: subtree}, observed, following, True)
    return following


def _kept(
    step_mdp: Any, output: TensorDict, unused: Container[str]
) -> Iterator[tuple[str, Any]]:
    """Yields the entries of the root that stay."""
    excluded: dict[str, Any] = step_mdp.exclude_from_root
    for key, value in output.items():
        if key in unused:
            continue
        if key not in excluded:
            yield key, copy_tree(value, recurse=False)
        elif excluded[key] is not None:
            part = step_mdp._exclude(excluded[key], value, None)
            if part is not None:
                yield key, part
