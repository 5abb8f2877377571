"""The page of a study: one HTML file that works from disk, without a network."""

from multitudes.report.page import write
from multitudes.report.results import Results

__all__ = ["Results", "write"]
