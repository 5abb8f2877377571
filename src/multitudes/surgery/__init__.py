"""Change a network's layers in a copy: select and replace, insert, narrow, initialise, observe, check.

Imports `ensemble` and what it imports. Code for several methods goes here; code for one method stays with that method.
"""
