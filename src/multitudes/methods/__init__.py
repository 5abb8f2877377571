"""One file a paper: its layers, its conversion, its objective."""
