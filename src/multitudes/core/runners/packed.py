"""The packed runner: members' channels side by side in grouped layers, traced once for each mode."""

from __future__ import annotations

from torch import Tensor, nn

from multitudes.core.calling import Input
from multitudes.core.draws.stochastic import attached
from multitudes.core.packing import Plan, trace
from multitudes.core.runners.template import CannotStack, Template

__all__ = ["PackedRunner"]


class PackedRunner:
    """Run networks of one architecture side by side, `[B, M*C, ...]` (see `core/packing`).

    Laurent et al., *Packed-Ensembles for efficient uncertainty estimation*, 2023.
    """

    name = "packed"

    def __init__(self, networks: nn.ModuleList) -> None:
        self.networks = networks
        self.plans: dict[bool, tuple[Template, Plan]] = {}

    def __call__(self, x: Input) -> Tensor:
        template, plan = self.plans[self.networks.training]
        tensors = template.tensors()
        template.take_draws()
        predictions = plan(tensors, x)
        template.keep_buffers(tensors, tensors)
        return predictions

    def prepare(self) -> bool:
        """Trace the networks if that was not done in their present mode, or not as they are now; true if it was."""
        mode = self.networks.training
        if mode in self.plans and self.plans[mode][0].current():
            return False
        if any(map(attached, self.networks.modules())):
            raise CannotStack("a layer draws for a whole network, which a trace does not call")
        template = Template(self.networks)
        self.plans[mode] = template, trace(template.network, template.members)
        return True

    def all_steps_have_rules(self) -> bool:
        """Return whether the last run in this mode used no slow step under `torch.vmap`."""
        return not self.plans[self.networks.training][1].mapped
