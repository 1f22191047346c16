import numpy as np
import torch
import torch.nn.functional as F

from fedhet import data
from fedhet.data.examples import Normalise, crop_and_flip, flip_crop_brighten_blur, resized


class TestDigits:
    def test_split_is_fixed_stratified_and_complete(self) -> None:
        from sklearn.datasets import load_digits

        dataset = data.load("digits")
        images, labels = load_digits(return_X_y=True)
        assert (len(dataset.train), len(dataset.test)) == (1442, 355)
        found = torch.cat([dataset.train.inputs, dataset.test.inputs]).flatten(1).numpy().astype(float)
        assert sorted(map(tuple, found)) == sorted(map(tuple, images))
        test_share = torch.bincount(dataset.test.labels) / torch.from_numpy(np.bincount(labels))
        assert test_share.min() > 0.19
        assert test_share.max() < 0.21


class TestNormalise:
    def test_by_channel(self) -> None:
        images = torch.randint(256, (4, 3, 5, 5), dtype=torch.uint8)
        mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
        expected = (images / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        torch.testing.assert_close(Normalise(255.0, mean, std)(images), expected)


def test_input_size() -> None:
    small = data.load("digits", input_size=16)
    batch = small.transform(small.test.inputs[:2])
    assert small.input_shape == batch.shape[1:] == (1, 16, 16)
    assert torch.equal(small.test.inputs, data.load("digits").test.inputs)
    plain = resized(torch.full((2, 3, 9, 9), 0.3), torch.Tensor.float, 4)
    assert torch.allclose(plain, torch.full((2, 3, 4, 4), 0.3))


class TestCropAndFlip:
    def test_every_image_is_a_crop_of_its_reflected_self(self) -> None:
        images = torch.randint(256, (64, 3, 16, 16), dtype=torch.uint8)
        out = crop_and_flip(images, torch.Generator().manual_seed(0))
        assert (out.shape, out.dtype) == (images.shape, torch.uint8)
        padded = F.pad(images.float(), (4, 4, 4, 4), mode="reflect").to(torch.uint8)
        # (64, 9 * 9, 3, 16, 16): every crop of every image, then the same mirrored.
        crops = padded.unfold(2, 16, 1).unfold(3, 16, 1).permute(0, 2, 3, 1, 4, 5).flatten(1, 2)
        straight = (crops == out[:, None]).flatten(2).all(2)
        mirrored = (crops.flip(-1) == out[:, None]).flatten(2).all(2)
        assert torch.all(straight.any(1) ^ mirrored.any(1))
        assert 16 < straight.any(1).sum() < 48
        assert len((straight | mirrored).int().argmax(1).unique()) > 30


def test_black_borders() -> None:
    images = torch.randint(1, 256, (40, 3, 32, 32), dtype=torch.uint8)
    reflected, black = (
        crop_and_flip(images, torch.Generator().manual_seed(3), reflect=reflect) for reflect in (True, False)
    )
    assert black.dtype == torch.uint8
    inside = black != 0
    assert torch.equal(black[inside], reflected[inside])
    outside = ~inside[:, 0]
    assert 0.05 < outside.float().mean() < 0.25
    # What is outside is whole rows and columns at the border.
    assert torch.equal(outside, outside.all(2)[:, :, None] | outside.all(1)[:, None, :])


def test_fedharms_augmentation():
    ramp = (100 + 3 * torch.arange(16))[:, None] + torch.zeros(16)
    images = ramp.to(torch.uint8).expand(400, 3, 16, 16)
    out = flip_crop_brighten_blur(images, torch.Generator().manual_seed(0))
    assert out.shape == images.shape
    assert out.dtype == torch.uint8
    assert torch.equal(out, flip_crop_brighten_blur(images, torch.Generator().manual_seed(0)))
    rising = (out[:, 0, 12, 8].int() > out[:, 0, 4, 8].int()).float().mean()
    assert 0.4 < rising < 0.6
    mean = out.float().mean((1, 2, 3)) / images[0].float().mean()
    assert 0.7 < mean.min() < 0.85
    assert 1.15 < mean.max() < 1.3
    # A single light pixel: blurred in half of the images, and what it loses its neighbours get.
    point = torch.zeros(400, 1, 16, 16, dtype=torch.uint8)
    point[:, :, 8, 8] = 200
    spread = flip_crop_brighten_blur(point, torch.Generator().manual_seed(1)).flatten(1)
    lit = (spread > 0).sum(1)
    assert 0.3 < (lit > 1).float().mean() < 0.6
    assert (spread.float().sum(1) / 200).sub(1).abs().max() < 0.25
    black_and_white = torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)
    assert flip_crop_brighten_blur(black_and_white, torch.Generator().manual_seed(2)).min() > 200
