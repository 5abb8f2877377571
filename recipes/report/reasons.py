"""Known reasons why some claims do not hold.

Reasons are listed by section and by a part of the claim's text. A reason appears on the page only if its claim fails.
It may contain the papers' numbers, but none of ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from recipes.report.raw import Claim

REASONS: Mapping[str, Mapping[str, str]] = {
    "smoothing": {
        "with 2 draws": (
            "the paper shows this for ResNet-18 on CIFAR-100. For CIFAR-10 it reports 50 draws, where smoothing gains "
            "0.013 (ResNet-18) and 0.041 (VGG-19). Here, using 2 draws instead of 50 loses more than that."
        ),
        "with a handful of draws": (
            "VGG-16 with MC dropout is still underfitted after a fifth of the epochs of the paper (see its training "
            "loss), and smoothing gains only a small part of the 0.041 of the paper."
        ),
        "smoothing lowers the ECE": (
            "where it rises, the difference is at most two to three standard deviations over seeds (first table "
            "below), and each network is trained once. In the paper it also rises for the plain VGG-19, from 3.80 to "
            "5.49 %."
        ),
        "attacks succeed less often": (
            "the paper attacks ResNet-50 on ImageNet, where there are more resolutions to smooth, and does not "
            "report the radius. The cause is unknown."
        ),
    },
    "patching_uci": {
        "has the lowest RMSE": (
            "dropout and ensembles of the paper are worse than ours by up to an order of magnitude (Yacht), so its "
            "baselines are easier to beat. Large sets are trained for far fewer epochs here, and only patched networks "
            "have running statistics, which are noisy (see below)."
        ),
        "has the highest log density": (
            "see the RMSE; near the upper limit that the precision of the paper sets, methods hardly differ."
        ),
        "without patching": (
            "the paper does not compare them. Most of the gain that it attributes to patching comes from batch norm; "
            "for these small networks, noise in the scales of batch norm lowers the accuracy."
        ),
    },
    "variance_attacks": {
        "higher after the attack": (
            "entropy rises and falls during an attack, and returns to its initial value at a different step for each "
            "network, so the sign depends on the number of steps. The paper also uses 550 epochs and five members."
        ),
    },
    "ensembles_landscape": {
        "On SVHN": (
            "random draws reach the divergence of the paper only at several times its distance (last table of the "
            "section). The cause is unknown."
        ),
    },
    "camvid": {
        "spatial smoothing lowers the NLL": (
            "a two-point blur shifts the maps that the decoder of U-Net concatenates. A three-point blur, which does "
            "not shift maps, neither loses nor gains; networks with smoothing have a higher training loss. The decoder "
            "of the authors adds maps instead of concatenating them; that was not tested."
        ),
        "temporal smoothing lowers the NLL": (
            "as in the paper, many draws of MC dropout without smoothing are compared with one draw with it; one draw "
            "gains here too. These frames are a second apart, not a thirtieth of a second."
        ),
        "with both": "temporal smoothing does not compensate the loss by spatial smoothing.",
    },
    "tables": {
        "log probability on every table of classes": (
            "breast cancer has few rows and two classes that are almost linearly separable: logistic regression is the "
            "right model, and boosting and forests are behind it as well."
        ),
    },
}


def reasons_for(name: str, claims: Sequence[Claim]) -> dict[str, str]:
    """Return a section's reasons for failed claims, by the part of the claim that they match."""
    failed = [claim.text for claim in claims if claim.holds is False]
    return {part: reason for part, reason in REASONS.get(name, {}).items() if any(part in text for text in failed)}
