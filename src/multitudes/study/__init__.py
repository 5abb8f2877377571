"""Many runs: which method is worth its price on the data at hand."""
