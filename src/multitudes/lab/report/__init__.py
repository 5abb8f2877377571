"""The page of a study: one HTML file that works offline.

Imports the library, `lab.data` and `lab.study`. To add a section, write a function from `Results` to plain data (as in
`quality.py`), a template with its name in `templates/`, and a row in `SECTIONS` of `page.py`.
"""

from multitudes.lab.report.page import write
from multitudes.lab.report.run_results import Results, read_results

__all__ = ["Results", "read_results", "write"]
