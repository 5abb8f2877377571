"""Check that 8-bit predictions are as good as the network's own."""

from __future__ import annotations

from torch import Tensor
from torch.distributions import Normal, kl_divergence

from multitudes import metrics
from multitudes.tasks.predictive import Predictive

ACCURACY = 0.01
"""Maximum loss of accuracy."""

NLL = 0.02
"""Maximum increase of the negative log-likelihood, in nats."""

VALUES = 0.05
"""Maximum increase of the RMSE, relative to the standard deviation of the network's predictions."""


def check_quality(got: Predictive, want: Predictive, targets: Tensor | None) -> list[tuple[str, str]]:
    """Return the summary row of the loss of quality; raise if it is too large.

    Without targets, the loss is relative to the network's own predictions: the share of changed labels, and the
    divergence from the network's probabilities.
    """
    measured = (_of_classes if want.reading.classes else _of_values)(got, want, targets)
    against = "its own predictions" if targets is None else "the targets"
    losses = ", ".join(f"{name} {value:+.4f} (at most {most:+g})" for name, value, most in measured)
    if not all(value <= most for _, value, most in measured):
        raise ValueError(
            f"precision='int8' loses too much quality, compared with {against}: {losses}; pass more inputs as example, "
            "or precision='float32'"
        )
    return [("8 bits", f"compared with {against}: {losses}")]


def _of_classes(got: Predictive, want: Predictive, targets: Tensor | None) -> list[tuple[str, float, float]]:
    if targets is None:
        right, own = want._log_probs.double(), got._log_probs.double()  # [B, C, ...]
        lost = (right.exp() * (right - own)).nan_to_num(0).sum(1).mean()
        return [("other labels", float((got.label != want.label).float().mean()), ACCURACY), ("KL", float(lost), NLL)]
    losses = [(1 - metrics.accuracy(each, targets), metrics.nll(each, targets)) for each in (got, want)]
    errors, nll = (float(one - other) for one, other in zip(*losses, strict=True))
    return [("errors", errors, ACCURACY), ("NLL", nll, NLL)]


def _of_values(got: Predictive, want: Predictive, targets: Tensor | None) -> list[tuple[str, float, float]]:
    """Return the loss of the worst output, relative to its standard deviation, and the loss of likelihood."""
    one, other = _outputs(got), _outputs(want)
    spread = other.std(0).maximum(0.01 * other.abs().mean(0)).clamp(min=1e-12)
    quantiles = want.quantiles is not None
    if targets is None or quantiles:
        lost = (one - other).square().mean(0).sqrt()
    else:
        right = targets.to(other).reshape(other.shape)
        lost = (one - right).square().mean(0).sqrt() - (other - right).square().mean(0).sqrt()
    measured = [("RMSE / deviation", float((lost / spread).max()), VALUES)]
    if want.reading.predicts_noise and targets is None:
        measured.append(("KL", float(_divergence(got, want).max()), NLL))
    elif want.reading.predicts_noise:
        nll = [-float(metrics.log_density(each, targets)) for each in (got, want)]
        measured.append(("NLL", nll[0] - nll[1], NLL))
    elif quantiles and targets is not None:
        pinball = [float(metrics.pinball_loss(each, targets)) for each in (got, want)]
        measured.append(("pinball loss / deviation", (pinball[0] - pinball[1]) / float(spread.mean()), VALUES))
    return measured


def _outputs(p: Predictive) -> Tensor:
    """Return the members' mean prediction `[B, D]`: each quantile, or each output's mean."""
    values = p.predictions.float().mean(0) if p.quantiles is not None else p.mean
    return values.double().reshape(len(values), -1)


def _divergence(got: Predictive, want: Predictive) -> Tensor:
    """Return the divergence of each output's Gaussians, averaged over members; it bounds that of the mixtures."""
    (mean, variance), (right, own) = (each.member_means_and_variances for each in (got, want))
    each = kl_divergence(Normal(right.double(), own.double().sqrt()), Normal(mean.double(), variance.double().sqrt()))
    return each.reshape(each.shape[0] * each.shape[1], -1).mean(0)
