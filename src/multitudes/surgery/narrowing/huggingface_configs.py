"""Narrow Hugging Face's models by their configurations, with whole heads of unchanged size.

The model's own class builds the narrower model from a narrowed copy of its configuration. The channels that it keeps
are observed, as for any network (`nan_watch.py`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from multitudes.networks.seeds import seeded
from multitudes.surgery.initialize import is_hugging_face
from multitudes.surgery.narrowing.cuts import CannotNarrow, scaled

_WIDTHS = (
    "intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner",
    "moe_intermediate_size", "shared_expert_intermediate_size", "embedding_size", "decoder_hidden_size",
    "neck_hidden_sizes", "aspp_out_channels", "word_embed_proj_dim", "pooler_output_size", "pooler_hidden_size",
    "classifier_proj_size", "min_depth", "depth_divisible_by", "depth_divisor",
)  # fmt: skip
"""The names of widths in configurations that do not depend on heads."""


def narrowed_config(config: Any, factor: float) -> Any:
    """Copy a configuration with its widths scaled by `factor`, rounded up to whole heads of unchanged size."""
    small = copy.deepcopy(config)
    for name, value in vars(config).items():
        if hasattr(value, "attribute_map") and hasattr(value, "to_dict"):
            setattr(small, name, narrowed_config(value, factor))
    follows = _narrow_heads(config, small, factor)
    for name in _WIDTHS:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)):
            setattr(small, name, type(value)(follows.get(each, scaled(each, factor)) for each in value))
        elif isinstance(value, int) and not isinstance(value, bool):
            setattr(small, name, follows.get(value, scaled(value, factor)))
    if isinstance(getattr(config, "depth_multiplier", None), (int, float)):
        _narrow_depths(config, small, factor)
    if isinstance(getattr(config, "width_coefficient", None), (int, float)):  # EfficientNet
        small.width_coefficient = config.width_coefficient * factor
    return small


def _narrow_heads(config: Any, small: Any, factor: float) -> dict[int, int]:
    """Set widths made of heads, one or one per stage, and the numbers of heads; return the new numbers."""
    heads, shared, size, first = (
        getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "embed_dim")
    )
    if isinstance(heads, (list, tuple)) and isinstance(first, int):
        return _narrow_stages(config, small, factor, list(heads), first)
    several = isinstance(getattr(config, "hidden_sizes", None), (list, tuple))
    widths: list[Any] = list(config.hidden_sizes) if several else [getattr(config, "hidden_size", None)]
    counts: list[Any] = list(heads) if isinstance(heads, (list, tuple)) else [heads] * len(widths)
    if not all(isinstance(width, int) for width in widths):
        return {}
    narrow = [scaled(width, factor) for width in widths]
    if len(counts) == len(widths) and all(isinstance(count, int) for count in counts):
        kept = []
        for stage, (width, count) in enumerate(zip(widths, counts, strict=True)):
            groups = scaled(shared or count, factor)
            kept.append(math.ceil(scaled(count, factor) / groups) * groups)
            if width == count * (size or width // count):
                narrow[stage] = width // count * kept[-1]
        small.num_attention_heads = type(heads)(kept) if isinstance(heads, (list, tuple)) else kept[0]
        if isinstance(shared, int):
            small.num_key_value_heads = groups
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        if isinstance(other := getattr(config, name, None), int):
            setattr(small, name, narrow[0] * other // widths[0])
    if several:
        small.hidden_sizes = type(config.hidden_sizes)(narrow)
    else:
        small.hidden_size = narrow[0]
    return dict(zip(widths, narrow, strict=True))


def _narrow_stages(config: Any, small: Any, factor: float, heads: list[int], first: int) -> dict[int, int]:
    """Narrow stages of doubling width, as in Swin: the smallest first width with whole heads."""
    sizes = [first * 2**stage // count for stage, count in enumerate(heads)]
    step = math.lcm(*[size // math.gcd(size, 2**stage) for stage, size in enumerate(sizes)])
    narrow = math.ceil(scaled(first, factor) / step) * step
    small.embed_dim = narrow
    kept = [narrow * 2**stage // size for stage, size in enumerate(sizes)]
    small.num_attention_heads = type(config.num_attention_heads)(kept)
    if isinstance(getattr(config, "hidden_size", None), int):
        small.hidden_size = narrow * config.hidden_size // first
    return {first * 2**stage: narrow * 2**stage for stage in range(len(heads))}


def _narrow_depths(config: Any, small: Any, factor: float) -> None:
    """Narrow MobileNets by their factor of all widths. The last layer may be excluded for factors below one."""
    small.depth_multiplier = config.depth_multiplier * factor
    if getattr(config, "finegrained_output", False):
        whole = 1.0 if config.depth_multiplier < 1 else config.depth_multiplier
        left_out, taken = (abs(math.log(share / (whole * factor))) for share in (1.0, small.depth_multiplier))
        small.finegrained_output = left_out < taken and small.depth_multiplier < 1


# -- models ------------------------------------------------------------------------------------------------


def narrower_models(model: nn.Module, factor: float, name: str = "") -> dict[str, nn.Module]:
    """Build narrower versions of the Hugging Face models in a network, by name, with new random weights.

    Frozen models are skipped, partly frozen ones refused. If a configuration does not build its model, for example
    because an output layer was replaced, its parts are narrowed instead.
    """
    if factor == 1:
        return {}
    if is_hugging_face(model):
        trained: Any = {p.requires_grad for p in model.parameters()}
        if trained == {False}:
            return {}
        built = _built(model, narrowed_config(model.config, factor))
        if built is not None and False in trained:
            frozen = next(own for own, p in model.named_parameters() if not p.requires_grad)
            raise CannotNarrow(
                f"model {f'{name!r} ' if name else ''}({type(model).__name__}) has frozen parameters, such as "
                f"{frozen!r}, but its configuration narrows all its layers: unfreeze them"
            )
        if built is not None:
            return {name: built}
    parts = [narrower_models(child, factor, f"{name}.{own}".strip(".")) for own, child in model.named_children()]
    return {own: built for part in parts for own, built in part.items()}


def _built(module: Any, config: Any) -> Any:
    """Build a model of the same class from another configuration; None if its structure differs or it is as large."""
    parameters = inspect.signature(type(module).__init__).parameters.values()
    switches = [p for p in parameters if isinstance(p.default, bool)]  # such as the pooling layer of a part of a model
    for given in ({}, *({p.name: not p.default} for p in switches)):
        with seeded(0):
            try:
                built = type(module)(copy.deepcopy(config), **given)
            except Exception:  # a model may raise anything for a configuration
                return None
        if _structure(built) == _structure(module):
            break
    else:
        return None
    if sum(p.numel() for p in built.parameters()) >= sum(p.numel() for p in module.parameters()):
        return None
    built.to(next(module.parameters()).device)
    for one, other in zip(built.parameters(), module.parameters(), strict=True):
        one.data = one.data.to(other)
    return built


def _structure(network: nn.Module) -> list[Any]:
    modules = [(name, type(module)) for name, module in network.named_modules()]
    return [*modules, *[name for name, _ in network.named_parameters()]]


def follow_configs(narrowed: nn.Module, built: Mapping[str, nn.Module], own: Collection[str]) -> None:
    """Give narrowed Hugging Face models the configurations, sizes and computed buffers of the built ones.

    Layers in `own` do not have the configuration's widths.
    """
    for name, network in built.items():
        cut: Any = narrowed.get_submodule(name)
        before, after = cut.config, copy.deepcopy(network.config)
        for each, other in network.named_modules():
            module: Any = cut.get_submodule(each)
            if type(module) is type(other) and f"{name}.{each}".strip(".") not in own:  # differs if it is grouped
                _take_sizes(f"{type(cut).__name__} of its configuration", each, module, other)
        for module in narrowed.modules():
            held = [key for key, value in vars(module).items() if value is before]
            for key in held:
                setattr(module, key, after)


def _take_sizes(model: str, name: str, module: nn.Module, other: nn.Module) -> None:
    """Copy the numbers, and the buffers computed from a configuration, from a narrower module."""
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.shape != (expected := other.get_parameter(key).shape):
            raise CannotNarrow(
                f"{f'{name}.{key}'!r} is {list(expected)} in the narrower {model}, but {list(parameter.shape)} by the "
                "observed channels"
            )
    torchs = type(module).__module__.startswith("torch.nn")  # keep its other numbers, such as a dropout rate
    for key, value in vars(other).items():
        sized = type(value) in (int, tuple, list) or (type(value) is float and not torchs)
        if sized and not key.startswith("_") and key in vars(module):
            vars(module)[key] = copy.copy(value)
    for key in other._non_persistent_buffers_set:
        module._buffers[key] = None if (buffer := other._buffers[key]) is None else buffer.clone()
