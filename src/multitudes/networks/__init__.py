"""Everything that touches a user's network: calls, copies, settings, random numbers, traces and verification.

Imports `base`. All code that runs a network on behalf of the library records it with `trace.py` and compares it with
`verification.py`.
"""
