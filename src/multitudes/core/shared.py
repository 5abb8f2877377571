"""Members that share one network's weights, and how they run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multitudes.core.calling import Input, input_errors
from multitudes.core.calling import rows as some_rows
from multitudes.core.clipping import clip_each
from multitudes.core.copying import copied, share_hooks
from multitudes.core.member_layer import member_layers
from multitudes.core.multitude import Multitude
from multitudes.core.runners.shared_weights import SharedRunners
from multitudes.core.tasks import Criterion
from multitudes.core.views import copies, run, write


class SharedMembers(Multitude):
    """Members that share one network's weights: a network some of whose layers differ between members.

    They run one by one; side by side under vmap, where what comes before the first layer that differs runs once; or
    tiled in one batch `[M*B, ...]`, member-major. The table in `runners/selection.py` says which are tried, in which
    order; each is verified on the first input of each kind, and one by one is always right. Batch norms in training
    take their statistics over all members' rows together.
    """

    found_anew = (*Multitude.found_anew, "_runners")

    rows = "shared"
    """The rows that a member trains on: all rows of the batch, "shared", or its own part of them, "own"."""

    own_losses = False
    """Add the members' losses where nothing trained is shared, so that each member learns as it would alone."""

    def __init__(self, network: nn.Module, members: int) -> None:
        super().__init__(network, members)
        self.forget()

    def forget(self) -> None:
        super().forget()
        self._runners = SharedRunners(self.network, self.members)

    def _predictions(self, x: Input) -> Tensor:
        return self._runners.run(x)

    @property
    def independent(self) -> bool:  # type: ignore[override]
        """With `own_losses`, whether nothing that is trained is shared, as where the trunk is frozen."""
        if not self.own_losses:
            return False
        own = self._own_names()
        trained = [name for name, parameter in self.named_parameters() if parameter.requires_grad]
        return bool(trained) and all(name in own for name in trained)

    def _own_names(self) -> set[str]:
        """The names of the parameters that are each member's own, `[M, ...]`."""
        layers = member_layers(self.network)
        return {f"{name}.{own}" if name else own for name, layer in layers.items() for own in layer.own_parameters()}

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradient to at most `max_norm`; each member's own where nothing that is trained is shared."""
        if not self.independent:
            return super().clip_grad_norm_(max_norm)
        return clip_each(self.parameters(), self.members, max_norm)

    def _losses(
        self, x: Input, y: Tensor, criterion: Criterion | None, task: str | None, weight: Tensor | None
    ) -> list[Tensor]:
        """With `rows="own"` return each member's loss on its part of the batch.

        Parts are equally large, one after the other. Where the batch cannot be divided evenly, some of its rows belong
        to two members.
        """
        if self.rows == "shared" or not self.training:
            return super()._losses(x, y, criterion, task, weight)
        parts = self._parts(len(y), y.device)
        with input_errors(x):
            self.settle(x)
            divided = x if parts.numel() == len(y) else some_rows(x, parts.flatten())
            predictions = self._runners.dividing(x).divided(divided)
        weights = [None] * self.members if weight is None else weight[parts].unbind()
        own_loss = self._criterion(criterion, task, predictions, y[parts[0]]).loss
        each = zip(predictions, y[parts], weights, strict=True)
        return [own_loss(part, target, weight=own) for part, target, own in each]

    def _parts(self, rows: int, device: torch.device) -> Tensor:
        """The rows of each member's part of a batch, `[M, ceil(B / M)]`.

        >>> SharedMembers(nn.Linear(2, 2), 2)._parts(5, torch.device("cpu"))
        tensor([[0, 1, 2],
                [2, 3, 4]])
        """
        first = torch.arange(self.members, device=device) * rows // self.members
        return first[:, None] + torch.arange(-(-rows // self.members), device=device)

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep the attributes that each member's code has written."""
        return {**super().__getstate__(), "_runners": self._runners}

    def train(self, mode: bool = True) -> SharedMembers:
        super().train(mode)
        self._runners.one_by_one.refresh()  # a compiled graph cannot look for what has changed
        return self

    # -- the protocol ------------------------------------------------------------------------------------

    def _of_first(self, x: Input) -> Tensor:
        return run(self._runners.one_by_one.views.current()[0], x)

    def _prepare(self, x: Input) -> None:
        self._runners.choose(x)

    def _member(self, index: int) -> nn.Module:
        layers = member_layers(self.network).values()
        folded = {id(layer): layer.fold(index) for layer in layers}
        for layer in layers:
            share_hooks(layer, folded[id(layer)])
        member = copied(self.network, folded)
        views = self._runners.one_by_one.views
        if views.views:
            write(member, copies(views.written(index)))
        return member
