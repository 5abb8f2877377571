"""Changing a network's layers in a copy: select and replace, insert, narrow, initialise, observe, check.

Imports `core`. What several methods need to do to a network goes here; what one method needs stays with it.
"""
