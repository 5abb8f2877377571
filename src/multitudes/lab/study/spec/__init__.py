"""Specification: what a study runs, read from `study.toml` and checked before anything runs."""
