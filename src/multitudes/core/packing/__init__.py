"""The packed runner: members side by side in one network of grouped layers.

A network is traced once by `torch.fx` into a list of steps. Running them, a value is one of three things:
*shared*, a plain tensor (or number) that all members see alike; *packed*, `[B, M*C, ...]` with the members'
channels side by side, member-major; or *stacked*, `[M, B, ...]`. Steps that `rules` knows run on packed
channels at full speed; any other step runs by itself under `torch.vmap`, which is right whatever the step
does. So a network that mixes channels (a shuffle, a `cat`, an attention) is computed right, at some cost, and
one that cannot be traced is refused.
"""

from multitudes.core.packing.plan import Plan
from multitudes.core.packing.tracing import trace
from multitudes.core.packing.values import CannotPack

__all__ = ["CannotPack", "Plan", "trace"]
