"""The vmapped runner: the network's own code, run once for all members under `torch.vmap`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from multitudes.ensemble.runners.template import Template
from multitudes.networks.calls import Input, InputError, prediction_in, split_call
from multitudes.networks.stochastic import as_member
from multitudes.networks.trace import preserve_attributes, writing_modules
from multitudes.networks.vmap import vmap_level


class VmappedRunner:
    """Run networks of one architecture at once, with stacked weights `[M, ...]` under `torch.vmap`."""

    name = "vmapped"

    def __init__(self, networks: nn.ModuleList) -> None:
        self.networks = networks
        self.templates: dict[bool, Template] = {}

    @property
    def template(self) -> Template:
        """The copy in the present mode."""
        return self.templates[self.networks.training]

    def __call__(self, x: Input) -> Tensor:
        template = self.templates[self.networks.training]
        tensors = template.tensors()
        template.take_draws()
        try:
            predictions, after = self._run(template, tensors, x)
        except RuntimeError as error:
            raise InputError(f"vmap cannot run this network or input: {error}") from error
        template.keep_buffers(tensors, after)
        return predictions

    def prepare(self) -> bool:
        """Rebuild the template if a network has changed or its mode is new; return whether it was rebuilt."""
        mode = self.networks.training
        if mode in self.templates and self.templates[mode].current():
            return False
        self.templates[mode] = Template(self.networks)
        return True

    def _run(self, template: Template, tensors: dict[str, Tensor], x: Input) -> tuple[Tensor, dict[str, Tensor]]:
        network, count = template.network, template.members
        args, kwargs = split_call(network, x)
        with vmap_level(count) as members:
            given = {name: members.own(tensor) for name, tensor in tensors.items()}
            own = dict(given)
            with (
                as_member(network, members.own(torch.arange(count)), count),
                preserve_attributes(writing_modules(network)) as written,
            ):
                answer = functional_call(network, own, args, kwargs, tie_weights=False)
            predictions = members.whole(prediction_in(answer, network))
            after = {n: tensors[n] if own[n] is given[n] else members.whole(own[n]) for n in tensors}
        if written:
            path, key = min(written)
            raise InputError(f"the forward of module {path!r} writes its attribute {key!r}")
        return predictions, after
