"""Chat templates as transformers runs them, in a third of the time.

A template looks up some attributes of each message, and Jinja's sandbox looks at what
each attribute is. Of a dictionary's keys, of a loop and of a text that is known
beforehand.
"""

from __future__ import annotations

import inspect
from typing import Any

from jinja2 import Template, nodes
from jinja2.environment import Environment
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from torchrl_sglang.chat.declarations import Declaration, write_once

_MAPPINGS = (dict, Declaration)
_DICT_ATTRIBUTES = frozenset(dir(Declaration))
_PLAIN = frozenset({str, int, float, bool, list, dict, type(None)})

_SAFE: dict[type, frozenset[str]] = {
    # The sandbox replaces str.format by a safe one.
    str: frozenset(dir(str)) - {"format", "format_map"},
    LoopContext: frozenset(dir(LoopContext)),
}
"""Attributes of types; those with an underscore are left to the sandbox."""
_SAFE = {
    kind: frozenset(name for name in names if not name.startswith("_"))
    for kind, names in _SAFE.items()
}

RESERVED = frozenset(
    {
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(chat_template_utils.render_jinja_template).parameters,
        "messages",
    }
)
"""Names of variables that transformers takes as its own options."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, which takes short cuts to what it would return."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind in _MAPPINGS:
            if attribute not in _DICT_ATTRIBUTES:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        elif kind is Namespace and not attribute.startswith("_"):
            value = getattr(obj, attribute, self)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) in _MAPPINGS and type(argument) is str:
            try:
                return obj[argument]
            except KeyError:
                pass
        return super().getitem(obj, argument)


_give_names_to_reasoning = getattr(chat_template_utils, "_alias_reasoning_fields", None)
"""Transformers 5.24 gives reasoning to templates under all of its names."""


def as_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as transformers gives them to a template."""
    if _give_names_to_reasoning is None or not any(
        "reasoning_content" in message for message in messages
    ):
        return messages
    named: list[dict[str, Any]] = _give_names_to_reasoning(messages)
    return named


def quick_template(tokenizer: Any, source: str) -> Template | None:
    """Returns a template that renders what the tokenizer's method renders.

    ``None`` if the tokenizer has a method of its own, or transformers runs templates in
    another environment than the known one.
    """
    own = getattr(type(tokenizer), "apply_chat_template", None)
    if own is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    known: Environment = compile_template(source).environment
    if type(known) is not ImmutableSandboxedEnvironment:
        return None
    sandbox = object.__new__(_Sandbox)
    # As Environment.overlay() makes one, but of this class.
    vars(sandbox).update(vars(known), linked_to=known, cache=None)
    vars(sandbox)["overlayed"] = True  # codespell:ignore
    sandbox.extensions = {
        name: extension.bind(sandbox) for name, extension in known.extensions.items()
    }
    sandbox.filters = {**known.filters, "tojson": write_once(known.filters["tojson"])}
    return sandbox.from_string(source)


MARKER = "torchrl_sglang_mark"
"""The variable of :func:`marking_template` with the function that returns marks."""


def marking_template(tokenizer: Any, source: str) -> Template:
    """Returns a template that writes a mark before each pass of a loop, and behind it.

    It calls the variable :data:`MARKER` with the number of the loop, and in a pass with
    the values of the loop's variables, too.
    """
    compiled = quick_template(tokenizer, source)
    if compiled is None:
        compiled = chat_template_utils._compile_jinja_template(source)
    environment: Environment = compiled.environment
    tree = _Marking().visit(environment.parse(source))
    return environment.from_string(tree.set_environment(environment))


class _Marking(NodeTransformer):
    """Adds marks to the loops of a template."""

    _loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802
        self._loops += 1
        number = nodes.Const(self._loops)
        targets = [node.target, *node.target.find_all(nodes.Name)]
        names = [each.name for each in targets if isinstance(each, nodes.Name)]

        def mark(*names: str) -> nodes.Node:
            values = [number, *(nodes.Name(name, "load") for name in names)]
            call = nodes.Call(nodes.Name(MARKER, "load"), values, [], None, None)
            return nodes.Output([call]).set_lineno(node.lineno)

        self.generic_visit(node)
        node.body = [mark(*names), *node.body]
        return [node, mark()]
