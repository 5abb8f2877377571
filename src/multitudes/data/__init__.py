"""Data to compare methods on: read from anywhere, prepared in one file, batched on the device.

    from multitudes import data

    digits = data.load("digits")
    loader = data.Loader(digits.train, digits, batch_size=64)

In the order of their use: `sources` reads files, folders and ids into `columns`; `kinds` has all that depends on what
the inputs are, with the encoders of `images` and `tables`; `reading` decides how the columns of a table become
`features`, with the help of `parsing`; `splits` draws the parts; `assemble` makes `types.Data` of
them, which normalises; `prepared` keeps it in a file, with its encoder; `loader` makes batches.

Imports `core`. A new kind of data is a row of `kinds.KINDS`; a new format, a reader in `sources`; a new way
to read a column, a class of `features`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.core.lazy import lazy_names

if TYPE_CHECKING:  # as below, for those who read types
    from multitudes.data.assemble import load
    from multitudes.data.loader import Loader
    from multitudes.data.prepared import read, save
    from multitudes.data.types import Data, Part

__all__ = ["Data", "Loader", "Part", "load", "read", "save"]

HOMES = {"assemble": "load", "loader": "Loader", "prepared": "read save", "types": "Data Part"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
