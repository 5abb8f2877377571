"""The page of results, made only from the raw files."""
