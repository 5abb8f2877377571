"""Page section on temporal and spatial smoothing on CamVid, compared with Table E.4 of Park & Kim, 2022."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from recipes.report.raw import MISSING, Claim, Raw, Section, number, percent, table

PAPER: dict[tuple[str, bool], tuple[int, float, float, float, float]] = {
    ("dnn", False): (1, 0.354, 92.3, 4.95, 95.1),
    ("dnn_smooth", False): (1, 0.318, 92.4, 4.54, 95.5),
    ("dnn", True): (1, 0.290, 92.5, 3.18, 96.3),
    ("dnn_smooth", True): (1, 0.278, 92.5, 3.03, 96.6),
    ("mc_dropout", False): (50, 0.298, 92.5, 4.20, 95.4),
    ("mc_dropout_smooth", False): (50, 0.284, 92.6, 3.96, 95.6),
    ("mc_dropout", True): (1, 0.273, 92.6, 3.23, 96.4),
    ("mc_dropout_smooth", True): (1, 0.260, 92.6, 2.71, 96.5),
}
"""Table E.4, by network and temporal smoothing: draws, NLL, accuracy, ECE and consistency in percent."""

DECAY = 0.8
FASTER = 1.6
FRAMES_PER_SECOND = 30
FAMILIES = {"dnn": "U-Net", "mc_dropout": "MC dropout"}
ALIGNED = "dnn_aligned"
"""A blur by three points; the paper has none."""
VIDEOS = {"val": "validation video", "test": "test frames"}


def section(raw: Raw) -> Section:
    """Write both videos' tables and the verdicts on the paper's claims."""
    results = {piece: raw[piece] for piece in (*[piece for piece, _ in PAPER], ALIGNED) if piece in raw}
    parts = [_what(results), *(_video(results, video) for video in VIDEOS)]
    claims = [claim for video in VIDEOS for claim in _claims(results, video)]
    return Section("Temporal and spatial smoothing: U-Net on CamVid", "\n\n".join(parts), claims)


# -- results -----------------------------------------------------------------------------------------------

Results = dict[str, dict[str, Any]]


def _row(results: Results, piece: str, video: str, decay: float | None, one_draw: bool = False) -> dict[str, Any]:
    """Return a network's scores on a video: of one draw with temporal smoothing, else of the most draws measured."""
    rows = [row for row in results.get(piece, {}).get("rows", []) if (row["video"], row["decay"]) == (video, decay)]
    rows.sort(key=lambda row: row["draws"])
    return (rows[0] if one_draw else rows[-1]) if rows else {}


def _name(piece: str, temporal: bool) -> str:
    family = piece.removesuffix("_smooth").removesuffix("_aligned")
    blur = "" if piece == family else " + SPAT (1, 2, 1)" if piece == ALIGNED else " + SPAT"
    return FAMILIES[family] + blur + (" + TEMP" if temporal else "")


# -- text --------------------------------------------------------------------------------------------------

ABOUT = """\
Park & Kim, *Blurs behave like ensembles*, 2022, Table E.4. SPAT is spatial smoothing, `mt.smooth`, before the four
max-pools of U-Net's encoder. TEMP is temporal smoothing, `mt.temporal`: a frame's prediction is averaged with those for
the five frames before it, each of which counts e^-0.8 of the one after it. N is the number of draws for each frame.
Unlabelled pixels do not count, the ECE has 10 bins, and CONS, consistency, is the share of pixels whose predicted class
is that of the frame before.

Differences from the paper:

- The paper smooths over all frames of the videos, 30 in a second. Here there are only those with labels. In the test
  set they are a second apart, so the car has moved on. The validation set is one video with 15 labelled frames in a
  second, which comes near to the paper's setting. Some training frames are of the same drive, the nearest of them about
  a second away. Nothing was chosen by either set. With each table stands the consistency of the true labels."""

DONE = """
- {epochs} epochs of random windows, {crop[0]} x {crop[1]}, of {frames} frames, {size[0]} x {size[1]}, {batch_size} at a
  time (the paper: 130 epochs, 3 at a time). Adam at {lr:g} (0.001), cut to a fifth at the same share of the training;
  flips and median frequency balancing as in the paper. One seed.
- The paper leaves U-Net's width and rate of dropout open: here {width} channels at the first size, and 0.5 in the
  deepest six parts. U-Net is the original one; the authors' public code adds the encoder's maps to the decoder's
  instead of joining them. MC dropout makes {draws} draws (50)."""


def _what(results: Results) -> str:
    settings = next((result["settings"] for result in results.values()), None)
    if settings is None:
        return ABOUT
    return "\n\n".join([ABOUT + DONE.format(**settings), *_aligned(results), _fit(results)])


def _aligned(results: Results) -> list[str]:
    """Describe the effect of SPAT without shifts."""
    if not {"dnn", "dnn_smooth", ALIGNED} <= set(results):
        return []
    nlls = [
        " and ".join(number(_row(results, piece, video, None).get("nll")) for video in VIDEOS)
        for piece in (ALIGNED, "dnn_smooth", "dnn")
    ]
    return [
        "The paper's blur, by two points, shifts a map by half a point at each of four sizes, against the maps that "
        "the decoder joins it with. By three points, (1, 2, 1), which shift nothing, U-Net's NLL is {} on the {} and "
        "the {}, by two {}, and without SPAT {}.".format(nlls[0], *VIDEOS.values(), *nlls[1:])
    ]


def _fit(results: Results) -> str:
    losses = ", ".join(f"{_name(piece, False)} {number(result['loss'])}" for piece, result in results.items())
    return (
        f"Training loss in the end: {losses}. Where it is higher with SPAT than without, the network has learned less "
        "in the same time."
    )


def _video(results: Results, video: str) -> str:
    rows = [
        _line(_name(piece, temporal), _row(results, piece, video, DECAY if temporal else None), paper)
        for (piece, temporal), paper in PAPER.items()
        if piece in results
    ]
    for piece in results:
        if piece == ALIGNED:
            rows += [_line(_name(piece, bool(decay)), _row(results, piece, video, decay)) for decay in (None, DECAY)]
        if piece.startswith("mc_dropout"):
            rows.append(_line(_name(piece, False) + ", one draw", _row(results, piece, video, None, one_draw=True)))
        rows.append(_line(_name(piece, True) + f", e^-{FASTER:g}", _row(results, piece, video, FASTER)))
    header = ["ours (the paper)", "N", "NLL", "ACC %", "ECE %", "CONS %", "mean IoU %"]
    return "\n\n".join([f"### On the {VIDEOS[video]}", _length(results, video), table(header, rows)])


def _length(results: Results, video: str) -> str:
    about = next((result["videos"][video] for result in results.values()), None)
    if about is None:
        return "Not measured."
    lengths = " and ".join(map(str, about["sequences"]))
    aligned = "; and SPAT by a kernel of three points" if ALIGNED in results else ""
    return (
        f"{lengths} frames, one every {about['step'] / FRAMES_PER_SECOND:.2g} s. The true labels have a consistency of "
        f"{percent(about['consistency'])} %. Rows without the paper's numbers are ours alone: a single draw without "
        f"TEMP; TEMP with e^-{FASTER:g}, which at 15 frames in a second is the paper's decay in time"
        f"{aligned}."
    )


def _line(name: str, row: dict[str, Any], paper: tuple[int, float, float, float, float] | None = None) -> list[str]:
    ours = [
        str(row.get("draws", MISSING)),
        number(row.get("nll")),
        percent(row.get("accuracy")),
        percent(row.get("ece"), 2),
        percent(row.get("consistency")),
    ]
    if paper is not None:
        draws, nll, accuracy, ece, consistency = paper
        theirs = [str(draws), number(nll), number(accuracy, 1), number(ece, 2), number(consistency, 1)]
        ours = [f"{mine} ({other})" for mine, other in zip(ours, theirs, strict=True)]
    return [name, *ours, percent(row.get("mean_iou"))]


# -- claims ------------------------------------------------------------------------------------------------


def _claims(results: Results, video: str) -> list[Claim]:
    where = VIDEOS[video]

    def score(metric: str, piece: str, temporal: bool) -> float | None:
        value: float | None = _row(results, piece, video, DECAY if temporal else None).get(metric)
        return value

    def alone_and_both(family: str) -> tuple[float | None, float | None]:
        smooth = f"{family}_smooth"
        return _least(score("nll", smooth, False), score("nll", family, True)), score("nll", smooth, True)

    pieces = [piece for piece, temporal in PAPER if temporal]
    return [
        _claim(
            f"CamVid, {where}: spatial smoothing lowers the NLL",
            ((FAMILIES[f], score("nll", f, False), score("nll", f"{f}_smooth", False)) for f in FAMILIES),
            lambda before, after: after < before,
        ),
        _claim(
            f"CamVid, {where}: temporal smoothing lowers the NLL",
            ((_name(p, False), score("nll", p, False), score("nll", p, True)) for p in pieces),
            lambda before, after: after < before,
        ),
        _claim(
            f"CamVid, {where}: temporal smoothing raises consistency",
            ((_name(p, False), score("consistency", p, False), score("consistency", p, True)) for p in pieces),
            lambda before, after: after > before,
        ),
        _claim(
            f"CamVid, {where}: with both, the NLL is lower than with either alone",
            ((FAMILIES[f], *alone_and_both(f)) for f in FAMILIES),
            lambda before, after: after < before,
        ),
    ]


def _least(*values: float | None) -> float | None:
    found = [value for value in values if value is not None]
    return min(found) if len(found) == len(values) else None


def _claim(
    text: str, steps: Iterable[tuple[str, float | None, float | None]], better: Callable[[float, float], bool]
) -> Claim:
    """Claim that each step from one number to another is an improvement."""
    found = list(steps)
    numbers = "; ".join(f"{name} {number(before, 4)} to {number(after, 4)}" for name, before, after in found)
    known = [(before, after) for _, before, after in found if before is not None and after is not None]
    holds = all(better(before, after) for before, after in known) if len(known) == len(found) else None
    return Claim(text, holds, numbers if known else "")
