"""Surgery: select a network's layers, replace them in a copy, insert others, narrow it, observe it, check the result.

Nothing here knows a method. It imports `core` alone. A newcomer changes it to let every method convert a further kind of
layer: `layers.py` (which layers multiply), `cuts.py` (how one becomes narrower), `downsampling.py` (what makes a map
smaller), `initialise.py` (how one is drawn anew).
"""
