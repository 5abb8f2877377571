"""A plan: the steps of a traced network, run for all members at once."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

from multitudes.core.at_once import at_once
from multitudes.core.calling import Output, chosen_output, part_of
from multitudes.core.draws.stochastic import Stochastic, as_member
from multitudes.core.packing.rules import FUNCTIONS, LAYERS, METHODS, RANDOM
from multitudes.core.packing.values import CannotPack, Many, Packed, Stacked

# Questions about a value that have one answer for all members: asked of member 0.
_ASKED = {"size", "dim", "ndimension", "numel", "is_floating_point", "element_size"}
_ASKED_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step, as an argument."""

    name: str


@dataclass(frozen=True)
class Step:
    """One operation of the traced network."""

    name: str
    kind: str  # fx's: call_module, call_function, call_method, get_attr
    target: Any
    args: Any
    kwargs: Any
    draws: bool  # random numbers
    writes: bool  # into its first argument
    asks: bool  # something that has one answer for all members
    rule: Callable[..., Any] | None  # how a layer or a function runs for all members at once
    layer: nn.Module | None  # of a call of one
    tensors: dict[str, str]  # the names of the layer's tensors in the whole network, by their names in it
    plain: bool  # whether its arguments are results of earlier steps and nothing else


class Plan:
    """The steps of one template network; `plan(tensors, x)` gives `[M, B, ...]`.

    The plan holds no weights: it gets those of all members, stacked `[M, ...]`, by their names.
    """

    def __init__(self, graph: fx.Graph, template: nn.Module, members: int) -> None:
        self.template = template
        self.members = members
        self.mapped: set[str] = set()  # the steps that have no rule, once they have run
        self.required: list[str] = []
        self.defaults: dict[str, Any] = {}
        self.steps: list[Step] = []
        paths = {id(module): path for path, module in template.named_modules()}
        for node in graph.nodes:
            args, kwargs = _refs(node.args), _refs(node.kwargs)
            if node.op == "placeholder" and args:
                self.defaults[node.name] = args[0]
            elif node.op == "placeholder":
                self.required.append(node.name)
            elif node.op == "output":
                self.output = args[0]
            else:
                kind, target = node.op, node.target
                what = target in RANDOM, _writes_in_place(kind, target, args), _asks(target, args)
                rule, kwargs = _rule_for(kind, target, args, kwargs)
                layer = template.get_submodule(target) if kind == "call_module" else None
                names: dict[str, str] = {}
                if layer is not None:
                    rule = LAYERS.get(type(layer))
                    names = _tensor_names(layer, paths)
                simple = not kwargs and all(isinstance(arg, Ref) for arg in args)
                self.steps.append(Step(node.name, kind, target, args, kwargs, *what, rule, layer, names, simple))

    def __call__(self, tensors: Mapping[str, Tensor], x: Any) -> Tensor:
        env = self._bind(x)
        for step in self.steps:
            if step.plain:  # the usual step, of earlier results alone
                args, kwargs = tuple([env[ref.name] for ref in step.args]), {}
            else:
                args, kwargs = _fill(step.args, env), _fill(step.kwargs, env)
            result = self._run(step, tensors, args, kwargs)
            env[step.name] = result
            if step.writes and isinstance(result, (Many, Tensor)):
                env[step.args[0].name] = result
        return self._answer(_fill(self.output, env), chosen_output(self.template))

    def _bind(self, x: Any) -> dict[str, Any]:
        """The placeholders' values. Optional arguments were traced at their defaults and cannot be given."""
        if isinstance(x, Mapping):
            given = dict(x)
        else:
            given = dict(zip(self.required, x if isinstance(x, tuple) else (x,), strict=False))
        if given.keys() != set(self.required) or (isinstance(x, tuple) and len(x) != len(given)):
            raise CannotPack(f"it is packed for the arguments {', '.join(self.required)} and no others")
        return self.defaults | given

    def _answer(self, output: Any, chosen: Output | None) -> Tensor:
        if chosen is not None:
            alone = isinstance(output, Many)
            part = part_of(output.tensor if isinstance(output, Many) else output, chosen)
            output = output if alone else part
        elif isinstance(output, dict) or hasattr(output, "logits"):
            output = output["logits"] if isinstance(output, dict) else output.logits
        if isinstance(output, Tensor):  # no step had weights: every member says the same
            return output.expand(self.members, *output.shape)
        if not isinstance(output, Many):
            raise CannotPack(f"it returns a {type(output).__name__}")
        return output.stacked()

    def _run(self, step: Step, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        if step.kind == "get_attr":
            return self._attribute(step.target, tensors)
        if step.layer is not None:
            return self._layer(step, step.layer, tensors, args, kwargs)
        return self._function(step, args, kwargs)

    def _attribute(self, path: str, tensors: Mapping[str, Tensor]) -> Any:
        if path in tensors:
            return Stacked(tensors[path], self.members)
        owner, _, name = path.rpartition(".")
        return getattr(self.template.get_submodule(owner), name)

    def _layer(self, step: Step, layer: nn.Module, tensors: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
        own = {name: tensors[full] for name, full in step.tensors.items() if full in tensors}
        if step.rule is not None and len(args) == 1 and not kwargs and isinstance(args[0], (Many, Tensor)):
            result = step.rule(_StackedLayer(layer, own) if own else layer, args[0], self.members)
            if result is not NotImplemented:
                return result
        names = list(own)

        def run(*values: Any) -> Any:
            given, args, kwargs = dict(zip(names, values[: len(names)], strict=True)), *values[len(names) :]
            return functional_call(layer, given, args, kwargs, tie_weights=False)

        weights = [Stacked(tensor, self.members) for tensor in own.values()]
        if isinstance(layer, Stochastic):
            return self._drawn(layer, run, (*weights, args, kwargs), step)
        return self._vmap(run, (*weights, args, kwargs), step)

    def _drawn(self, layer: Stochastic, run: Callable[..., Any], values: Any, step: Step) -> Any:
        """A layer that draws: each member has random numbers of its own, on a shared value too."""
        x = values[-2][0] if len(values) == 2 and len(values[-2]) == 1 else None
        if layer.channelwise and layer.draw is None and isinstance(x, Packed):
            return Packed(layer(x.packed()), self.members)
        index = Stacked(torch.arange(self.members), self.members)

        def of_one(index: Tensor, *values: Any) -> Any:
            with as_member(layer, index, self.members):
                return run(*values)

        return self._vmap(of_one, (index, *values), step)

    def _function(self, step: Step, args: Any, kwargs: Any) -> Any:
        function = step.target if step.kind == "call_function" else _method(step.target)
        if isinstance(step.target, type):  # an object that holds values, such as a dataclass of outputs
            return function(*args, **kwargs)
        if not _holds_many((args, kwargs)):
            if not step.draws:
                return function(*args, **kwargs)
            if not (args and isinstance(args[0], Tensor)):  # numbers of a shape
                return Stacked(torch.stack([function(*args, **kwargs) for _ in range(self.members)]), self.members)
            args = (Stacked(args[0].expand(self.members, *args[0].shape), self.members), *args[1:])
        if step.asks and isinstance(args[0], Many):
            return function(args[0].stacked()[0], *args[1:], **kwargs)
        if step.rule is not None:
            result = step.rule(function, self.members, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if step.target == "view":  # members' values need not be contiguous
            function = Tensor.reshape
        return self._vmap(lambda a, k: function(*a, **k), (args, kwargs), step)

    def _vmap(self, function: Callable[..., Any], values: Any, step: Step) -> Any:
        """Any step at all: run it for each member under vmap."""
        leaves, structure = tree_flatten(values)
        if not any(isinstance(leaf, Many) for leaf in leaves):
            return function(*values)
        if not torch.compiler.is_compiling():
            self.mapped.add(step.name)
        try:
            with at_once(self.members) as members:
                own = [members.own(leaf.stacked()) if isinstance(leaf, Many) else leaf for leaf in leaves]
                parts, shape = tree_flatten(function(*tree_unflatten(own, structure)))
                whole = [members.whole(part) if isinstance(part, Tensor) else part for part in parts]
        except (RuntimeError, TypeError, AttributeError, IndexError) as error:
            raise CannotPack(f"step {step.name!r} ({step.target}) failed: {error}") from error
        return tree_unflatten([Stacked(p, self.members) if isinstance(p, Tensor) else p for p in whole], shape)


class _StackedLayer:
    """A layer's settings, with the tensors of all members."""

    def __init__(self, layer: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.layer = layer
        self.tensors = tensors

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.layer, name)


def _tensor_names(layer: nn.Module, paths: Mapping[int, str]) -> dict[str, str]:
    """The names of a layer's tensors in the whole network, by their names in the layer."""
    names: dict[str, str] = {}
    for path, module in layer.named_modules():
        inner, outer = (f"{each}." if each else "" for each in (path, paths[id(module)]))
        names |= {inner + name: outer + name for name in (*module._parameters, *module._buffers)}
    return names


# -- arguments ---------------------------------------------------------------------------------------------


def _refs(tree: Any) -> Any:
    """fx's argument tree with nodes replaced by their names."""
    if isinstance(tree, fx.Node):
        return Ref(tree.name)
    return _map_tree(_refs, tree)


def _fill(tree: Any, env: dict[str, Any]) -> Any:
    if isinstance(tree, Ref):
        return env[tree.name]
    return _map_tree(lambda part: _fill(part, env), tree)


def _map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: function(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        return [function(part) for part in tree] if isinstance(tree, list) else tuple(function(p) for p in tree)
    if isinstance(tree, slice):
        return slice(function(tree.start), function(tree.stop), function(tree.step))
    return tree


def _holds_many(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_holds_many(value) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return any(_holds_many(part) for part in tree)
    return isinstance(tree, Many)


def _method(name: str) -> Callable[..., Any]:
    def method(value: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(value, name)(*args, **kwargs)

    return method


def _rule_for(kind: str, target: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any] | None, Any]:
    """The rule of a function or method, where it knows these arguments, and the arguments by the rule's names."""
    rule = {"call_function": FUNCTIONS, "call_method": METHODS}.get(kind, {}).get(target)
    if rule is None:
        return None, kwargs
    if "axis" in kwargs:  # torch takes NumPy's name as well
        kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    try:
        inspect.signature(rule).bind(None, None, *args, **kwargs)
    except TypeError:
        return None, kwargs
    return rule, kwargs


def _asks(target: Any, args: Any) -> bool:
    if target is getattr:
        return args[1] in _ASKED_ATTRIBUTES
    return bool(args) and (target in _ASKED or target is len)


def _writes_in_place(kind: str, target: Any, args: Any) -> bool:
    if not args or not isinstance(args[0], Ref):
        return False
    if kind == "call_method":
        return bool(target.endswith("_") and not target.endswith("__"))
    return kind == "call_function" and target in _IN_PLACE


_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv, F.relu_, torch.relu_}
