"""The recipe of U-Net on CamVid: frames, scores and the section."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from multitudes.methods.smoothing import Smooth
from recipes import camvid, camvid_data
from recipes.camvid_data import CLASSES, UNLABELLED, Crops, Frames
from recipes.report import camvid as report
from recipes.report.raw import Raw
from tests.recipes.recipe_cases import raw_of, smoke, with_data


def made_up(names: list[str], height: int = 8, width: int = 12) -> Frames:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (len(names), 3, height, width), generator=generator, dtype=torch.uint8)
    labels = torch.randint(CLASSES + 1, (len(names), height, width), generator=generator, dtype=torch.uint8)
    return Frames(images, labels, tuple(names))


# -- data --------------------------------------------------------------------------------------------------


def write(path: Path, frames: Frames, order: list[int]) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = pytest.importorskip("PIL.Image")

    def coded(pixels: np.ndarray, name: str) -> dict[str, Any]:
        file = io.BytesIO()
        image.fromarray(pixels).save(file, "png")
        return {"bytes": file.getvalue(), "path": name}

    images = [coded(frames.images[i].permute(1, 2, 0).numpy(), frames.names[i]) for i in order]
    labels = [coded(frames.labels[i].numpy(), frames.names[i]) for i in order]
    pq.write_table(pa.table({"image": images, "label": labels}), path)


def test_frames_are_read_in_the_order_of_their_videos(tmp_path: Path) -> None:
    frames = made_up(["a_f0030.png", "a_f0060.png", "a_f0090.png", "a_f0300.png", "b_7.png", "b_9.png"])
    write(tmp_path / "some.parquet", frames, [4, 2, 5, 0, 3, 1])
    read = camvid_data.read(tmp_path / "some.parquet")
    assert read.names == frames.names and read.fingerprint == frames.fingerprint
    assert torch.equal(read.images, frames.images) and torch.equal(read.labels, frames.labels)
    assert camvid_data.sequences(read.names) == [range(0, 3), range(3, 4), range(4, 6)]
    first = camvid_data.read(tmp_path / "some.parquet", first=1)
    assert first.names == ("a_f0030.png", "a_f0300.png", "b_7.png")
    small = camvid_data.read(tmp_path / "some.parquet", every=5, shrink=2)
    assert small.names == ("a_f0030.png", "b_9.png")
    means = frames.images[[0, 5]].float().unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).mean((3, 5))
    assert (small.images - means).abs().max() <= 0.5
    assert torch.equal(small.labels, frames.labels[[0, 5], 1::2, 1::2])


def test_a_wrong_frame_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"must be like 0001TP_008550.png, got 'frame.png'"):
        camvid_data.place("frame.png")


def test_a_fingerprint_depends_on_pixels_and_names() -> None:
    frames = made_up(["a_1.png", "a_2.png"])
    found = {frames.fingerprint, made_up(["a_1.png", "a_3.png"]).fingerprint}
    frames.labels[1, 3, 4] += 1
    found.add(frames.fingerprint)
    assert len(found) == 3


def test_classes_weigh_the_median_frequency_over_their_own() -> None:
    labels = torch.full((2, 4, 5), UNLABELLED)
    labels[0, 0] = 0  # the first frame: 5 of 10 labelled pixels
    labels[0, 1] = 1
    labels[1, 0, :4] = 1  # the second: 4 of 8
    labels[1, 1, :4] = 2
    labels[1, 1, 0] = 3  # 1 of 8
    frequencies = torch.tensor([5 / 10, 9 / 18, 3 / 8, 1 / 8])
    expected = torch.zeros(CLASSES)
    expected[:4] = 3 / 8 / frequencies
    torch.testing.assert_close(camvid_data.balanced(labels), expected)


def test_images_and_labels_are_cut_to_the_same_windows() -> None:
    frames = made_up(["a_1.png", "a_2.png", "a_3.png"])
    windows = [(2, 0, 5, 1), (0, 3, 0, 0), (2, 2, 7, 0)]
    images, labels = camvid_data.cut(frames, torch.tensor(windows).T, (4, 5))
    assert images.is_contiguous(memory_format=torch.channels_last)
    for image, label, (which, down, right, mirrored) in zip(images, labels, windows, strict=True):
        turned = [2] if mirrored else []
        assert torch.equal(image, frames.images[which, :, down : down + 4, right : right + 5].flip(turned))
        assert torch.equal(label[None], frames.labels[which, None, down : down + 4, right : right + 5].flip(turned))


def test_an_epoch_has_every_frame_once() -> None:
    frames = made_up([f"a_{number}.png" for number in range(7)], 2, 3)
    mean, std = torch.full((1, 3, 1, 1), 100.0), torch.full((1, 3, 1, 1), 50.0)
    crops = Crops(frames, mean, std, (2, 3), batch_size=3)
    torch.manual_seed(0)
    batches = list(crops)
    assert [len(x) for x, _ in batches] == [3, 3, 1] and len(crops) == 3
    seen = {tuple((x * std + mean).round().flatten().sort().values.tolist()) for batch, _ in batches for x in batch}
    assert seen == {tuple(image.float().flatten().sort().values.tolist()) for image in frames.images}
    torch.manual_seed(0)
    assert all(torch.equal(x, again) for (x, _), (again, _) in zip(batches, crops, strict=True))


# -- measuring ---------------------------------------------------------------------------------------------


def test_networks_smooth_before_poolings_and_share_their_initialisation() -> None:
    nets = {piece: camvid.network(piece, width=2) for piece in camvid.PIECES}
    for piece, net in nets.items():
        kernels = {name: layer.blur.kernel for name, layer in net.named_modules() if isinstance(layer, Smooth)}
        kernel = (1, 1) if piece.endswith("smooth") else (1, 2, 1) if piece.endswith("aligned") else None
        assert kernels == (dict.fromkeys([f"pool{k}.smooth" for k in (1, 2, 3, 4)], kernel) if kernel else {})
        assert torch.equal(net.fc.weight, nets["dnn"].fc.weight)
        assert net.predict(torch.zeros(1, 3, 45, 60), draws=1).probs.shape == (1, CLASSES, 45, 60)  # as 360 x 480: odd


def test_convolutions_in_bfloat16_predict_the_same_and_draw_side_by_side(recwarn: pytest.WarningsRecorder) -> None:
    net = camvid.network("mc_dropout_smooth", width=4)
    x = torch.randn(1, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    net.train()
    with torch.no_grad():
        net(x.repeat(4, 1, 1, 1))  # gives the norms statistics
    p = net.predict(x, draws=4, seed=1).probs
    camvid.convolve_in_bfloat16(net)
    half = net.predict(x.bfloat16(), draws=4, seed=1)
    assert half.predictions.dtype == torch.bfloat16
    torch.testing.assert_close(half.probs, p, rtol=0.05, atol=0.01)
    assert not [warning for warning in recwarn if "vmap" in str(warning.message)]


@pytest.mark.parametrize("decay", [None, 0.8])
def test_the_scores_of_a_video_equal_loops(decay: float | None) -> None:
    video = made_up(["a_2.png", "a_4.png", "a_6.png", "b_2.png", "b_4.png"], 16, 16)
    mean, std = torch.full((1, 3, 1, 1), 128.0), torch.full((1, 3, 1, 1), 64.0)
    net = camvid.network("dnn", width=2)
    p = net.predict((video.images - mean) / std).probs.double()
    nll, right, stayed, confident = [], [], [], []
    for frames in ([0, 1, 2], [3, 4]):
        last = None
        for now, frame in enumerate(frames):
            ages = range(1 if decay is None else now + 1)
            weights = np.exp([-(decay or 0) * age for age in ages])
            mixed = sum(w * p[frame - age] for w, age in zip(weights / weights.sum(), ages, strict=True))
            label = video.labels[frame].long()
            seen = label != UNLABELLED
            nll += (-mixed.gather(0, label.clamp(max=CLASSES - 1)[None])[0].log())[seen].tolist()
            right += (mixed.argmax(0) == label)[seen].tolist()
            confident += mixed.amax(0)[seen].tolist()
            if last is not None:
                both = seen & (video.labels[frame - 1] != UNLABELLED)
                stayed += (mixed.argmax(0) == last)[both].tolist()
            last = mixed.argmax(0)
    bins = np.ceil(10 * np.array(confident))
    gaps = [abs(np.sum((np.array(right) - confident)[bins == k])) for k in range(1, 11)]
    found = camvid.measured(net, video, mean, std, draws=1, decay=decay)
    expected = {"nll": np.mean(nll), "accuracy": np.mean(right), "consistency": np.mean(stayed)}
    expected["ece"] = sum(gaps) / len(right)
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_the_description_of_a_video() -> None:
    video = made_up(["a_2.png", "a_4.png", "a_6.png", "b_2.png"])
    video.labels[:] = 3
    video.labels[2, 0, :] = 4
    video.labels[1, 1, :] = UNLABELLED
    steps = 2 * (8 - 1) * 12
    expected = {"sequences": [3, 1], "step": 2, "consistency": pytest.approx(1 - 12 / steps, rel=1e-4)}
    assert camvid.described(video) == expected


# -- the section -------------------------------------------------------------------------------------------


def write_raw(folder: Path, pieces: dict[str, float]) -> Raw:
    """Pieces whose NLL is the given one, a little less smoothed in time."""
    results = {}
    for piece, nll in pieces.items():
        passes = [(1, None), (30, None), (1, 0.8), (1, 1.6)] if piece.startswith("mc") else [(1, None), (1, 0.8)]
        rows = [
            {"video": video, "draws": draws, "decay": decay, "nll": nll + 0.05 / draws - (0.04 if decay else 0),
             "accuracy": 0.9, "ece": 0.05, "mean_iou": 0.6, "consistency": 0.96 if decay else 0.95}
            for video in ("test", "val")
            for draws, decay in passes
        ]  # fmt: skip
        settings = {"size": [360, 480], "crop": [240, 320], "epochs": 40, "batch_size": 4, "frames": 367, "lr": 0.001}
        results[piece] = {
            "settings": settings | {"width": 64, "draws": 30},
            "videos": {name: {"sequences": [3, 4], "step": 2, "consistency": 0.95} for name in ("test", "val")},
            "rows": rows,
            "loss": nll / 2,
        }
    return raw_of(folder, results)


def test_the_section_has_the_papers_numbers_beside_ours(tmp_path: Path) -> None:
    raw = write_raw(tmp_path, {"dnn": 0.5, "dnn_smooth": 0.45, "mc_dropout": 0.4, "mc_dropout_smooth": 0.42})
    section = report.section(raw)
    assert "| U-Net | 1 (1) | 0.550 (0.354) | 90.0 (92.3) | 5.00 (4.95) | 95.0 (95.1) | 60.0 |" in section.text
    assert "| MC dropout + SPAT | 30 (50) | 0.422 (0.284) |" in section.text
    assert "| MC dropout + SPAT + TEMP | 1 (1) | 0.430 (0.260) |" in section.text
    assert "| MC dropout + TEMP, e^-1.6 | 1 | 0.410 |" in section.text
    assert "3 and 4 frames, one every 0.067 s" in section.text
    assert "three points" not in section.text
    assert "U-Net 0.250, U-Net + SPAT 0.225, MC dropout 0.200, MC dropout + SPAT 0.210." in section.text
    claims = {claim.text: claim for claim in section.claims}
    spatial = claims["CamVid, validation video: spatial smoothing lowers the NLL"]
    assert spatial.holds is False and spatial.numbers == "U-Net 0.5500 to 0.5000; MC dropout 0.4017 to 0.4217"
    assert claims["CamVid, test frames: temporal smoothing raises consistency"].holds is True
    assert claims["CamVid, test frames: temporal smoothing lowers the NLL"].holds is False  # one draw against 30


def test_the_section_includes_the_aligned_blur(tmp_path: Path) -> None:
    text = report.section(write_raw(tmp_path, {"dnn": 0.5, "dnn_aligned": 0.45})).text
    assert "| U-Net + SPAT (1, 2, 1) | 1 | 0.500 |" in text and "| U-Net + SPAT (1, 2, 1) + TEMP | 1 | 0.460 |" in text
    assert "SPAT by a kernel of three points" in text and "which shift nothing" not in text
    text = report.section(write_raw(tmp_path, {"dnn": 0.5, "dnn_smooth": 0.6, "dnn_aligned": 0.45})).text
    assert "U-Net's NLL is 0.500 and 0.500 on the validation video and the test frames, by two 0.650 and 0.650" in text


def test_the_section_works_with_some_pieces(tmp_path: Path) -> None:
    section = report.section(write_raw(tmp_path, {"dnn": 0.5, "dnn_smooth": 0.45}))
    assert "| U-Net + SPAT + TEMP | 1 (1) | 0.460 (0.278) |" in section.text and "| MC dropout" not in section.text
    assert {claim.holds for claim in section.claims} == {None}


def test_the_paper_finds_both_smoothings_complementary() -> None:
    for family in report.FAMILIES:
        smooth = f"{family}_smooth"
        nll = {key: row[1] for key, row in report.PAPER.items() if key[0] in (family, smooth)}
        assert min(nll, key=nll.__getitem__) == (smooth, True) and max(nll, key=nll.__getitem__) == (family, False)


# -- everything --------------------------------------------------------------------------------------------


@with_data("camvid")
def test_the_recipe_at_smoke_scale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = smoke(camvid.recipe.run, camvid.PIECES, tmp_path, capsys)
    for piece in camvid.PIECES:
        result = raw[piece]
        assert result["videos"]["test"]["step"] == 30 and result["videos"]["val"]["step"] == 2
        assert result["videos"]["test"]["consistency"] < 0.9 < result["videos"]["val"]["consistency"]
        for row in result["rows"]:
            assert row["accuracy"] > 2 / CLASSES and row["nll"] < math.log(CLASSES)
        for video in camvid.VIDEOS:
            plain, *_, fast, _ = [row["consistency"] for row in result["rows"] if row["video"] == video]
            assert fast > plain
    assert sum(claim.holds is None for claim in report.section(raw).claims) == 0
