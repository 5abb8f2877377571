"""The papers' experiments, as recipes that anyone can rerun."""
