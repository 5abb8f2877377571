"""Turn texts into token ids, with a Hugging Face tokenizer that is saved with the data.

An input is int32 `[T]`: the token ids of a text, padded with -1. T is the maximum number of tokens; batches are cut to
their longest text (`CutToLongest`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.checks import check_count, needed, plural
from multitudes.lab.data.sources import Source
from multitudes.lab.data.tables.column_types import ColumnReading
from multitudes.lab.data.tables.columns import Column, Encoded
from multitudes.lab.data.tables.features import Feature, Text
from multitudes.lab.data.tables.table import LABELS, LoadOptions

LONGEST = 256
"""Default maximum number of tokens per text."""
PADDING = -1
"""Padding after the end of a text; no token has this id."""
MULTIPLE = 8
"""Batches are cut to a multiple of this many tokens, to limit the number of distinct lengths."""
FILES = ("tokenizer.json", "vocab.*", "*.model", "*.spm", "*.tiktoken", "tekken.json")
"""Files that contain a vocabulary."""
AT_ONCE = 4096
"""Texts tokenized at a time: the library's results take far more memory than the token ids."""


@dataclass(frozen=True)
class TextEncoder:
    """Encode a column of texts as token ids."""

    text: Text
    reading: Sequence[ColumnReading] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def fitted(cls, columns: Mapping[str, Column], rows: Tensor, options: LoadOptions) -> TextEncoder:
        """Make an encoder with the chosen tokenizer; nothing is fitted to the training rows."""
        ((name, column),) = columns.items()
        assert options.tokenizer is not None  # checked by `load`
        text = read_tokenizer(options.tokenizer, options.max_length or LONGEST)
        counts = Counter(value for value in column.values if value is not None)
        twice = sum(count > 1 for count in counts.values())
        note = plural(twice, "repeated text") if twice else ""
        read = ColumnReading(name, "text", len(counts), len(column) - counts.total(), note=note)
        return cls(replace(text, column=name), (read,))

    @property
    def features(self) -> Sequence[Feature]:
        """The column, with its tokenizer."""
        return (self.text,)

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the largest id plus one."""
        return 1 + int(max(self._tokenizer.get_vocab().values(), default=-1))

    def columns(self, source: Source, image: str | None = None) -> dict[str, Column]:
        """Return the text column of a source, which has the same name as in training."""
        name = self.text.column
        column = source.trained_column(name)
        if column.numeric and column.cells:  # an untyped file whose texts look like numbers
            column = Column("text", column.cells)
        if column.kind != "text":
            raise ValueError(f"column {name!r} of {source.name} must hold texts, as in training, got {column.kind}s")
        return {name: column}

    def __call__(
        self, columns: Mapping[str, Column], rows: Tensor, where: Callable[[int], str] | None = None
    ) -> Encoded:
        """Return the token ids of these rows, int32 `[n, T]`, and the texts."""
        (column,) = columns.values()
        texts: list[str] = column.take(rows)
        x, cut = self.tokens(texts)
        note = f"{cut} of {len(texts)} texts are truncated to {self.text.longest} tokens"
        files = tuple(text.encode(errors="replace") for text in texts)
        return Encoded(x, list(range(len(texts))), files=files, notes={self.text.column: note} if cut else {})

    def tokens(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        """Return the token ids of texts, int32 `[n, T]`, and the number of texts that were cut."""
        x = torch.full((len(texts), self.text.longest), PADDING, dtype=torch.int32)
        cut = 0
        for start in range(0, len(texts), AT_ONCE):
            # remove lone surrogates, which tokenizers reject
            some = [text.encode(errors="replace").decode() for text in texts[start : start + AT_ONCE]]
            for row, found in enumerate(self._tokenizer.encode_batch(some), start):
                ids = found.ids or [self.text.empty]
                x[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
                cut += bool(found.overflowing)
        return x, cut

    @cached_property
    def _tokenizer(self) -> Any:
        library = needed("tokenizers", "huggingface", "a text")
        try:
            return library.Tokenizer.from_str(self.text.tokenizer)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"the tokenizer of {self.text.column!r} cannot be read: {error}") from error


def read_tokenizer(place: str | Path, longest: int) -> Text:
    """Read the tokenizer of a Hugging Face folder, or of a name in the hub's local cache, with a maximum length.

    Only files of the `tokenizers` library are used, which contain no code.
    """
    check_count("max_length", longest)
    folder = local_place(str(place), "tokenizer")
    folder = folder.parent if folder.is_file() else folder
    if not any(found for pattern in FILES for found in folder.glob(pattern)):  # transformers would create an empty one
        raise ValueError(f"tokenizer: {str(folder)!r} has no tokenizer.json")
    transformers = needed("transformers", "huggingface", "a tokenizer")
    try:
        with quiet():
            found = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nearly anything if files are missing
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"tokenizer: {str(folder)!r} has no readable tokenizer: {reason}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        kind = type(found).__name__
        raise ValueError(f"tokenizer: {str(folder)!r} must hold a fast tokenizer (tokenizer.json), got a {kind}")
    added = found.num_special_tokens_to_add()
    if longest <= added:
        raise ValueError(f"max_length must be above {added}, the number of special tokens, got {longest}")
    copy = needed("tokenizers", "huggingface", "a text").Tokenizer.from_str(backend.to_str())
    copy.no_padding()
    copy.enable_truncation(longest)
    special = [found.bos_token_id, found.eos_token_id, found.cls_token_id, found.pad_token_id, found.unk_token_id]
    empty = next((number for number in special if number is not None), None)
    if empty is None:
        raise ValueError(f"tokenizer: {str(folder)!r} must have a token for the beginning, end or padding, got none")
    return Text("", copy.to_str(), longest, empty)


def find_texts(source: Source, options: LoadOptions, target: str | None) -> list[str] | None:
    """Return the text column: the given, only or typically named one; None if texts are not requested."""
    if options.text is None and options.tokenizer is None:
        return None
    if options.text is not None and options.text == target:
        raise ValueError(f"text must not name the target {target!r}")
    found = source.one_of_kind("text", options.text, ("text", "sentence"), (target,) if target else LABELS)
    if not found:
        has = ", ".join(source.columns)
        raise ValueError(f"text= must be a column of texts, and {source.name} has none: its columns are {has}")
    return found


class CutToLongest(nn.Module):
    """Cut token ids `[B, T]` to the longest text of the batch, rounded up to a multiple of `MULTIPLE`.

    >>> CutToLongest()(torch.tensor([[5, 6, *[-1] * 30], [7, *[-1] * 31]])).shape
    torch.Size([2, 8])
    """

    def forward(self, x: Tensor) -> Tensor:
        longest = int((x >= 0).sum(1).max()) if len(x) else 0
        return x[:, : max(MULTIPLE, -(-longest // MULTIPLE) * MULTIPLE)]


# -- local Hugging Face models; nothing is ever downloaded ------------------------------------------------


def local_place(name: str, argument: str) -> Path:
    """Return the folder or file of a name: a path, or a name in the hub's local cache.

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
        f"{argument} {name!r} is neither a folder nor in Hugging Face's local cache; `hf download {name}` fetches it"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and warnings of transformers inside the context."""
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
