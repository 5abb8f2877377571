"""Adapters in PEFT's format: one folder each, with `adapter_model.safetensors` and `adapter_config.json`.

The tensors are named `base_model.model.LAYER.lora_A.weight [r, I]` and `...lora_B.weight [O, r]`. Output layers are
saved whole, as `base_model.model.HEAD.weight`. Reading never runs code from a file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import needed
from multitudes.base.sealed_files import replacing, write_atomically
from multitudes.methods.lora.layers import Lora, widths_of
from multitudes.surgery.affine import affine_layers, kind_of, maps_of, weight_of
from multitudes.surgery.own_layers import Own, OwnBlock
from multitudes.surgery.select import CONVOLUTIONS

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""Suffix of a Hugging Face class name -> PEFT's task type."""

UNKNOWN = (
    *("use_dora", "use_qalora", "use_bdlora", "lora_bias", "layer_replication", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config", "velora_config", "target_parameters"),
    *("trainable_token_indices", "megatron_config"),
)
"""PEFT settings that change what an adapter computes and are not supported."""


@dataclass(frozen=True)
class LayerAdapter:
    """Adapter of one layer: `A [r, I]`, `B [O, r]`, and the factor of their product."""

    A: Tensor
    B: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return len(self.A)


@dataclass(frozen=True)
class Adapter:
    """Content of a folder: adapters and output layers' tensors by layer name."""

    layers: dict[str, LayerAdapter] = field(default_factory=dict)
    heads: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    dropout: float = 0.0


# -- writing -----------------------------------------------------------------------------------------------


def write_adapters(network: nn.Module, members: int, folder: Path) -> list[Path]:
    """Write a folder for each member, `member-0` and so on. Return the folders."""
    loras = {name: layer for name, layer in network.named_modules() if isinstance(layer, Lora)}
    heads = {name: layer for name, layer in network.named_modules() if isinstance(layer, (Own, OwnBlock))}
    for name, layer in network.named_modules():
        grouped = isinstance(layer, Lora) and int(getattr(layer.layer, "groups", 1)) > 1
        if (isinstance(layer, Lora) and layer.several) or grouped:
            kind = type(layer.layer).__name__
            raise ValueError(f"PEFT's format does not support an adapter of layer {name!r} ({kind}): use mt.save")
    for other in folder.glob("member-*") if folder.is_dir() else ():
        if other.name not in {f"member-{index}" for index in range(members)}:
            raise ValueError(
                f"folder {str(folder)!r} contains {other.name!r}, but there are only {members} members: pass another "
                "folder"
            )
    folders = [folder / f"member-{index}" for index in range(members)]
    save = needed("safetensors.torch", "safetensors", "save_adapters").save_file
    for index, own in enumerate(folders):
        own.mkdir(parents=True, exist_ok=True)
        tensors = _tensors(loras, heads, index)
        with replacing(own / TENSORS) as unfinished:
            save(tensors, unfinished, metadata={"format": "pt"})
        config = _config(network, loras, list(heads), index)
        write_atomically(own / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
    return folders


def _tensors(loras: Mapping[str, Lora], heads: Mapping[str, Own | OwnBlock], index: int) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, layer in loras.items():
        rank = layer.ranks[index]
        if not rank:
            continue
        A, B = layer.A[index, :rank], layer.B[index, :, :rank]
        if kind_of(layer.layer) in CONVOLUTIONS:
            kernel = weight_of(layer.layer).shape[1:]
            A, B = A.reshape(rank, *kernel), B.reshape(*B.shape, *[1] * (len(kernel) - 1))
        tensors |= {f"{PREFIX}{name}.lora_A.weight": A, f"{PREFIX}{name}.lora_B.weight": B}
    for name, head in heads.items():
        tensors |= {f"{PREFIX}{name}.{own}": tensor for own, tensor in head.fold(index).state_dict().items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _config(network: nn.Module, loras: Mapping[str, Lora], heads: list[str], index: int) -> dict[str, Any]:
    own = {name: layer for name, layer in loras.items() if layer.ranks[index]}
    ranks = {name: layer.ranks[index] for name, layer in own.items()}
    alphas = {name: _whole(layer.scales[index] * layer.ranks[index]) for name, layer in own.items()}
    rank, alpha = (max(values, key=list(values).count) for values in (ranks.values(), alphas.values()))
    kind = type(network).__name__
    task = next((name for ending, name in TASKS.items() if kind.endswith(ending)), None)
    source = getattr(getattr(network, "config", None), "_name_or_path", None)
    return {
        "alpha_pattern": {name: value for name, value in alphas.items() if value != alpha},
        "auto_mapping": None if task else {"base_model_class": kind, "parent_library": type(network).__module__},
        "base_model_name_or_path": source or None,
        "bias": "none",
        "fan_in_fan_out": any(layer.affine_maps()[0].inputs == 0 for layer in own.values()),
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": next(iter(own.values())).dropout,
        "modules_to_save": heads or None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": {name: value for name, value in ranks.items() if value != rank},
        "revision": None,
        "target_modules": _targets(network, list(own)),
        "task_type": task,
        "use_dora": False,
        "use_rslora": False,
    }


def _whole(value: float) -> float:
    return round(value) if abs(value - round(value)) < 1e-9 else value


def _targets(network: nn.Module, names: Collection[str]) -> list[str] | str:
    """Return the last parts of the layers' names if no other module matches them, else a regex of the full names."""
    lasts = sorted({name.rpartition(".")[2] for name in names})
    inside = {
        id(m) for layer in network.modules() if isinstance(layer, Lora) for m in layer.modules() if m is not layer
    }
    others = [name for name, module in network.named_modules() if id(module) not in inside]
    matched = {name for name in others if name.rpartition(".")[2] in lasts}
    return lasts if matched == set(names) else "|".join(map(re.escape, names))


# -- reading -----------------------------------------------------------------------------------------------


def read_adapter(folder: Path, network: nn.Module) -> Adapter:
    """Read an adapter that PEFT wrote for this network."""
    able = affine_layers(network)
    wrong = f"adapters: {str(folder)!r}"
    config = _config_of(folder, wrong)
    load = needed("safetensors.torch", "safetensors", "reading adapters").load_file
    try:
        tensors = load(folder / TENSORS)
    except Exception as error:  # any error of the reader on a broken file
        raise ValueError(f"{wrong}: {TENSORS} cannot be read ({str(error).splitlines()[0]})") from error
    parts: dict[str, dict[str, Tensor]] = {}
    heads: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.(?:default\.)?weight", key)
        if match:
            parts.setdefault(match[1], {})[match[2]] = tensor
            continue
        head = _head_of(key, config.get("modules_to_save") or [], network)
        if head is None:
            raise ValueError(f"{wrong}: tensor {key!r} belongs neither to an adapter nor to a layer in modules_to_save")
        heads.setdefault(head[0], {})[head[1]] = tensor
    layers = {name: _layer_adapter(name, own, config, able, wrong) for name, own in parts.items()}
    if not layers:
        raise ValueError(f"{wrong}: {TENSORS} contains no adapter")
    for name, own in heads.items():
        want = {key: list(tensor.shape) for key, tensor in network.get_submodule(name).state_dict().items()}
        if want != (got := {key: list(tensor.shape) for key, tensor in own.items()}):
            raise ValueError(f"{wrong}: layer {name!r} has tensors {got}, but {want} in the model")
    return Adapter(layers, heads, float(config.get("lora_dropout") or 0.0))


def _config_of(folder: Path, wrong: str) -> dict[str, Any]:
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ValueError(f"{wrong} must be a folder written by PEFT, but it contains no {name}")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{wrong}: {CONFIG} is not JSON ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise ValueError(f"{wrong}: peft_type must be 'LORA', got {kind!r}")
    for name in UNKNOWN:
        if config.get(name):
            raise ValueError(f"{wrong}: {name}={config[name]!r} is not supported")
    if config.get("bias", "none") != "none":
        raise ValueError(f"{wrong}: bias={config['bias']!r} is not supported, since members share the model's biases")
    return config


def _layer_adapter(
    name: str, own: Mapping[str, Tensor], config: Any, able: Mapping[str, nn.Module], wrong: str
) -> LayerAdapter:
    if name not in able or len(maps_of(able[name])) != 1:
        raise ValueError(f"{wrong} adapts layer {name!r}, but the model has no layer of this name that can be adapted")
    if own.keys() != {"A", "B"}:
        raise ValueError(f"{wrong} contains only lora_{next(iter(own))} of layer {name!r}")
    layer = able[name]
    (affine,) = maps_of(layer)
    inputs, outputs = widths_of(weight_of(layer), affine)
    A, B = own["A"].flatten(1), own["B"].flatten(1)
    if A.shape[1] != inputs or B.shape[0] != outputs or B.shape[1] != len(A):
        raise ValueError(
            f"{wrong}: the adapter of layer {name!r} has shapes {list(own['A'].shape)} and {list(own['B'].shape)}, but "
            f"the layer has {inputs} inputs and {outputs} outputs"
        )
    patterns = (config.get("alpha_pattern") or {}).items()
    matching = (value for key, value in patterns if re.match(rf"(.*\.)?({key})$", name))
    alpha = next(matching, config.get("lora_alpha"))  # PEFT uses the first match
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ValueError(f"{wrong}: lora_alpha must be a number, got {alpha!r}")
    return LayerAdapter(A, B, alpha / (math.sqrt(len(A)) if config.get("use_rslora") else len(A)))


def _head_of(key: str, saved: Collection[str], network: nn.Module) -> tuple[str, str] | None:
    """Return the saved module and the name of its tensor, for a tensor name in the file."""
    name = key.removeprefix(PREFIX)
    for path, _ in network.named_modules():
        if any(path == own or path.endswith(f".{own}") for own in saved) and name.startswith(f"{path}."):
            return path, name.removeprefix(f"{path}.").removeprefix("modules_to_save.default.")
    return None


@torch.no_grad()
def load_adapters(network: nn.Module, adapters: Sequence[Adapter]) -> None:
    """Set the adapters of a network's members in place; members without one for a layer get zeros."""
    for name, layer in network.named_modules():
        if isinstance(layer, Lora):
            _load(layer, [adapter.layers.get(name) for adapter in adapters])
        elif isinstance(layer, (Own, OwnBlock)):
            for index, adapter in enumerate(adapters):
                for key, tensor in adapter.heads.get(name, {}).items():
                    layer.stack_of(key)[index].copy_(tensor)


def _load(layer: Lora, adapters: Sequence[LayerAdapter | None]) -> None:
    layer.A.zero_()
    layer.B.zero_()
    for index, adapter in enumerate(adapters):
        rank = 0 if adapter is None else adapter.rank
        layer.ranks[index], layer.scales[index] = rank, 1.0 if adapter is None else adapter.scale
        if adapter is not None:
            layer.A[index, :rank].copy_(adapter.A)
            layer.B[index, :, :rank].copy_(adapter.B)
