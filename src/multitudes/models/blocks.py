"""Blocks shared by several architectures: convolutions, stages, initialisation, checks."""

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor, nn

from multitudes.base.checks import check_count

Stem = Literal["small", "imagenet"]


def check_counts(**counts: int) -> None:
    """Raise unless each argument is a positive integer."""
    for name, value in counts.items():
        check_count(name, value)


def reset_he(module: nn.Module) -> None:
    """Reset all weights below `module`: He et al. (2015) for convolutions, torch's rules for the rest."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if reset is not None:
            reset()
        else:
            reset_he(child)
        if isinstance(child, nn.Conv2d):
            fan_out = child.weight[:, 0].numel() / child.groups  # torch's fan-out ignores groups
            nn.init.normal_(child.weight, std=(2 / fan_out) ** 0.5)


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A 3x3 convolution `[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]`, without a bias."""
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    """A 1x1 convolution `[B, inputs, H, W] -> [B, outputs, H / stride, W / stride]`, without a bias."""
    return nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)


def build_stem(stem: Stem, channels: int, width: int) -> tuple[nn.Conv2d, nn.Module]:
    """Return the first convolution, `channels` to `width`, and the pooling after it."""
    if stem == "small":
        return conv3x3(channels, width), nn.Identity()
    if stem == "imagenet":
        conv = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
        return conv, nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    raise ValueError(f'stem must be "small" or "imagenet", got {stem!r}')


class Staged(nn.Module):
    """A network with stages of blocks, `layer1`, `layer2`, ..., and He initialisation."""

    stages: int
    """Number of stages."""

    reset_parameters = reset_he

    def build_stages(
        self, block: Callable[[int, int, int], nn.Module], depths: Sequence[int], inputs: int, width: int
    ) -> int:
        """Add a stage of blocks for each of `depths`. Return the channels of the last.

        `block(inputs, width, stride)` builds a block with `width * expansion` outputs. Each stage but the first starts
        with stride 2 and has twice the width of the one before.
        """
        if not depths or min(depths) < 1:
            raise ValueError(f"depths must be one or more numbers of at least 1, got {tuple(depths)}")
        self.stages = len(depths)
        for number, depth in enumerate(depths):
            blocks = nn.Sequential()
            for position in range(depth):
                layer = block(inputs, width, 2 if number > 0 and position == 0 else 1)
                blocks.append(layer)
                inputs = width * int(layer.expansion)  # type: ignore[arg-type]
            self.add_module(f"layer{number + 1}", blocks)
            width *= 2
        return inputs

    def run_stages(self, x: Tensor) -> Tensor:
        """Run all stages in order."""
        for number in range(self.stages):
            x = getattr(self, f"layer{number + 1}")(x)
        return x
