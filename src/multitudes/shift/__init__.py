"""Shifted data: image corruptions, attacks, noise at one frequency, sequences of moving images.

Imports `ensemble` and what it imports. A corruption is one row in `corruptions.py`: a function, and its parameters at
five severities for small and large images.
"""

from multitudes.shift.attacks import Attack, fgsm, iterative_fast_sign, pgd
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA, corrupt
from multitudes.shift.frequency import frequency_noise
from multitudes.shift.sequences import DIRECTIONS, SHAPES, Video, translated, video

__all__ = [
    "CORRUPTIONS",
    "DIRECTIONS",
    "EXTRA",
    "SHAPES",
    "Attack",
    "Video",
    "corrupt",
    "fgsm",
    "frequency_noise",
    "iterative_fast_sign",
    "pgd",
    "translated",
    "video",
]
