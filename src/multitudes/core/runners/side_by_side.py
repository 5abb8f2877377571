"""Members that share weights, side by side in one batch `[M*B, ...]` from a boundary on."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from multitudes.core.calling import Input, tile
from multitudes.core.member_layer import member_layers
from multitudes.core.snapshot import Versions
from multitudes.core.tiling import Boundary, tiled_view
from multitudes.core.views import Views, run

__all__ = ["SideBySide"]


class SideBySide:
    """Run what comes before a boundary once, and all members' rows as one batch after it, `x -> [M, B, ...]`.

    Without a boundary the whole input is tiled.
    """

    def __init__(
        self, network: nn.Module, members: int, boundary: Boundary | None = None, versions: Versions | None = None
    ) -> None:
        self.members = members
        self.boundary = boundary
        self.views = None if boundary is None else Views(network, partial(_tiling, boundary, members), versions)
        self.network = network

    def __call__(self, x: Input) -> Tensor:
        if self.views is None:
            return self.divided(tile(x, self.members))
        (network,) = self.views.current()
        predictions = run(network, x)
        if self.views.may_write:
            self.views.show()
        return predictions.unflatten(0, (self.members, -1))

    def refresh(self) -> None:
        """Make the view anew if the network has changed."""
        if self.views is not None and self.views.views:
            self.views.current()

    def divided(self, x: Input) -> Tensor:
        """Run a batch `[M*B, ...]` whose parts are the members' own rows."""
        return run(self.network, x, is_view=False).unflatten(0, (self.members, -1))


def _tiling(boundary: Boundary, members: int, network: nn.Module) -> list[nn.Module]:
    return [tiled_view(network, boundary, member_layers(network), members)]
