"""The runners of members that share no weight, and the choice among them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.ensemble.runners.member_size import convolves, is_small, is_watched
from multitudes.ensemble.runners.packed_runner import PackedRunner
from multitudes.ensemble.runners.selection import INDEPENDENT, Workload, runners_for
from multitudes.ensemble.runners.template import CannotStack
from multitudes.ensemble.runners.vmapped_runner import VmappedRunner
from multitudes.networks.calls import Input, InputError, call, tensors_in
from multitudes.networks.dispatch import uncompiled
from multitudes.networks.stochastic import as_member
from multitudes.networks.verification import Verdicts, difference

RUNNERS = ("auto", "loop", "packed", "vmapped")

FAST: dict[str, type[PackedRunner] | type[VmappedRunner]] = {"packed": PackedRunner, "vmapped": VmappedRunner}
"""The runners that compute all members at once; each is compared with the loop before use."""


class LoopRunner:
    """Run members one after the other, each by its own code and with its own random numbers; always right."""

    name = "loop"

    def __init__(self, networks: nn.ModuleList) -> None:
        self.networks = networks

    def __call__(self, x: Input) -> Tensor:
        return torch.stack([self.one(index, network, x) for index, network in enumerate(self.networks)])

    def one(self, index: int, network: nn.Module, x: Input) -> Tensor:
        """Run one member, `[B, ...]`."""
        with as_member(network, index, len(self.networks)):
            return call(network, x)


class IndependentRunners:
    """The runners of networks of one architecture, with a cache of choices and verdicts; not saved.

    Networks that are multitudes (`nested`) run one after the other.
    """

    def __init__(self, networks: nn.ModuleList, nested: bool) -> None:
        self.networks, self.nested = networks, nested
        self.loop = LoopRunner(networks)
        self.fast: dict[str, PackedRunner | VmappedRunner] = {}
        self.verdicts = Verdicts()
        self.usual_names: dict[Any, str] = {}

    def run(self, name: str, x: Input) -> Tensor:
        """Run all members, `-> [M, B, ...]`, by the named runner; `"auto"` selects the usual one."""
        runner = self.choose(name, x)
        return self.loop(x) if runner is None else runner(x)

    def choose(self, name: str, x: Input) -> PackedRunner | VmappedRunner | None:
        """Return the verified fast runner to use; None for the loop."""
        wanted = self._usual(x) if name == "auto" else name
        if wanted == "loop":
            return None
        reason = self.refusal(wanted, x)
        if reason and name != "auto":
            raise InputError(f"runner {name!r} cannot run this network: {reason}")
        return None if reason else self.fast[wanted]

    def _usual(self, x: Input) -> str:
        """Return the name of the runner that is usually the fastest (`selection.py`)."""
        first = x if isinstance(x, Tensor) else tensors_in(x)[0]
        if not first.is_cuda and (torch.compiler.is_compiling() or is_watched()):
            return "loop"
        training = self.networks.training
        key = first.device.type, training, torch.is_autocast_enabled(first.device.type), first.dtype, first.shape
        if key not in self.usual_names:
            small = not first.is_cuda and self._packs_small(x)
            rows, member = len(first) if first.dim() else 0, self.networks[0]
            work = float(rows * sum(parameter.numel() for parameter in member.parameters()))
            workload = Workload(
                first.device.type, training, rows, False, convolves=convolves(member), work=work, small=small
            )
            self.usual_names[key] = runners_for(INDEPENDENT, workload)[0]
        return self.usual_names[key]

    @uncompiled
    def _packs_small(self, x: Input) -> bool:
        """Return whether members are small on `x` and the packed runner has a rule for each step."""
        first = self.networks[0]
        if not is_small(first, len(self.networks), x, partial(self.loop.one, 0, first, x)) or self.refusal("packed", x):
            return False
        packed = self.fast["packed"]
        return isinstance(packed, PackedRunner) and packed.all_steps_have_rules()

    def refusal(self, name: str, x: Input) -> str:
        """Return why a runner cannot run inputs like `x` in the current mode; "" if it can."""
        if torch.compiler.is_compiling():
            for gradients in (torch.is_grad_enabled(), not torch.is_grad_enabled()):
                known = self.verdicts.in_mode.get(((name, gradients), self.networks.training))
                if known is not None:
                    return known
        return self._checked(name, x)

    def prepared(self, name: str) -> PackedRunner | VmappedRunner:
        """Return the named runner for the current networks; discard the verdicts on an outdated one."""
        if self.nested:
            raise CannotStack("its members are multitudes, which run one after the other")
        if name not in self.fast:
            self.fast[name] = FAST[name](self.networks)
        if self.fast[name].prepare():
            for gradients in (True, False):
                self.verdicts.forget((name, gradients), self.networks.training)
        return self.fast[name]

    @uncompiled
    def _checked(self, name: str, x: Input) -> str:
        use = name, torch.is_grad_enabled()  # gradients are compared if they are needed
        try:
            runner = self.prepared(name)
        except InputError as refusal:
            self.verdicts.in_mode[use, self.networks.training] = str(refusal)
            return str(refusal)

        def find() -> str:
            copies = [runner.template.network]
            return difference(self.networks, x, runner, self.loop, buffers=True, gradients=use[1], copies=copies)

        return self.verdicts.reason(use, self.networks, x, find)
