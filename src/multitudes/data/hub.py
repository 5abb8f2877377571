"""Hugging Face models on this machine: a folder, or a name in the hub's local cache. Nothing is ever downloaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multitudes.core.checks import needed

__all__ = ["local_place", "quiet"]


def local_place(name: str, argument: str) -> Path:
    """The folder, or the file in one, that a name stands for: a path, or a name in the hub's local cache.

    >>> local_place("./nowhere", "tokenizer")
    Traceback (most recent call last):
    ValueError: tokenizer './nowhere' does not exist: it must be a folder, or a name in Hugging Face's local cache
    """
    path = Path(name).expanduser()
    if path.exists():
        return path.resolve()
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        must = "it must be a folder, or a name in Hugging Face's local cache"
        raise ValueError(f"{argument} {name!r} does not exist: {must}")
    hub = needed("huggingface_hub", "huggingface", f"the model {name!r}")
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        found = hub.try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found).parent
    raise ValueError(
        f"{argument} {name!r} is no folder and not in the local cache of Hugging Face: nothing is downloaded here, "
        f"`hf download {name}` fetches it"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress and no warnings."""
    logging = needed("transformers.utils.logging", "huggingface", "a Hugging Face model")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
