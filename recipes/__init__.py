"""The papers' experiments, as anyone can rerun them."""
