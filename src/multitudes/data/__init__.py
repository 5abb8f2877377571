"""Data to compare methods on: read from anywhere, prepared in one file, batched on the device.

from multitudes import data

digits = data.load("digits")
loader = data.Loader(digits.train, digits, batch_size=64)
"""

from multitudes.data.assemble import load
from multitudes.data.loader import Loader
from multitudes.data.prepared import read, save
from multitudes.data.types import Data, Part

__all__ = ["Data", "Loader", "Part", "load", "read", "save"]
