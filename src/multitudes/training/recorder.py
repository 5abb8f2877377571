"""`Recorder`: the last checkpoints of a training, and the mean and variance of all of them.

Also `Trajectory`, the checkpoints that methods take, and weights as one vector.
"""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multitudes.base.archives import join_parts, read_tensors, tensors_of_part, write_tensors
from multitudes.base.checks import check_count, needed
from multitudes.base.sealed_files import DamagedError

State = dict[str, Tensor]
"""Parameters and buffers by name, as in a state dict."""


@dataclass
class Moments:
    """Running mean and variance of the floating-point and complex tensors of states, by Welford's updates.

    Complex numbers are treated as pairs of real numbers.

    >>> moments = Moments()
    >>> for weight in (1.0, 2.0, 3.0):
    ...     moments.add({"weight": torch.tensor(weight)})
    ...     print(moments.mean["weight"].item())
    1.0
    1.5
    2.0
    """

    count: int = 0
    mean: State = field(default_factory=dict)
    squares: State = field(default_factory=dict)  # sums of squared deviations from the mean

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add one more state."""
        self.count += 1
        for name, tensor in state.items():
            if not _is_weight(tensor):
                continue
            value = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32)).resolve_conj()
            if self.count == 1:
                self.mean[name], self.squares[name] = value.clone(), torch.zeros_like(value)
                continue
            value, mean, squares = map(_as_real, (value, self.mean[name], self.squares[name]))
            # Equal infinities, as in masks, have no difference.
            delta = torch.where(value == mean, 0.0, value - mean)
            mean += delta / self.count
            squares += delta.square() * ((self.count - 1) / self.count)

    @property
    def variance(self) -> State:
        """The variance by name."""
        return {name: squares / self.count for name, squares in self.squares.items()}

    @property
    def second_moment(self) -> State:
        """The mean of the squares by name."""
        variance, mean = self.variance, self.mean
        squares = {name: _as_real(variance[name]) + _as_real(mean[name]).square() for name in mean}
        return {name: _as_like(square, mean[name]) for name, square in squares.items()}


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is averaged: floating-point or complex, and not sparse."""
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout == torch.strided


def _as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as pairs of real numbers, `[..., 2]`; return other tensors unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _as_like(real: Tensor, tensor: Tensor) -> Tensor:
    """Convert real numbers to the shape and dtype of a tensor; inverse of `_as_real`."""
    if not tensor.is_complex():
        return real.view(tensor.shape).to(tensor.dtype)
    return torch.view_as_complex(real.reshape(*tensor.shape, 2).clone()).to(tensor.dtype)  # clone: aligned to pairs


class Recorder:
    """Record checkpoints of a network: the last `keep` of them, and the moments of all.

    Call `step()` after each epoch or training step, or `record()` to record at once. Iterate over the recorder for
    state dicts, the oldest first. `mean`, `variance` and `second_moment` cover the floating-point and complex tensors
    of all recorded checkpoints. Methods such as `swa`, `swag` and `snapshots` take a recorder.

    Args:
        net: The network to record.
        keep: Number of checkpoints to keep.
        every: Record on every `every`-th call of `step`.
        folder: Folder for safetensors files with checksums; default: keep checkpoints in memory, on the CPU.
        resume: Continue the recording in the folder.
        of: Name of the recording. Files with another name are refused.

    Raises:
        ValueError: The folder already holds a recording, or its files are damaged or do not fit the network.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> recorder = Recorder(net, keep=2)
        >>> for weight in (1.0, 2.0, 3.0):
        ...     _ = nn.init.constant_(net.weight, weight)
        ...     recorder.step()
        >>> [state["weight"].item() for state in recorder], recorder.count, recorder.mean["weight"].item()
        ([2.0, 3.0], 3, 2.0)
    """

    def __init__(
        self,
        net: nn.Module,
        keep: int = 10,
        every: int = 1,
        folder: str | os.PathLike[str] | None = None,
        resume: bool = False,
        of: str = "",
    ) -> None:
        if not isinstance(net, nn.Module):
            raise ValueError(f"net must be an nn.Module, got {type(net).__name__}")
        check_count("keep", keep)
        check_count("every", every)
        if resume and folder is None:
            raise ValueError("resume=True needs folder=, the folder of a recording")
        self.net, self.keep, self.every = net, keep, every
        self.before = Moments()
        """Moments of the checkpoints that are no longer kept."""
        self._steps = 0
        self._kept: deque[State | Path] = deque()
        self._disk = None if folder is None else _Disk(Path(folder), of)
        if self._disk is not None:
            self._continue_recording(self._disk, resume)

    def step(self) -> None:
        """Count an epoch or training step; record every `every`-th."""
        self._steps += 1
        if self._steps % self.every == 0:
            self.record()

    def record(self) -> None:
        """Record the network now."""
        state = _snapshot(self.net)
        number = self.count + 1
        self._kept.append(state if self._disk is None else self._disk.write(number, state))
        dropped = self._kept.popleft() if len(self._kept) > self.keep else None
        if dropped is not None:
            self.before.add(_read_state(dropped))
        if self._disk is not None:
            self._disk.write_moments(self.before)
        if isinstance(dropped, Path):
            dropped.unlink()

    def __len__(self) -> int:
        return len(self._kept)

    def __bool__(self) -> bool:
        """Return True, also without checkpoints, so that `if recorder:` tests for None."""
        return True

    def __iter__(self) -> Iterator[State]:
        return map(_read_state, list(self._kept))

    def __getitem__(self, index: int) -> State:
        return _read_state(self._kept[index])

    @property
    def count(self) -> int:
        """Number of recorded checkpoints, including those no longer kept."""
        return self.before.count + len(self._kept)

    @property
    def moments(self) -> Moments:
        """Moments of all recorded checkpoints."""
        if not self.count:
            raise ValueError("nothing has been recorded yet")
        return Trajectory(list(self), self.before).moments()

    @property
    def mean(self) -> State:
        """Mean of all recorded checkpoints, by name."""
        return self.moments.mean

    @property
    def variance(self) -> State:
        """Variance of all recorded checkpoints, by name."""
        return self.moments.variance

    @property
    def second_moment(self) -> State:
        """Mean square of all recorded checkpoints, by name."""
        return self.moments.second_moment

    def _continue_recording(self, disk: _Disk, resume: bool) -> None:
        found = disk.checkpoints()
        if not resume and found:
            raise ValueError(
                f"folder {str(disk.folder)!r} already holds a recording: pass resume=True to continue it, or choose "
                "another folder"
            )
        if resume:
            self.before = disk.read_moments()
            # After an interruption, a checkpoint may be in the moments but not deleted yet.
            kept = {number: path for number, path in found.items() if number > self.before.count}
            disk.check(kept, self.before.count)
            self._kept.extend(kept.values())
            if self._kept:
                check_fits(self.net.state_dict(), self[-1], f"folder {str(disk.folder)!r}")
        while len(self._kept) > self.keep:
            self.before.add(_read_state(self._kept.popleft()))


def _snapshot(net: nn.Module) -> State:
    """Copy a network's tensors to the CPU."""
    for name, parameter in net.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run the network once before recording")
        if not bool(parameter.isfinite().all()):
            raise ValueError(f"parameter {name!r} holds NaN or infinite values, so nothing was recorded")
    tensors = tensors_of(net.state_dict())
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _read_state(kept: State | Path) -> State:
    return read_tensors(kept, ENTRY, FOLDER)[0] if isinstance(kept, Path) else kept


ENTRY, FOLDER = "recording", "recording in a folder"


class _Disk:
    """A folder of checkpoint files, written atomically."""

    def __init__(self, folder: Path, of: str) -> None:
        needed("safetensors.torch", "safetensors", FOLDER)
        self.folder, self.of = folder, of
        folder.mkdir(parents=True, exist_ok=True)

    def checkpoints(self) -> dict[int, Path]:
        """Return the existing files by number."""
        paths = sorted(self.folder.glob("checkpoint-*.safetensors"))
        numbers = {path.stem.removeprefix("checkpoint-"): path for path in paths}
        return {int(number): path for number, path in numbers.items() if number.isdecimal()}

    def check(self, kept: Mapping[int, Path], before: int) -> None:
        """Check that no file after number `before` is missing, damaged or of another recording."""
        for expected, (number, path) in enumerate(kept.items(), before + 1):
            if number != expected:
                raise DamagedError(path.with_name(_name(expected)), "it is missing")
            self._read(path, number)

    def write(self, number: int, state: State) -> Path:
        return self._write(_name(number), state, number)

    def write_moments(self, moments: Moments) -> None:
        parts = {"mean": moments.mean, "squares": moments.squares}
        self._write("moments.safetensors", join_parts(parts), moments.count)

    def read_moments(self) -> Moments:
        path = self.folder / "moments.safetensors"
        if not path.exists():
            return Moments()
        state, about = self._read(path)
        return Moments(about["number"], tensors_of_part("mean", state), tensors_of_part("squares", state))

    def _write(self, name: str, state: State, number: int) -> Path:
        return write_tensors(self.folder / name, state, ENTRY, {"of": self.of, "number": number}, FOLDER)

    def _read(self, path: Path, number: int | None = None) -> tuple[State, dict[str, Any]]:
        state, about = read_tensors(path, ENTRY, FOLDER)
        if about.get("of") != self.of or number not in (None, about.get("number")):
            raise DamagedError(path, "it belongs to another recording")
        return state, about


def _name(number: int) -> str:
    return f"checkpoint-{number:08d}.safetensors"


# -- trajectories ------------------------------------------------------------------------------------------


@dataclass
class Trajectory:
    """Checkpoints that fit a network, and the moments of earlier ones."""

    states: list[State]
    before: Moments = field(default_factory=Moments)

    @classmethod
    def of(cls, checkpoints: Checkpoints, network: nn.Module, least: int = 1) -> Trajectory:
        """Read and check at least `least` checkpoints of a network."""
        before = checkpoints.before if isinstance(checkpoints, (Trajectory, Recorder)) else Moments()
        given = checkpoints.states if isinstance(checkpoints, Trajectory) else checkpoints
        if isinstance(given, Mapping | nn.Module) or not isinstance(given, Iterable):
            raise ValueError(f"checkpoints must be a Recorder or a list of state dicts, got {type(given).__name__}")
        states = list(given)
        if len(states) < least:
            raise ValueError(f"checkpoints must be {least} or more, got {len(states)}")
        return cls([checked_state(state, network, f"checkpoints[{at}]") for at, state in enumerate(states)], before)

    def of_member(self, index: int) -> Trajectory:
        """Return the trajectory of one member of `Members`, without the member's name prefix."""
        prefix = f"{index}."

        def alone(state: State) -> State:
            return {name.removeprefix(prefix): t.clone() for name, t in state.items() if name.startswith(prefix)}

        before = Moments(self.before.count, alone(self.before.mean), alone(self.before.squares))
        return Trajectory([alone(state) for state in self.states], before)

    def along(self) -> Iterator[tuple[State, Moments]]:
        """Yield each checkpoint with the moments of all checkpoints up to it."""
        moments = copy.deepcopy(self.before)
        for state in self.states:
            moments.add(state)
            yield state, moments

    def moments(self) -> Moments:
        """Return the moments of all checkpoints, including the earlier ones."""
        return [moments for _, moments in self.along()][-1]


Checkpoints = Recorder | Trajectory | Iterable[Mapping[str, Tensor]]
"""A recorder, or state dicts with the oldest first."""


def checked_state(state: Any, network: nn.Module, what: str, kinds: str = "a state dict") -> State:
    """Return the tensors of a state dict, named `what` in errors, if they fit the network and are finite."""
    if not isinstance(state, Mapping):
        raise ValueError(f"{what} must be {kinds}, got {type(state).__name__}")
    tensors = tensors_of(state)
    check_fits(network.state_dict(), tensors, what)
    for name in weights_of(network):
        if not bool(tensors[name].isfinite().all()):
            raise ValueError(f"{what} holds NaN or infinite weights in {name!r}")
    return tensors


def tensors_of(state: Mapping[str, Any]) -> State:
    """Return the tensors of a state dict, without other entries."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def check_fits(want: Mapping[str, Any], got: Mapping[str, Tensor], what: str) -> None:
    """Check that a checkpoint has the names and shapes of a network's state dict."""
    shapes = {name: value.shape for name, value in tensors_of(want).items()}
    for name in [*sorted(shapes.keys() - got.keys()), *sorted(got.keys() - shapes.keys())]:
        raise ValueError(f"{what} does not fit the model: {name!r} is {'missing' if name in shapes else 'unexpected'}")
    for name, shape in shapes.items():
        if got[name].shape != shape:
            raise ValueError(
                f"{what} does not fit the model: {name!r} has shape {list(got[name].shape)}, not {list(shape)}"
            )


# -- weights as one vector ---------------------------------------------------------------------------------


def weights_of(network: nn.Module) -> State:
    """Return the floating-point parameters by name; complex ones as pairs of real numbers."""
    return {name: _as_real(parameter) for name, parameter in network.named_parameters() if _is_weight(parameter)}


def flat_weights(network: nn.Module) -> Tensor:
    """Return the floating-point parameters as one vector `[P]`."""
    return torch.cat([weight.flatten() for weight in weights_of(network).values()])


def flat_state(state: State, network: nn.Module) -> Tensor:
    """Return a checkpoint's weights as one vector `[P]`, on the CPU and in float32 or better."""
    parts = [_as_real(state[name].detach()).flatten().cpu() for name in weights_of(network)]
    return torch.cat([part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts])


def unflattened(vector: Tensor, network: nn.Module) -> State:
    """Split `vector [P]` into weights by name, with the network's shapes and dtypes."""
    weights, own = weights_of(network), dict(network.named_parameters())
    parts = vector.split([weight.numel() for weight in weights.values()])
    return {name: _as_like(part, own[name]) for name, part in zip(weights, parts, strict=True)}


def principal_directions(states: list[State], network: nn.Module, rank: int) -> Tensor:
    """Return the `rank` orthonormal directions of largest variance of the states, `[rank, P]`."""
    if rank >= len(states):
        raise ValueError(f"{rank=} needs {rank + 1} checkpoints or more, got {len(states)}")
    rows = torch.stack([flat_state(state, network) for state in states])
    _, lengths, directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    span = int((lengths > lengths[0] * len(states) * torch.finfo(rows.dtype).eps).sum())
    if rank > span:
        raise ValueError(f"{rank=} is too large: the checkpoints span {span} directions only")
    return directions[:rank]
