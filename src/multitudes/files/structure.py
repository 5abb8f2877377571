"""Describe a network's structure as plain data, and rebuild the network from it.

Each module becomes a *node*: its class, its plain settings, and the names of its children and tensors. Modules of torch
and of this library are rebuilt from nodes alone. A user's own modules are copied from the network that the user passes,
and then get the saved settings, children and tensors. Nothing is unpickled, and classes are looked up in torch and this
library only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from multitudes.draws.functional_noise import noisy_class, own_class
from multitudes.ensemble.members import Members
from multitudes.ensemble.multitude import DIVERGENCES, Multitude, divergence_name, plain
from multitudes.files.attribute_values import describe_attributes, lazy_hooks, restore_attributes
from multitudes.networks.copies import copied, share_registries
from multitudes.networks.settings import HF_CACHES
from multitudes.networks.stochastic import attached_layers

Node = dict[str, Any]

MAX_MEMBERS = 1_000_000
_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}


# -- from a network to nodes -------------------------------------------------------------------------------


def describe(net: nn.Module) -> tuple[list[Node], dict[str, Tensor]]:
    """Return the nodes of a network, the root first, and its tensors by name, including non-persistent ones."""
    places = _places(net)
    numbers = {id(place[0]): number for number, place in enumerate(places)}
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def named(path: str, registry: Mapping[str, Tensor | None]) -> dict[str, str | None]:
        for name, tensor in registry.items():
            if tensor is not None and id(tensor) not in names:  # shared tensors are saved once
                names[id(tensor)] = path + name
                tensors[path + name] = tensor
        return {name: None if tensor is None else names[id(tensor)] for name, tensor in registry.items()}

    nodes, seen = [], set[int]()
    for module, path, origin, member in places:
        prefix = f"{path}." if path else ""
        node: Node = {"path": path, "class": _name_of(own_class(module)), "member": member}
        if own_class(module) is not type(module):
            node["keeps_noise"] = True
        node |= _settings(module, path, origin, numbers, seen)
        inner = _shared(module)
        if inner is not None:
            node["shares"] = numbers[id(inner)]
        else:
            children = {name: None if child is None else numbers[id(child)] for name, child in module._modules.items()}
            node["children"] = children
            node["parameters"] = named(prefix, module._parameters)
            node["buffers"] = named(prefix, module._buffers)
            node["fixed"] = [n for n, p in module._parameters.items() if p is not None and not p.requires_grad]
            node["transient"] = sorted(module._non_persistent_buffers_set)
            node["attached"] = [numbers[id(layer)] for layer in attached_layers(module)]
        nodes.append(node)
    return nodes, tensors


def _places(net: nn.Module) -> list[tuple[nn.Module, str, str, str]]:
    """List each module once: the module, its path, its path in the user's network, the path of its member."""
    found: dict[int, tuple[nn.Module, str, str, str]] = {}

    def walk(module: nn.Module, path: str, origin: str, member: str) -> None:
        if id(module) in found:
            return
        found[id(module)] = module, path, origin, member
        inner = _shared(module)
        if isinstance(module, Members):
            found[id(inner)] = inner, path, origin, member
            for name, each in inner._modules.items():  # each replaces the user's network
                walk(each, _joined(path, name), origin, _joined(path, name))
        elif inner is not None:
            walk(inner, path, origin, member)
        else:
            for name, child in module._modules.items():
                if child is not None:
                    wrapped = name == getattr(type(module), "wraps", None)  # it replaces `module` in the user's network
                    walk(child, _joined(path, name), origin if wrapped else _joined(origin, name), member)

    walk(net, "", "", "")
    return list(found.values())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shared(module: nn.Module) -> Any:
    """Return the module whose registries this one shares, as declared by its class, or None."""
    inner = vars(module).get(str(getattr(type(module), "shares", None)))
    return inner if isinstance(inner, nn.Module) else None  # a user's class may use the name otherwise


def _settings(module: nn.Module, path: str, origin: str, numbers: Mapping[int, int], seen: set[int]) -> Node:
    """Return the part of a node about settings, and a reference to the user's network if they need it."""
    shares = str(getattr(type(module), "shares", None))
    beside = {*module.cache_attributes, "divergences"} if isinstance(module, Multitude) else set()
    skipped = {*_REGISTRIES, shares, *beside}  # caches, and attributes that are saved separately
    settings, others = {}, []
    for key, value in vars(module).items():
        if key in skipped:
            continue
        try:
            settings[key] = _encode(value, numbers)
        except TypeError:
            others.append(key)
    node: Node = {"settings": {key: value for key, value in settings.items() if key not in HF_CACHES}, "place": origin}
    if isinstance(module, Multitude):
        node["divergences"] = [_encode_function(function) for function in module.divergences]
    hooks = _hooks(module)
    where = f"layer {path!r} ({type(module).__name__})" if path else f"the network ({type(module).__name__})"
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        raise ValueError(f"{where} has an extra state (get_extra_state), which a file cannot store")
    if _is_known(own_class(module)) and not others and not hooks:
        return node
    if others and others[0] in (reasons := getattr(type(module), "unsaved", {})):
        raise ValueError(reasons[others[0]])
    if isinstance(module, Multitude) or (others and _of_library(type(module))):
        what = "has forward hooks" if hooks else "has a class of your own"
        if others:
            what = f"has {others[0]!r}, a {type(vars(module)[others[0]]).__name__}"
        raise ValueError(f"{where} {what}, which a file cannot store: remove it, or save the members, net.member(i)")
    return node | {"origin": origin, "hooks": hooks} | describe_attributes(module, others, seen)


def _hooks(module: nn.Module) -> int:
    """Count a module's forward hooks, except those that loading creates."""
    own = 2 * len(attached_layers(module))  # one pre-hook and one hook
    own += len(lazy_hooks(module._forward_hooks))
    return len(module._forward_hooks) + len(module._forward_pre_hooks) - own


def _encode(value: Any, numbers: Mapping[int, int]) -> Any:
    """Encode a plain value for JSON, or raise a TypeError."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, nn.Module) and id(value) in numbers:
        return {"module": numbers[id(value)]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [_encode(v, numbers) for v in value]}
    if type(value) is list:
        return [_encode(v, numbers) for v in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _encode(v, numbers) for key, v in value.items()}}
    raise TypeError


def _encode_function(function: Callable[..., Tensor]) -> Node:
    own = function.func if isinstance(function, partial) else function
    keywords = function.keywords if isinstance(function, partial) else {}
    name = divergence_name(own)
    if DIVERGENCES.get(name) is not own:
        raise ValueError(
            f"net.divergences contains your own function {name}, which a file cannot store: set net.divergences = () "
            "before saving, and set it again after loading"
        )
    return {"function": name, "keywords": dict(keywords)}


# -- from nodes to a network -------------------------------------------------------------------------------


def rebuild(nodes: list[Node], tensors: Mapping[str, Tensor], model: nn.Module | None = None) -> nn.Module:
    """Rebuild the network from nodes and tensors; `model` does not change."""
    _check_model(nodes, model)
    parameters = {
        key: nn.Parameter(tensors[key], name not in node["fixed"])
        for node in nodes
        for name, key in node.get("parameters", {}).items()
        if key is not None
    }
    modules = _modules(nodes, parameters, tensors, model)
    for node, module in zip(nodes, modules, strict=True):
        vars(module).update({key: _decode(value, modules) for key, value in node["settings"].items()})
        _check_members(module)
        restore_attributes(module, node)
        if "shares" in node:
            continue
        _refill(module._modules, {n: None if c is None else modules[c] for n, c in node["children"].items()})
        _refill(module._parameters, {n: None if k is None else parameters[k] for n, k in node["parameters"].items()})
        _refill(module._buffers, {n: None if k is None else tensors[k] for n, k in node["buffers"].items()})
        module._non_persistent_buffers_set.clear()
        module._non_persistent_buffers_set.update(node["transient"])
        for number in node["attached"]:
            modules[number].attach(module)
    for node, module in reversed(list(zip(nodes, modules, strict=True))):  # inner modules first
        if node.get("keeps_noise"):
            module.__class__ = noisy_class(own_class(module))
        if "shares" in node:
            share_registries(module, modules[node["shares"]])
            object.__setattr__(module, str(type(module).shares), modules[node["shares"]])
        if isinstance(module, Multitude):
            module.divergences = tuple(map(_decode_function, node["divergences"]))
            module.forget()
    return modules[0]


def _check_model(nodes: list[Node], model: nn.Module | None) -> None:
    """Check the user's network before anything is built."""
    if model is not None and not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
    there = {} if model is None else dict(plain(model).named_modules(remove_duplicate=False))
    if model is not None and not any("origin" in node for node in nodes):
        _check_matches(nodes, there)
    for node in nodes:
        if "origin" not in node:
            continue
        origin, kind = node["origin"], node["class"].rpartition(".")[2]
        what = f"layer {origin!r}" if origin else "the network"
        if model is None:
            raise ValueError(
                f"model must be given: the file contains no code, and {what} is a {kind}; pass a network like the one "
                "that was converted"
            )
        found = there.get(origin)
        if found is None or type(found).__name__ != kind:
            got = "missing" if found is None else f"a {type(found).__name__}"
            own = type(plain(model)).__name__
            raise ValueError(f"model does not fit the file: {what} is a {kind} in the file and {got} in model ({own})")
        if _hooks(found) != node["hooks"]:
            raise ValueError(
                f"model does not fit the file: {what} ({kind}) has {node['hooks']} forward hooks in the file and "
                f"{_hooks(found)} in model"
            )
        for registry in ("parameters", "buffers"):
            missing = getattr(found, f"_{registry}").keys() - node[registry].keys()
            if missing:
                raise ValueError(
                    f"model does not fit the file: {what} ({kind}) has a tensor {min(missing)!r} in model only"
                )


def _check_matches(nodes: list[Node], there: Mapping[str, nn.Module]) -> None:
    """Check that a given network matches a file that can be loaded without one."""
    notes = nodes[0]["settings"].get("notes", {}).get("dict", {})
    at: dict[str, list[Node]] = {}
    for node in nodes:
        at.setdefault(str(node["place"]), []).append(node)
    for place, those in at.items():
        if place not in there and any(map(_has_weights, those)):
            raise ValueError(f"model does not fit the file: layer {place!r} of the file is missing in model")
    for place, module in there.items():
        if any(p is not None for p in module._parameters.values()):
            _check_layer_matches(place, module, at.get(place, []), noted=place in notes)


def _has_weights(node: Node) -> bool:
    """Return whether a node is a layer of the user's network, converted or not, and no addition of a method."""
    names = node.get("parameters", {})
    return "weight" in names or (bool(names) and not _is_of_library(node))


def _is_of_library(node: Node) -> bool:
    return str(node["class"]).startswith("multitudes.")


def _check_layer_matches(place: str, module: nn.Module, nodes: list[Node], noted: bool) -> None:
    """Check a layer of the given network: it is in the file, with its class and settings unless it was converted."""
    kind = type(module).__name__
    same = [node for node in nodes if node["class"] == _name_of(type(module))]
    if not same and not any(map(_is_of_library, nodes)):
        got = f"a {nodes[0]['class'].rpartition('.')[2]}" if nodes else "missing"
        raise ValueError(f"model does not fit the file: layer {place!r} is {got} in the file and a {kind} in model")
    settings = _settings(module, place, place, {}, set())["settings"]
    for key, want in (same[0]["settings"] if same and not noted else {}).items():
        if key in settings and key != "training" and settings[key] != want:
            raise ValueError(
                f"model does not fit the file: layer {place!r} ({kind}) has {key} = {want} in the file and "
                f"{settings[key]} in model"
            )


def _modules(
    nodes: list[Node], parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: nn.Module | None
) -> list[Any]:
    """Create a module per node: an empty one of its class, or a copy of the user's module."""
    modules: dict[int, nn.Module] = {
        number: _empty_module(node["class"]) for number, node in enumerate(nodes) if "origin" not in node
    }
    if model is not None:
        there = dict(plain(model).named_modules(remove_duplicate=False))
        for member in dict.fromkeys(node["member"] for node in nodes):
            own = [number for number, node in enumerate(nodes) if node["member"] == member]
            modules |= _copies(own, nodes, modules, there, {"parameters": parameters, "buffers": tensors})
    return [modules[number] for number in range(len(nodes))]


def _copies(
    numbers: list[int],
    nodes: list[Node],
    bare: Mapping[int, nn.Module],
    there: Mapping[str, nn.Module],
    saved: Mapping[str, Mapping[str, Tensor]],
) -> dict[int, nn.Module]:
    """Copy the user's own modules of one member together, which preserves references between them."""
    memo: dict[int, Any] = {}
    for number in numbers:
        counterpart = there.get(nodes[number]["place"])
        if number in bare and counterpart is not None and "shares" not in nodes[number]:
            memo.setdefault(id(counterpart), bare[number])
    own = {number: there[nodes[number]["origin"]] for number in numbers if "origin" in nodes[number]}
    for number, module in own.items():
        memo.pop(id(module), None)
        for registry, tensors in saved.items():
            for name, tensor in getattr(module, f"_{registry}").items():
                key = nodes[number][registry][name]
                if tensor is not None and key is not None:
                    memo[id(tensor)] = tensors[key]
    copies = dict(zip(own, copied(nn.ModuleList(own.values()), memo), strict=True))
    for module in copies.values():
        for hook in lazy_hooks(module._forward_hooks):
            del module._forward_hooks[hook]
        for key in HF_CACHES:
            vars(module).pop(key, None)
    return copies


def _empty_module(name: str) -> nn.Module:
    kind = _class_named(name)
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module


def _check_members(module: nn.Module) -> None:
    """Check the number of members, since a file may come from a stranger."""
    members = vars(module).get("members", 1)
    if isinstance(module, Multitude) and (type(members) is not int or not 1 <= members <= MAX_MEMBERS):
        raise ValueError(f"the file is damaged: members must be 1 to {MAX_MEMBERS}, got {members!r}")


def _refill(registry: dict[str, Any], items: Mapping[str, Any]) -> None:
    """Replace the items in place, because other modules share the registry."""
    registry.clear()
    registry.update(items)


def _decode(value: Any, modules: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decode(v, modules) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "module":
        return modules[inside]
    if kind == "tuple":
        return tuple(_decode(v, modules) for v in inside)
    return {key: _decode(v, modules) for key, v in inside.items()}


def _decode_function(node: Node) -> Callable[..., Tensor]:
    _library_module(node["function"].rpartition(".")[0])  # importing the module registers the function
    function = DIVERGENCES.get(node["function"])
    if function is None:
        raise ValueError(f"the file names {node['function']!r}, which is not a divergence of this library")
    return partial(function, **node["keywords"]) if node["keywords"] else function


# -- classes -----------------------------------------------------------------------------------------------


def _name_of(kind: type[nn.Module]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of_library(kind: type[nn.Module]) -> bool:
    return kind.__module__.startswith("multitudes.")


def _is_known(kind: type[nn.Module]) -> bool:
    """Return whether a class belongs to torch or this library and can be found by its name."""
    return (_of_library(kind) or kind.__module__.startswith("torch.nn.modules.")) and "." not in kind.__qualname__


def _class_named(name: str) -> type[nn.Module]:
    module, _, own = name.rpartition(".")
    kind = getattr(_library_module(module), own, None)
    if isinstance(kind, type) and issubclass(kind, nn.Module) and _is_known(kind):
        return kind
    raise ValueError(
        f"the file names {name!r}, which is not a layer of torch or of this library: was it saved by a later version?"
    )


def _library_module(name: str) -> ModuleType | None:
    """Import a module of torch's layers or of this library; return None for any other."""
    if not name.startswith(("multitudes.", "torch.nn.modules.")) or "__" in name:  # __main__ is not a library module
        return None
    with suppress(ImportError):
        return importlib.import_module(name)
    return None
