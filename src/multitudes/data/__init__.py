"""Data to compare methods on: read from any source, prepared in one file, batched on the device.

    from multitudes import data

    digits = data.load("digits")
    loader = data.Loader(digits.train, digits, batch_size=64)

Modules in the order of use: `sources` reads files, folders and ids into `columns`; `kinds` holds everything that
depends on the kind of input, with the encoders of `images` and `tables`; `reading` decides how the columns of a table
become `features`, using `parsing`; `splits` draws the parts; `assemble` builds `types.Data`, which normalises;
`prepared` saves it to a file with its encoder; `loader` makes batches.

Imports `core`. To add a kind of data, add a row to `kinds.KINDS`; for a new format, a reader in `sources`; for a new
way to read a column, a class in `features`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.core.lazy import lazy_names

if TYPE_CHECKING:  # for static type checkers
    from multitudes.data.assemble import load
    from multitudes.data.loader import Loader
    from multitudes.data.prepared import read, save
    from multitudes.data.types import Data, Part

__all__ = ["Data", "Loader", "Part", "load", "read", "save"]

HOMES = {"assemble": "load", "loader": "Loader", "prepared": "read save", "types": "Data Part"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
