"""Multitudes: networks that return many predictions, from members of their own weights or of shared ones.

Imports `base`, `networks`, `tasks` and `draws`. `multitude.py` is the base class, `members.py` and `shared.py` are the
two kinds of members, and `runners/` has the ways to run them. Rules for faster packed layers go into
`packing/rules.py`.
"""
