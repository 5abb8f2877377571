"""Shifted data: what a network meets when its inputs are not like those it learnt from."""

from multitudes.shift.attacks import Attack, fgsm, iterative_fast_sign, pgd
from multitudes.shift.corruptions import CORRUPTIONS, EXTRA, corrupt
from multitudes.shift.frequency import accuracy_by_frequency, frequency_noise
from multitudes.shift.sequences import DIRECTIONS, SHAPES, Video, translated, video

__all__ = [
    "CORRUPTIONS",
    "DIRECTIONS",
    "EXTRA",
    "SHAPES",
    "Attack",
    "Video",
    "accuracy_by_frequency",
    "corrupt",
    "fgsm",
    "frequency_noise",
    "iterative_fast_sign",
    "pgd",
    "translated",
    "video",
]
