"""Runners: ways to run a multitude's members, each a small object that maps a batch to predictions `[M, B, ...]`."""
