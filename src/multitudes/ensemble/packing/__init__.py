"""The packed runner: members side by side in one network of grouped layers.

A network's own code runs once for all members, on three kinds of values: *shared*, a plain tensor (or number) that is
the same for all members; `Packed`, `[B, M*C, ...]` with the members' channels side by side, member-major; and
`Stacked`, `[M, B, ...]`. Functions with a rule in `rules` run on packed channels at full speed. Any other function
(a channel shuffle, an attention) runs under `torch.vmap`, which is right but slower.
"""

from multitudes.ensemble.packing.packed_network import PackedNetwork
from multitudes.ensemble.packing.packed_values import CannotPack

__all__ = ["CannotPack", "PackedNetwork"]
