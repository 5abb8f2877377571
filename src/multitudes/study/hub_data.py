"""What a Hugging Face model decides of a study: how its data are read, how it is trained, what its jobs are told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitudes.data import Data
from multitudes.data.features import Pixels
from multitudes.data.images import find_images
from multitudes.data.sources import open_source
from multitudes.data.texts import LONGEST, TextEncoder, read_tokenizer
from multitudes.study.hub_models import HubModel, is_hub
from multitudes.study.spec import Spec

__all__ = ["check_tokens", "described", "hub_model", "misfit", "reading_options", "resolved", "what_inputs_are"]


def hub_model(spec: Spec) -> HubModel | None:
    """The model of a specification, where it is one of Hugging Face."""
    name = spec.model.name
    if name is None or not is_hub(name):
        return None
    try:
        return HubModel.read(name)
    except ValueError as error:
        raise spec.error([(("model", "name"), str(error))]) from error


# -- data --------------------------------------------------------------------------------------------------


def reading_options(spec: Spec, hub: HubModel | None) -> dict[str, Any]:
    """The arguments of `load`: those of the specification, and what the model says where they do not."""
    options = spec.data.model_dump()
    options["size"] = None if options["size"] is None else tuple(options["size"])
    if hub is None or spec.data.source == "digits" or Path(spec.data.source).suffix.lower() == ".mtdata":
        return options
    if hub.kind == "text":
        longest = options["max_length"]
        if longest is not None and hub.longest is not None and longest > hub.longest:
            most = f"the tokens that {hub.name} takes, got {longest}"
            raise spec.error([(("data", "max_length"), f"max_length must be {hub.longest} at most, {most}")])
        options["tokenizer"] = options["tokenizer"] or str(hub.folder)
        options["max_length"] = longest or min(LONGEST, hub.longest or LONGEST)
    else:
        options["size"] = options["size"] or hub.size
        options["pixels"] = hub.pixels
    return options


def misfit(spec: Spec, hub: HubModel, error: ValueError) -> str:
    """Why data could not be read, where that is since the model is for another kind of data; empty elsewhere."""
    name = spec.data.source
    if hub.kind == "text" and str(error).startswith("tokenizer= is "):
        return f"model {hub.name!r} is for texts, and {name} holds images"
    if hub.kind == "image":
        try:
            found = find_images(open_source(name, spec.data.split), spec.data.image)
        except ValueError:
            return ""
        return "" if found else f"model {hub.name!r} is for images, and {name} holds none"
    return ""


def check_tokens(hub: HubModel, data: Data) -> None:
    """That prepared texts have the tokens that a trained model was trained with."""
    encoder = data.encoder
    if not isinstance(encoder, TextEncoder) or hub.kind != "text" or not hub.pretrained:
        return
    if read_tokenizer(hub.folder, encoder.text.longest).tokenizer != encoder.text.tokenizer:
        raise ValueError(
            f"source was prepared with another tokenizer than that of {hub.name}: prepare it with this one"
        )


def what_inputs_are(data: Data) -> dict[str, Any]:
    """What `data.json` says of texts, and of images that are seen as a trained model saw its own."""
    encoder = data.encoder
    if isinstance(encoder, TextEncoder):
        text = encoder.text
        told = {"column": text.column, "tokens": text.longest, "padding": text.empty}
        return {"text": {**told, "vocabulary": encoder.vocabulary, "lengths": _lengths(data), "examples": _short(data)}}
    pixels = next((each for each in encoder.features if isinstance(each, Pixels)), None)
    return {} if pixels is None else {"pixels": {"mean": list(pixels.mean), "std": list(pixels.std)}}


def _short(data: Data, count: int = 4) -> list[list[int]]:
    """The tokens of the shortest training texts, of as many columns as the longest of them has."""
    lengths = (data.train.x >= 0).sum(1)
    rows = lengths.argsort(stable=True)[:count]
    found: list[list[int]] = data.train.x[rows, : int(lengths[rows].max())].tolist()
    return found


def _lengths(data: Data) -> dict[str, float]:
    """How many tokens the training texts have: the least, the middle and the most."""
    lengths = (data.train.x >= 0).sum(1)
    return {"least": int(lengths.min()), "median": int(lengths.median()), "most": int(lengths.max())}


# -- networks ----------------------------------------------------------------------------------------------


def resolved(spec: Spec, about: Mapping[str, Any], hub: HubModel | None) -> Spec:
    """With every default filled in, for data that `about` describes."""
    pretrained = None if hub is None else hub.pretrained
    return spec.resolved(tuple(about["shape"]), about["task"], about["parts"]["train"], about.get("kind"), pretrained)


def described(spec: Spec, about: Mapping[str, Any], hub: HubModel) -> dict[str, Any]:
    """All that a job needs to build the model; a sentence where it does not fit the data."""
    text = about.get("text") or {}
    many = hub.config.get("vocab_size")
    fault = ""
    if about["kind"] != hub.kind:
        fault = f"model {hub.name!r} is for {hub.kind}s, and {about['name']} is of kind {about['kind']}"
    elif isinstance(many, int) and text.get("vocabulary", 0) > many:
        fault = f"model {hub.name!r} knows {many} tokens, and the tokenizer has {text['vocabulary']}"
    elif hub.longest is not None and text.get("tokens", 0) > hub.longest:
        fault = f"model {hub.name!r} takes {hub.longest} tokens, and the texts have up to {text['tokens']}"
    if not fault:
        try:
            return hub.plain(spec.model.settings, text.get("padding"))
        except ValueError as error:
            fault = str(error)
    raise spec.error([(("model", "name"), fault)])
