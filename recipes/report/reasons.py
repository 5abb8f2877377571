"""Known reasons why some claims do not hold.

Reasons are listed by section and by a part of the claim's text. A reason appears on the page only if its claim fails.
It may contain the papers' numbers, but none of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipes.report.raw import Claim

__all__ = ["REASONS", "reasons_for"]

REASONS: Mapping[str, Mapping[str, str]] = {
    "smoothing": {
        "with 2 draws": (
            "the paper shows it for ResNet-18 on CIFAR-100. For CIFAR-10 it tells of 50 draws alone, where smoothing "
            "gains 0.013 (ResNet-18) and 0.041 (VGG-19): here 2 draws cost more than that against 50."
        ),
        "with a handful of draws": (
            "VGG-16 with MC dropout is far from the end of its training after a fifth of the paper's epochs, as its "
            "training loss says, and what smoothing gains there is a small part of the paper's 0.041."
        ),
        "smoothing lowers the ECE": (
            "where it does not fall, it rises by no more than two or three times what seeds change (the deviation "
            "stands in the first table below), and there is one training of each. In the paper, too, it rises for the "
            "plain VGG-19, from 3.80 to 5.49 %."
        ),
        "attacks succeed less often": (
            "the paper attacks ResNet-50 on ImageNet, where there are more sizes at which to smooth, and does not say "
            "by which radius. Not found out."
        ),
    },
    "patching_uci": {
        "has the lowest RMSE": (
            "the paper's dropout and ensembles are worse than ours by up to an order of magnitude (Yacht), so that "
            "there is less to be ahead of; large sets are trained for far fewer epochs, and patched networks alone "
            "have running statistics, which are noisy (see below)."
        ),
        "has the highest log density": (
            "as for the RMSE; and near the ceiling that the paper's precision sets, sets hardly tell methods apart."
        ),
        "without patching": (
            "the paper does not compare them. Most of what it credits to patching is batch norm's own; for these small "
            "networks, noise in its scales costs more accuracy than it brings."
        ),
    },
    "variance_attacks": {
        "higher after the attack": (
            "entropy rises and falls in the course of an attack, and falls through its first value at a different step "
            "for each network; after some other number of steps the signs are others. The paper's 550 epochs and five "
            "members differ too."
        ),
    },
    "ensembles_landscape": {
        "On SVHN": (
            "random draws must go several times as far as the paper says for the divergence that it reports (the last "
            "table of the section). Why was not found out."
        ),
    },
    "camvid": {
        "spatial smoothing lowers the NLL": (
            "the blur by two points shifts what U-Net's decoder joins. With three points, which shift nothing, the "
            "loss is gone, but no gain is left either; networks that smooth have learned less in the same time. The "
            "authors' own decoder adds maps where U-Net joins them; that was not tried."
        ),
        "temporal smoothing lowers the NLL": (
            "as in the paper, many draws of MC dropout without smoothing stand beside one with it; one draw gains by "
            "it here too. And these frames are a second apart, not a thirtieth of it."
        ),
        "with both": "what spatial smoothing loses is not made up for.",
    },
    "tables": {
        "log probability on every table of classes": (
            "two classes that one linear function of the columns tells apart almost everywhere, and few rows: logistic "
            "regression is the right model for breast cancer, and boosting and forests fall behind it as well."
        ),
    },
}


def reasons_for(name: str, claims: Sequence[Claim]) -> dict[str, str]:
    """Return a section's reasons for failed claims, by the part of the claim that they match."""
    failed = [claim.text for claim in claims if claim.holds is False]
    return {part: reason for part, reason in REASONS.get(name, {}).items() if any(part in text for text in failed)}
