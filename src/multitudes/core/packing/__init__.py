"""The packed runner: members side by side in one network of grouped layers.

A network's own code runs once for all members, on values of three kinds: *shared*, a plain tensor (or number) that all
members see alike; `Packed`, `[B, M*C, ...]` with the members' channels side by side, member-major; and `Stacked`,
`[M, B, ...]`. Functions that `rules` knows run on packed channels at full speed; any other function runs by itself
under `torch.vmap`, which is right whatever the function does. So a network that mixes channels (a shuffle, a `cat`, an
attention) is computed right, at some cost.
"""

from multitudes.core.packing.network import PackedNetwork
from multitudes.core.packing.values import CannotPack

__all__ = ["CannotPack", "PackedNetwork"]
