"""Chat templates as transformers runs them, in a third of the time.

A template looks up some attributes of each message, and Jinja's sandbox checks each
attribute. For keys of dictionaries, loops and texts, the result is known in advance.
"""

from __future__ import annotations

import functools
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
    # The sandbox replaces str.format by a safe method.
    str: frozenset(dir(str)) - {"format", "format_map"},
    LoopContext: frozenset(dir(LoopContext)),
}
"""Allowed attributes by type; the sandbox rejects names with an underscore."""
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
"""Names of variables for options of transformers."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with shortcuts to its own results."""

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
"""Transformers 5.24 passes reasoning to templates under all its names."""


def as_read(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages in transformers' form for a template."""
    if _give_names_to_reasoning is None or not any(
        "reasoning_content" in message for message in messages
    ):
        return messages
    named: list[dict[str, Any]] = _give_names_to_reasoning(messages)
    return named


def quick_template(tokenizer: Any, source: str) -> Template | None:
    """Returns a template with the output of the tokenizer's method.

    ``None`` if the tokenizer overrides the method, or transformers runs templates in an
    unknown environment.
    """
    method = getattr(type(tokenizer), "apply_chat_template", None)
    if method is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    env: Environment = compile_template(source).environment
    if type(env) is not ImmutableSandboxedEnvironment:
        return None
    return _compile(env, source)


@functools.lru_cache
def _compile(env: Environment, source: str) -> Template:
    """Compiles a template once; transformers keeps one environment for each, too."""
    sandbox = object.__new__(_Sandbox)
    # Like Environment.overlay(), with this class.
    vars(sandbox).update(vars(env), linked_to=env, cache=None)
    vars(sandbox)["overlayed"] = True  # codespell:ignore
    sandbox.extensions = {
        name: extension.bind(sandbox) for name, extension in env.extensions.items()
    }
    sandbox.filters = {**env.filters, "tojson": write_once(env.filters["tojson"])}
    return sandbox.from_string(source)


MARKER = "torchrl_sglang_mark"
"""Variable of :func:`marking_template` with the function for marks."""


def marking_template(tokenizer: Any, source: str) -> Template:
    """Returns a template with marks before each pass of a loop, and after it.

    It calls the variable :data:`MARKER` with the number of the loop, and within a pass
    with the values of the loop's variables, too.
    """
    compiled = quick_template(tokenizer, source)
    if compiled is None:
        compiled = chat_template_utils._compile_jinja_template(source)
    env: Environment = compiled.environment
    tree = _Marking().visit(env.parse(source))
    return env.from_string(tree.set_environment(env))


class _Marking(NodeTransformer):
    """Adds marks to the loops of a template."""

    _loops = 0

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:  # noqa: N802
        self._loops += 1
        number = nodes.Const(self._loops)
        targets = [node.target, *node.target.find_all(nodes.Name)]
        names = [target.name for target in targets if isinstance(target, nodes.Name)]

        def mark(*names: str) -> nodes.Node:
            values = [number, *(nodes.Name(name, "load") for name in names)]
            call = nodes.Call(nodes.Name(MARKER, "load"), values, [], None, None)
            return nodes.Output([call]).set_lineno(node.lineno)

        self.generic_visit(node)
        node.body = [mark(*names), *node.body]
        return [node, mark()]
