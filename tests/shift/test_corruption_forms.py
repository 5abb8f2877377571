"""Each corruption of images equals a closed form, a loop, SciPy or Pillow."""

from __future__ import annotations

import colorsys
import sys
from io import BytesIO

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
from PIL import Image
from torch import Tensor

from multitudes.shift import blur, corrupt, digital, filters, noise, weather
from tests.shift.test_corruptions import BLURS, SEVERITIES, natural, published

# -- noise -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [64, 200])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_noise_has_its_mean_and_variance(side: int, severity: int) -> None:
    # Grey 0.25 is far from both ends only for little noise: compare before clipping.
    value = 0.25
    x = torch.full((8, 3, side, side), value, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    c, photons, s = (published(name, side, severity) for name in ("gaussian_noise", "shot_noise", "speckle_noise"))
    for function, constant, variance in (
        (noise.gaussian_noise, c, c**2),
        (noise.shot_noise, photons, value / photons),
        (noise.speckle_noise, s, (s * value) ** 2),
    ):
        out = function(x, generator, constant)
        count = out.numel()
        assert float(out.mean()) == pytest.approx(value, abs=5 * (variance / count) ** 0.5)
        # the fourth moment of a Poisson number of mean m is m (1 + 3 m), which bounds all three
        spread = variance * ((2 + 1 / (value * photons)) / count) ** 0.5
        assert float(out.var()) == pytest.approx(variance, abs=5 * spread)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_impulse_noise_replaces_equal_shares_by_0_and_1(severity: int) -> None:
    images = torch.full((16, 3, 64, 64), 0.5)
    out = corrupt(images, "impulse_noise", severity, seed=0)
    share = published("impulse_noise", 64, severity)
    for end in (0, 1):
        assert float((out == end).double().mean()) == pytest.approx(share / 2, abs=5 * (share / out.numel()) ** 0.5)
    assert bool(((out == 0) | (out == 1) | (out == 0.5)).all())


# -- blur --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLURS)
@pytest.mark.parametrize("side", [8, 32, 80])
def test_constant_images_stay_constant_under_blurs(name: str, side: int) -> None:
    images = torch.tensor([0.2, 0.5, 0.9]).reshape(1, 3, 1, 1).expand(2, 3, side, side)
    for severity in SEVERITIES:
        torch.testing.assert_close(corrupt(images, name, severity, seed=0), images, atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", [(32, 32), (8, 11), (70, 90)], ids=str)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_gaussian_blur_equals_scipy(shape: tuple[int, int], severity: int) -> None:
    images = natural(2, 3, *shape).double()
    sigma = published("gaussian_blur", max(shape), severity)
    expected = scipy.ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma), mode="nearest")
    np.testing.assert_allclose(corrupt(images, "gaussian_blur", severity).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("border", ["reflect", "mirror", "nearest"])
def test_filters_wider_than_the_image_equal_scipy(border: str) -> None:
    images = natural(1, 1, 9, 12)[0, 0].double()
    expected = scipy.ndimage.gaussian_filter(images.numpy(), 7.0, mode=border, truncate=3)
    np.testing.assert_allclose(filters.gaussian_filter(images, 7.0, border, 3), expected, atol=1e-12)
    kernel = torch.rand(21, 21, dtype=torch.float64)
    expected = scipy.ndimage.correlate(images.numpy(), kernel.numpy(), mode=border)
    np.testing.assert_allclose(filters.correlate(images, kernel, border), expected, atol=1e-10)


def test_a_sharp_disk_is_uniform_inside_its_circle() -> None:
    kernel = blur.disk(3, 0.1)
    inside = sum(i * i + j * j <= 9 for i in range(-3, 4) for j in range(-3, 4))
    assert int((kernel > 1e-6).sum()) == inside
    assert float(kernel.max()) == pytest.approx(1 / inside)


@pytest.mark.parametrize("reach", [1, 2, 4])
def test_glass_blur_exchanges_pixels_like_the_published_loop(reach: int) -> None:
    height, width, batch, rounds = 14, 17, 2, 2
    rows, columns = height - 2 * reach, width - 2 * reach
    moves = torch.randint(-reach, reach, (rounds, 2, batch, rows, columns), generator=torch.Generator().manual_seed(0))
    source = blur.exchange_pixels(height, width, reach, moves)
    for image in range(batch):
        pixels = [[h * width + w for w in range(width)] for h in range(height)]
        for round_ in range(rounds):
            for i, h in enumerate(range(height - reach, reach, -1)):
                for j, w in enumerate(range(width - reach, reach, -1)):
                    down, right = moves[round_, :, image, i, j].tolist()
                    there = pixels[h + down][w + right]
                    pixels[h + down][w + right] = pixels[h][w]
                    pixels[h][w] = there
        assert source[image].tolist() == [pixel for row in pixels for pixel in row]


def test_horizontal_and_vertical_motion_blurs_are_half_a_gaussian() -> None:
    x = torch.zeros(2, 1, 33, 33, dtype=torch.float64)
    x[:, :, 16, 16] = 1
    out = filters.motion(x, 6, 1.5, torch.tensor([0.0, 90.0]))
    half = np.exp(-0.5 * (np.arange(13) / 1.5) ** 2)
    half /= half.sum()
    expected = np.zeros((33, 33))
    expected[16, 16 - np.arange(13)] = half
    np.testing.assert_allclose(out[0, 0], expected, atol=1e-12)
    np.testing.assert_allclose(out[1, 0], expected.T, atol=1e-12)


@pytest.mark.parametrize("shape", [(32, 32), (33, 47), (80, 100)], ids=str)
def test_zoom_equals_scipy(shape: tuple[int, int]) -> None:
    image = natural(1, 1, *shape)[0, 0].double()
    for factor in (1, 1.05, 1.21, 2.5):
        crops = [int(np.ceil(side / factor)) for side in shape]
        middle = tuple(
            slice((side - crop) // 2, (side - crop) // 2 + crop) for side, crop in zip(shape, crops, strict=True)
        )
        enlarged = scipy.ndimage.zoom(image.numpy()[middle], factor, order=1)
        trims = [(got - side) // 2 for got, side in zip(enlarged.shape, shape, strict=True)]
        expected = enlarged[trims[0] : trims[0] + shape[0], trims[1] : trims[1] + shape[1]]
        np.testing.assert_allclose(filters.zoom(image, factor), expected, atol=1e-12)


# -- weather -----------------------------------------------------------------------------------------------


def hsv(image: Tensor) -> np.ndarray:
    return np.array([colorsys.rgb_to_hsv(*pixel) for pixel in image.flatten(1).T.tolist()])


def rgb(pixels: np.ndarray) -> np.ndarray:
    return np.array([colorsys.hsv_to_rgb(*pixel) for pixel in pixels])


@pytest.mark.parametrize("side", [16, 66])
def test_brightness_and_saturate_change_value_and_saturation(side: int) -> None:
    image = natural(1, 3, side, side).double()
    image[0, :, 0, 0], image[0, :, 0, 1] = 0, 0.4  # black, grey
    pixels = hsv(image[0])
    for severity in SEVERITIES:
        brighter, saturated = pixels.copy(), pixels.copy()
        brighter[:, 2] = np.clip(brighter[:, 2] + published("brightness", side, severity), 0, 1)
        factor, addition = published("saturate", side, severity)
        saturated[:, 1] = np.clip(saturated[:, 1] * factor + addition, 0, 1)
        for name, expected in (("brightness", brighter), ("saturate", saturated)):
            out = corrupt(image, name, severity)[0].flatten(1).T
            np.testing.assert_allclose(out, rgb(expected), atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("side", [32, 128])
def test_fog_on_a_constant_image_has_its_closed_form(severity: int, side: int) -> None:
    value, (thickness, _) = 0.5, published("fog", side, severity)
    out = corrupt(torch.full((3, 3, side, side), value), "fog", severity, seed=0)
    # where the cloud is 0, and where it is 1
    low, high = value**2 / (value + thickness), value
    torch.testing.assert_close(out.amin((1, 2, 3)), torch.full((3,), low))
    torch.testing.assert_close(out.amax((1, 2, 3)), torch.full((3,), high))


def test_plasma_is_the_diamond_square_algorithm() -> None:
    side, decay = 8, 3
    cloud = weather.plasma(torch.zeros(1, 1, side, side, dtype=torch.float64), decay, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    hand, wibble, step = np.zeros((side, side)), 100.0, side
    while step >= 2:
        half = step // 2
        for top, left, neighbours in (
            (half, half, [(-half, -half), (-half, half), (half, -half), (half, half)]),  # a square's corners
            (0, half, [(-half, 0), (half, 0), (0, -half), (0, half)]),  # a diamond's
            (half, 0, [(-half, 0), (half, 0), (0, -half), (0, half)]),
        ):
            places = [(row, column) for row in range(top, side, step) for column in range(left, side, step)]
            draws = 2 * torch.rand(len(places), generator=generator, dtype=torch.float64) - 1
            for (row, column), draw in zip(places, draws.tolist(), strict=True):
                known = [hand[(row + down) % side, (column + right) % side] for down, right in neighbours]
                hand[row, column] = sum(known) / 4 + wibble**2 * draw
        step, wibble = half, wibble / decay
    np.testing.assert_allclose(cloud[0, 0], (hand - hand.min()) / (hand.max() - hand.min()), atol=1e-12)


@pytest.mark.parametrize("severity", SEVERITIES)
def test_snow_whitens_and_adds_flakes_with_their_rotation(severity: int) -> None:
    red, green, blue = 0.1, 0.3, 0.05
    images = torch.tensor([red, green, blue]).reshape(1, 3, 1, 1).expand(2, 3, 64, 64)
    out = corrupt(images, "snow", severity, seed=0)
    kept = published("snow", 64, severity)[-1]
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    white = kept * images + (1 - kept) * (1.5 * grey + 0.5)
    flakes = out - white
    assert float(flakes.min()) > -1e-6 and float(flakes.max()) > 0.1
    if severity < 5:  # at 5 the flakes fall so far that they are everywhere
        assert float(flakes.min()) < 1e-6
    inner = (out < 1) & (out.flip(-2, -1) < 1)
    torch.testing.assert_close(flakes[inner], flakes.flip(-2, -1)[inner], atol=1e-6, rtol=0)


@pytest.mark.parametrize("side", [32, 100])
def test_ice_is_a_different_texture_for_each_image(side: int) -> None:
    texture = weather.ice(torch.zeros(3, 3, side, side), torch.Generator().manual_seed(0))
    assert texture.shape == (3, 1, side, side)
    assert texture.amin((1, 2, 3)).tolist() == [0, 0, 0] and texture.amax((1, 2, 3)).tolist() == [1, 1, 1]
    assert 0.1 < float(texture.mean()) < 0.7
    flat = texture.flatten(1)
    assert float(torch.corrcoef(flat).fill_diagonal_(0).abs().max()) < 0.5


def test_frost_on_a_black_image_is_weighted_ice() -> None:
    for side in (32, 80):
        for severity in SEVERITIES:
            out = corrupt(torch.zeros(1, 3, side, side), "frost", severity, seed=0)
            assert float(out[:, 2].max()) == pytest.approx(published("frost", side, severity)[1])


def test_mud_covers_part_of_the_image() -> None:
    images = natural(4, 3, 96, 96)
    out = corrupt(images, "spatter", 5, seed=0)
    covered = (out != images).any(1, keepdim=True)
    assert 0.1 < float(covered.float().mean()) < 0.9
    mud = torch.tensor([63, 42, 20]).reshape(1, 3, 1, 1) / 255
    left = ((out - mud).abs() - 0.2 * (images - mud).abs())[covered.expand_as(out)]
    assert float(left.max()) < 1e-6


def test_water_adds_light_up_to_its_strength() -> None:
    images = torch.full((8, 3, 96, 96), 0.2)
    for severity in (1, 2, 3):
        added = corrupt(images, "spatter", severity, seed=0) - images
        strength = published("spatter", 96, severity)[4]
        assert float(added.min()) > -1e-6
        torch.testing.assert_close(added[:, 2].amax((1, 2)), torch.full((8,), strength * 238 / 255))


@pytest.mark.parametrize("shape", [(1, 1, 40, 50), (1, 1, 60, 90)], ids=["many drops", "one drop"])
def test_the_relief_of_drops_equals_scipy(shape: tuple[int, ...]) -> None:
    wet = natural(*shape).double() > 0.45
    if shape[2] == 60:  # far from it the distance has its limit, 20
        wet = torch.zeros(shape, dtype=torch.bool)
        wet[..., 5:9, 5:12] = True
    drops = wet[0, 0].numpy()
    rims = drops & ~scipy.ndimage.binary_erosion(drops, border_value=1)
    assert np.array_equal(weather._rims(wet)[0, 0], rims)
    distance = np.minimum(scipy.ndimage.distance_transform_edt(~rims), 20)
    np.testing.assert_allclose(weather._distance(weather._rims(wet), 20, torch.float64)[0, 0], distance, atol=1e-12)
    levels = np.floor(scipy.ndimage.uniform_filter(distance, 3, mode="mirror") + 1e-3).astype(int)
    at_most = np.array([(levels <= value).sum() for value in range(21)])
    lowest = at_most[levels.min()]
    equal = np.round(255 * (at_most - lowest) / (levels.size - lowest))[levels]
    embossed = scipy.ndimage.correlate(equal, [[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], mode="mirror")
    expected = scipy.ndimage.uniform_filter(np.clip(embossed, 0, 255), 3, mode="mirror")
    np.testing.assert_allclose(weather._relief(wet, torch.float64)[0, 0], expected, atol=1e-9)


def test_equalising_keeps_constant_images() -> None:
    ramp = torch.arange(16).repeat_interleave(4).reshape(1, 1, 8, 8)
    assert weather._equalise(ramp, 21).unique().tolist() == [17 * step for step in range(16)]
    constant = torch.full((1, 1, 8, 8), 20)
    assert torch.equal(weather._equalise(constant, 21), constant)


# -- digital -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [32, 96])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_contrast_scales_the_distance_from_the_channel_mean(side: int, severity: int) -> None:
    images = natural(2, 3, side, side).double().numpy()
    c = published("contrast", side, severity)
    out = corrupt(torch.from_numpy(images), "contrast", severity).numpy()
    for image, got in zip(images, out, strict=True):
        for channel, got_channel in zip(image, got, strict=True):
            np.testing.assert_allclose(got_channel, channel.mean() + c * (channel - channel.mean()), atol=1e-12)


@pytest.mark.parametrize("shape", [(8, 8), (32, 32), (33, 47), (70, 101), (224, 224)], ids=str)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_pixelate_equals_pillow(shape: tuple[int, int], severity: int) -> None:
    height, width = shape
    image = natural(1, 1, height, width)
    share = published("pixelate", max(shape), severity)
    expected = Image.fromarray(image[0, 0].numpy())
    expected = expected.resize((int(width * share), int(height * share)), Image.Resampling.BOX)
    expected = expected.resize((width, height), Image.Resampling.BOX)
    np.testing.assert_allclose(corrupt(image, "pixelate", severity)[0, 0], np.array(expected), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", [(8, 8), (33, 47), (70, 70)], ids=str)
def test_jpeg_equals_pillow(channels: int, shape: tuple[int, int]) -> None:
    images = natural(2, channels, *shape)
    for severity in SEVERITIES:
        quality = published("jpeg_compression", max(shape), severity)
        out = corrupt(images, "jpeg_compression", severity)
        for image, got in zip(images, out, strict=True):
            pixels = np.round(image.permute(1, 2, 0).numpy() * 255).astype(np.uint8)
            file = BytesIO()
            Image.fromarray(pixels.squeeze()).save(file, "JPEG", quality=quality)
            expected = np.asarray(Image.open(file)).reshape(*shape, channels)
            assert np.array_equal((got.permute(1, 2, 0) * 255).round().numpy(), expected)


def test_jpeg_without_pillow_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match="pip install"):
        corrupt(torch.zeros(1, 1, 8, 8), "jpeg_compression", 1)


@pytest.mark.parametrize(("at_centres", "border"), [(True, "mirror"), (False, "reflect")])
def test_sampling_equals_scipy(at_centres: bool, border: str) -> None:
    image = natural(1, 1, 12, 17).double()
    places = torch.rand(1, 12, 17, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 50 - 20
    expected = scipy.ndimage.map_coordinates(
        image[0, 0].numpy(), [places[0, ..., 1].numpy(), places[0, ..., 0].numpy()], order=1, mode=border
    )
    np.testing.assert_allclose(digital._sample(image, places, at_centres)[0, 0], expected, atol=1e-10)


def test_the_affine_map_sends_moved_points_to_their_sources() -> None:
    x = torch.zeros(5, 3, 30, 48, dtype=torch.float64)
    matrix = digital._affine(x, 3.0, torch.Generator().manual_seed(0))
    there = torch.tensor([[34.0, 25, 1], [34, 5, 1], [14, 5, 1]], dtype=torch.float64)  # centre (24, 15), arm 10
    back = torch.linalg.inv(torch.cat([matrix, torch.tensor([0.0, 0, 1]).double().reshape(1, 3, 1).expand(5, 3, 1)], 2))
    moved = (there @ back)[..., :2] - there[:, :2]
    assert bool((moved.abs() <= 3).all()) and float(moved.abs().max()) > 2
    still = digital._affine(x, 0.0, torch.Generator().manual_seed(0))
    identity = torch.eye(3, 2, dtype=torch.float64).expand(5, 3, 2)
    torch.testing.assert_close(still, identity)
