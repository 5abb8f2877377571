"""Code that runs and inspects a user's network: calls, copies, settings, random numbers, traces, verification.

Imports `base`. Other packages record runs with `trace.py` and compare them with `verification.py`.
"""
