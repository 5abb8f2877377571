"""Hugging Face models as networks of a study: `hf:FOLDER`, `hf:FOLDER/config.json`, or `hf:NAME` in the local cache.

transformers builds the model from its configuration, which is saved with the jobs. Weights are loaded only from
safetensors, since other formats can contain code. Nothing is downloaded and no code from the folder runs. Output layers
are always reinitialised from torch's random state.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from multitudes.base.checks import needed
from multitudes.lab.data.texts import local_place, quiet
from multitudes.models.huggingface import FromTokens
from multitudes.surgery.initialize import reinitialize
from multitudes.surgery.output_layers import output_layers

PREFIX = "hf:"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
"""Weight files that are not loaded."""
AUTO = {"text": "AutoModelForSequenceClassification", "image": "AutoModelForImageClassification"}
MAPPINGS = {
    "text": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
OFFSET = ("roberta", "camembert", "xmod", "longformer", "data2vec-text", "ibert", "mpnet", "esm")
"""Model types whose positions start after the padding index; matched as substrings."""
PIXEL = 1 / 255
UNSAFE_KEYS = ("auto_map", "attn_implementation", "experts_implementation", "use_pretrained_backbone", "use_kernels")
"""Configuration keys that can make transformers load code or weights from the hub."""
STUDY_KEYS = ("id2label", "label2id", "num_labels", "dtype", "torch_dtype", "problem_type", "_name_or_path")
"""Configuration keys set by the study."""


def is_hub(name: str | None) -> bool:
    """Return whether a name refers to a Hugging Face model."""
    return isinstance(name, str) and name.startswith(PREFIX)


@dataclass(frozen=True)
class HubModel:
    """A Hugging Face model: its configuration, and its weight files if any."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]

    @classmethod
    def read(cls, name: str) -> HubModel:
        """Read the model with this name; raise ValueError if it does not exist."""
        place = local_place(name.removeprefix(PREFIX), "model")
        file = place / "config.json" if place.is_dir() else place
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"model {name!r} must have a config.json, but {str(file)!r} cannot be read: {error}"
            ) from error
        if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
            raise ValueError(f"model {name!r} must be a transformers model: its config.json has no model_type")
        if "quantization_config" in config:
            raise ValueError(
                f"model {name!r} is quantized, and quantized weights cannot be trained: use the original ones"
            )
        found = cls(name, file.parent, config, _weights(name, place) if place.is_dir() else ())
        found.kind  # noqa: B018  # fail early if it is not for texts or images
        return found

    @cached_property
    def kind(self) -> str:
        """Kind of data it takes: text or image."""
        auto = needed("transformers.models.auto.modeling_auto", "huggingface", f"the model {self.name!r}")
        known = self.config["model_type"]
        found = [kind for kind, mapping in MAPPINGS.items() if known in getattr(auto, mapping)]
        if not found or known.startswith("timm"):
            code = " with code of its own, which is not executed" if "auto_map" in self.config else ""
            raise ValueError(
                f"model {self.name!r} is a {known}{code}: transformers has no text or image classifier of this type"
            )
        return found[0]

    @property
    def pretrained(self) -> bool:
        """True if it starts from pretrained weights."""
        return bool(self.weights)

    @property
    def longest(self) -> int | None:
        """Maximum tokens per text; None if unlimited."""
        limits = [self.config.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
        limit = next((each for each in limits if isinstance(each, int) and each > 0), None)
        if limit is None:
            return None
        if any(word in self.config["model_type"] for word in OFFSET):
            padding = self.config.get("pad_token_id")
            limit -= 1 + (padding if isinstance(padding, int) else 1)
        return limit

    # -- images ------------------------------------------------------------------------------------------

    @cached_property
    def _preprocessor(self) -> dict[str, Any]:
        """Image preprocessing of the pretrained model; empty if there is none."""
        file = self.folder / "preprocessor_config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if self.pretrained and file.is_file() else {}
        except (OSError, ValueError) as error:
            raise ValueError(f"model {self.name!r}: {str(file)!r} cannot be read: {error}") from error
        return found if isinstance(found, dict) else {}

    @property
    def size(self) -> tuple[int, int] | None:
        """Image height and width, if specified."""
        own = _sides(self.config.get("image_size"))
        return own or _sides(self._preprocessor.get("crop_size")) or _sides(self._preprocessor.get("size"))

    @property
    def pixels(self) -> tuple[list[float], list[float]] | None:
        """Per-channel mean and standard deviation used in pretraining, for pixels in 0 to 1."""
        how = self._preprocessor
        mean, std = how.get("image_mean"), how.get("image_std")
        usual = how.get("do_normalize", True) and abs(how.get("rescale_factor", PIXEL) - PIXEL) < 1e-6
        if not (usual and how.get("do_rescale", True) and isinstance(mean, list) and isinstance(std, list)):
            return None
        return (mean, std) if len(mean) == len(std) == self.config.get("num_channels", len(mean)) else None

    # -- for jobs ----------------------------------------------------------------------------------------

    def plain(self, settings: Mapping[str, Any], padding: int | None) -> dict[str, Any]:
        """Return everything a job needs to build it, as JSON; `padding` is the pad token if the model has none."""
        own = _plain_config(self.config)
        for key, value in settings.items():
            if key not in own:
                raise ValueError(f"model {self.name!r} has no setting {key!r}; its settings are {', '.join(own)}")
            own[key] = value
        number, many = own.get("pad_token_id"), own.get("vocab_size")
        known = type(number) is int and number >= 0 and (type(many) is not int or number < many)
        if padding is not None and not known:
            own["pad_token_id"] = padding
        found: dict[str, Any] = {"name": self.name, "settings": dict(settings), "config": own, "kind": self.kind}
        if self.weights:
            found["weights"] = {"folder": str(self.folder), "sha256": _digest(self.weights)}
        return found


def _plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a configuration recursively, without keys set by the study or keys that could reach the hub."""
    unsafe = {name for key in UNSAFE_KEYS for name in (key, f"_{key}", f"_{key}_internal")}
    return {
        key: _plain_config(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in STUDY_KEYS and key not in unsafe
    }


def _sides(value: Any) -> tuple[int, int] | None:
    if isinstance(value, Mapping):
        value = value.get("shortest_edge") or [value.get("height"), value.get("width")]
    sides = [value, value] if isinstance(value, int) else value
    whole = isinstance(sides, list | tuple) and len(sides) == 2 and all(type(side) is int for side in sides)
    return (sides[0], sides[1]) if whole else None


def _weights(name: str, folder: Path) -> tuple[Path, ...]:
    """Return a folder's weight files, possibly none; raise if they are not in safetensors."""
    if any((folder / file).is_file() for file in WEIGHTS):
        return tuple(sorted(folder.glob("*.safetensors")))
    unread = sorted(path.name for pattern in UNREAD for path in folder.glob(pattern))
    for file in unread:
        if file != "training_args.bin":
            how = "save them as safetensors with model.save_pretrained(FOLDER)"
            raise ValueError(f"model {name!r} has its weights in {file}, a format that can execute code: {how}")
    return ()


def _digest(files: tuple[Path, ...]) -> str:
    """Return a SHA-256 of the weights."""
    stats = [(file, file.stat()) for file in files]
    return _digest_of(tuple((file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in stats))


@cache
def _digest_of(files: tuple[tuple[Path, int, int, int], ...]) -> str:
    """Compute the digest once per process while the files are unchanged: they may be large."""
    whole = hashlib.sha256()
    for file, *_ in files:
        with file.open("rb") as content:
            whole.update(hashlib.file_digest(content, "sha256").digest())
    return whole.hexdigest()


# -- networks ----------------------------------------------------------------------------------------------


def build_hub_model(model: Mapping[str, Any], shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Build the network that `HubModel.plain` describes, in training mode, with its weights if it names any."""
    name, kind, config = model["name"], model["kind"], _plain_config(model["config"])
    transformers = needed("transformers", "huggingface", f"the model {name!r}")
    if kind == "image":
        _check_images(name, config, shape)
    try:
        made = transformers.CONFIG_MAPPING[config["model_type"]].from_dict({**config, "num_labels": outputs})
        made.problem_type, made.use_cache = None, False
        with quiet():
            network = _build(getattr(transformers, AUTO[kind]), made, model.get("weights"), name)
    except (KeyError, TypeError, RuntimeError, AttributeError, ImportError, AssertionError) as error:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ValueError(f"model {name!r} cannot be built from its config.json: {reason}") from error
    network.train()
    return FromTokens(network, int(made.pad_token_id or 0)) if kind == "text" else network


def _build(auto: Any, config: Any, weights: Mapping[str, str] | None, name: str) -> nn.Module:
    plain: nn.Module = auto.from_config(config, trust_remote_code=False)
    if weights is None:
        return plain
    folder = Path(weights["folder"])
    if not folder.is_dir():
        raise ValueError(f"model {name!r}: the folder of its weights, {str(folder)!r}, is not on this machine")
    files = _weights(name, folder)
    if not files or _digest(files) != weights["sha256"]:
        raise ValueError(f"model {name!r}: the weights in {str(folder)!r} were changed since the study was prepared")
    network, loading_info = auto.from_pretrained(
        folder, config=copy.deepcopy(config), local_files_only=True, use_safetensors=True, ignore_mismatched_sizes=True,
        dtype=torch.float32, output_loading_info=True, trust_remote_code=False,
    )  # fmt: skip
    heads = output_layers(network)
    others = [key for key, _ in network.named_parameters() if not any(key.startswith(f"{head}.") for head in heads)]
    missing = [key for key in others if key in set(loading_info["missing_keys"])]
    if 2 * len(missing) > len(others):
        raise ValueError(
            f"model {name!r}: the weights in {str(folder)!r} belong to another network: they lack {missing[0]!r}"
        )
    plain.load_state_dict(network.state_dict())
    return reinitialize(plain, only=heads)


def _check_images(name: str, config: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    channels, *sides = shape
    wanted, size = config.get("num_channels", channels), _sides(config.get("image_size"))
    if wanted != channels or (size is not None and size != tuple(sides)):
        expected = f"{wanted} channels" + (f" and {size[0]} x {size[1]} pixels" if size else "")
        got = f"{channels} x {sides[0]} x {sides[1]}"
        raise ValueError(
            f"model {name!r} is for images of {expected}, got {got}: change its config.json, or size= of data"
        )
