"""The page of results, made from the raw files alone."""
