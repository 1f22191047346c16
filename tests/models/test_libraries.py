import sys

import pytest
import torch
from torch import nn

from fedhet import models
from fedhet.errors import ModelError
from fedhet.models import registry


def test_grey_images_change_the_first_convolution_only() -> None:
    torch.manual_seed(0)
    grey, colour = (models.build("torchvision/resnet18", (channels, 32, 32), 7).state_dict() for channels in (1, 3))
    assert grey["conv1.weight"].shape == (64, 1, 7, 7)
    assert {k: v.shape for k, v in grey.items()} == {k: v.shape for k, v in colour.items()} | {
        "conv1.weight": grey["conv1.weight"].shape
    }


def test_unsuitable_inputs_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"model 'torchvision/alexnet': the model cannot take images of .* set input-size"
    ):
        models.build("torchvision/alexnet", (1, 32, 32), 7)
    with pytest.raises(ModelError, match=r"needs images .*, not \(80,\): use another model"):
        models.build("torchvision/resnet18", (80,), 80)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    for ask in (models.expand, lambda name: models.build(name, (1, 32, 32), 7)):
        with pytest.raises(
            ModelError, match="unknown model 'torchvision/resnt18'; did you mean 'torchvision/resnet18'"
        ):
            ask("torchvision/resnt18")
    with pytest.raises(ModelError, match="unknown model 'keras/resnet50'"):
        models.expand("keras/resnet50")


def test_timm() -> None:
    pytest.importorskip("timm")
    assert models.build("timm/resnet18", (1, 32, 32), 7)(torch.randn(3, 1, 32, 32)).shape == (3, 7)
    with pytest.raises(ModelError, match="did you mean 'timm/resnet"):
        models.expand("timm/resnet35x")


def test_timm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModelError, match="need timm, .*: run pip install timm"):
        models.expand("timm/resnet18")


def test_a_registered_name_comes_before_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    models.register_model("torchvision/resnet18")(lambda input_shape, classes: nn.Linear(8, classes))
    assert "torchvision/resnet18" in models.names()
    assert isinstance(models.build("torchvision/resnet18", (8,), 2), nn.Linear)
    assert models.expand("torchvision/resnet18, torchvision/resnet34")[1] == "torchvision/resnet34"
