"""Data to compare methods on: read from any source, prepared in one file, batched on the device.

    from multitudes import data

    digits = data.load("digits")
    loader = data.Loader(digits.train, digits, batch_size=64)

`sources` reads files, folders and ids into columns. `kinds` holds everything that depends on the kind of input, and
`tables/` decides how the columns of a table are read. `splits` draws the parts, `assembly` builds `Data`,
`prepared_file` saves it with its encoder, and `loader` makes batches.

Imports `base` and `networks`. To add a kind of data, add a row to `kinds.KINDS`; for a new format, a reader in
`sources`; for a new way to read a column, a class in `tables/features.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from multitudes.base.lazy import lazy_names

if TYPE_CHECKING:  # for static type checkers
    from multitudes.lab.data.assembly import load
    from multitudes.lab.data.loader import Loader
    from multitudes.lab.data.parts import Data, Part
    from multitudes.lab.data.prepared_file import read, save

__all__ = ["Data", "Loader", "Part", "load", "read", "save"]

HOMES = {"assembly": "load", "loader": "Loader", "parts": "Data Part", "prepared_file": "read save"}
__getattr__, __dir__ = lazy_names(__name__, HOMES)
