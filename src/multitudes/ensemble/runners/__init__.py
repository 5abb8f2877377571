"""Runners: small objects that map an input to the predictions of all members, `[M, B, ...]`."""
