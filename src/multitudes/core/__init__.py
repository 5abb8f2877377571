"""What a multitude is: how networks are called, what predictions say, members, draws and tasks.

Imports nothing from other rooms. A newcomer rarely changes anything here: a new task is one file and one row in
`tasks/`, a faster layer for packed members into `packing/rules.py`.
"""
