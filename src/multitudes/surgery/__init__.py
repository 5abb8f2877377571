"""Change a network's layers in a copy: select and replace, insert, narrow, initialise, observe, check.

Imports `core`. Code for several methods goes here; code for one method stays with that method.
"""
