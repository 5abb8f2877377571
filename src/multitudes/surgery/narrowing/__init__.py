"""Narrowing: networks of the same class with fewer channels, by observation or by the user's `build(width)`."""
