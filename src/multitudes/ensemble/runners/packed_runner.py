"""The packed runner: members' channels side by side in grouped layers."""

from __future__ import annotations

from torch import Tensor, nn

from multitudes.ensemble.packing import PackedNetwork
from multitudes.ensemble.runners.template import CannotStack, Template
from multitudes.networks.calls import Input
from multitudes.networks.stochastic import attached_layers


class PackedRunner:
    """Run networks of one architecture side by side, `[B, M*C, ...]` (see `ensemble/packing`).

    Laurent et al., *Packed-Ensembles for efficient uncertainty estimation*, 2023.
    """

    name = "packed"

    def __init__(self, networks: nn.ModuleList) -> None:
        self.networks = networks
        self.packed: dict[bool, tuple[Template, PackedNetwork]] = {}

    @property
    def template(self) -> Template:
        """The copy in the present mode."""
        return self.packed[self.networks.training][0]

    def __call__(self, x: Input) -> Tensor:
        template, network = self.packed[self.networks.training]
        tensors = template.tensors()
        template.take_draws()
        predictions = network(tensors, x)
        template.keep_buffers(tensors, tensors)
        return predictions

    def prepare(self) -> bool:
        """Copy the networks if one has changed or their mode is new; return whether they were copied."""
        mode = self.networks.training
        if mode in self.packed and self.packed[mode][0].current():
            return False
        if any(map(attached_layers, self.networks.modules())):
            raise CannotStack("a layer makes the draws of a whole network, once per member")
        template = Template(self.networks)
        self.packed[mode] = template, PackedNetwork(template.network, template.members)
        return True

    def all_steps_have_rules(self) -> bool:
        """Return whether runs in this mode needed no function under `torch.vmap`."""
        return not self.packed[self.networks.training][1].state.vmapped
