"""Helpers that do not depend on networks: argument checks, lazy imports, progress, files with checksums.

Imports no other package. Shared checks of arguments go into `checks.py`.
"""
