"""The networks of the table, small forms of real ones, with initial weights and an example each."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torchvision import models as vision
from torchvision.models import convnext, densenet, maxvit, resnet, swin_transformer, vision_transformer

from . import own

CLASSES = 5
Build = Callable[[], nn.Module]


def _timm(name: str, **options: object) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)


def _images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size)


def _tokens() -> Tensor:
    tokens = torch.randint(1, 50, (4, 12))
    tokens[1:, 9:] = 0
    return tokens


def _convnext() -> nn.Module:
    sizes = ((4, 8, 1), (8, 12, 1), (12, 16, 1), (16, None, 1))
    return convnext.ConvNeXt([convnext.CNBlockConfig(*each) for each in sizes], num_classes=CLASSES)


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(CLASSES, 32, patch_size=8, num_blocks=2, embed_dim=16)


def _poolformer() -> nn.Module:
    from timm.models.metaformer import GroupNorm1, MetaFormer, Pooling

    sizes = {"depths": (1, 1, 1, 1), "dims": (8, 12, 16, 24)}
    return MetaFormer(
        num_classes=CLASSES, **sizes, token_mixers=Pooling, norm_layers=GroupNorm1, use_mlp_head=False, mlp_act=nn.GELU
    )


IMAGES: dict[str, tuple[Build, int]] = {
    "resnet": (partial(resnet.ResNet, resnet.BasicBlock, [1, 1, 1, 1], CLASSES), 32),
    "resnext": (partial(resnet.ResNet, resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=8), 32),
    "densenet": (partial(densenet.DenseNet, 8, (2, 2, 2), 16, num_classes=CLASSES), 32),
    "googlenet": (partial(vision.googlenet, num_classes=CLASSES, init_weights=True), 64),
    "squeezenet": (partial(vision.squeezenet1_1, num_classes=CLASSES), 64),
    "mobilenet_v2": (partial(vision.mobilenet_v2, num_classes=CLASSES, width_mult=0.25), 32),
    "mobilenet_v3": (partial(vision.mobilenet_v3_small, num_classes=CLASSES), 32),
    "mnasnet": (partial(vision.mnasnet0_5, num_classes=CLASSES), 32),
    "shufflenet": (partial(vision.shufflenet_v2_x0_5, num_classes=CLASSES), 32),
    "efficientnet": (partial(vision.efficientnet_b0, num_classes=CLASSES), 32),
    "regnet": (partial(vision.regnet_y_400mf, num_classes=CLASSES), 32),
    "convnext": (_convnext, 32),
    "swin": (
        partial(swin_transformer.SwinTransformer, [2, 2], 8, [1, 1, 1, 1], [1, 1, 2, 2], [2, 2], num_classes=CLASSES),
        32,
    ),
    "vit": (partial(vision_transformer.VisionTransformer, 32, 8, 2, 2, 16, 32, num_classes=CLASSES), 32),
    "maxvit": (partial(maxvit.MaxVit, (32, 32), 8, 2, [8, 16], [1, 1], 4, 0.0, num_classes=CLASSES), 32),
    "timm/vit": (
        partial(_timm, "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        32,
    ),
    "timm/deit": (
        partial(
            _timm, "deit_tiny_distilled_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2
        ),
        32,
    ),
    "timm/mixer": (_mixer, 32),
    "timm/poolformer": (_poolformer, 64),
    "timm/edgenext": (
        partial(_timm, "edgenext_xx_small", depths=(1, 1, 2, 1), dims=(8, 16, 16, 24), heads=(2, 2, 2, 2)),
        64,
    ),
    "timm/mobilevit": (partial(_timm, "mobilevit_xxs"), 64),
    "timm/nf_regnet": (partial(_timm, "nf_regnet_b0"), 32),
    "timm/xcit": (
        partial(_timm, "xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        32,
    ),
    "timm/cait": (
        partial(_timm, "cait_xxs24_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        32,
    ),
    "timm/beit": (
        partial(_timm, "beit_base_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2),
        32,
    ),
    "timm/ghostnet": (partial(_timm, "ghostnet_050"), 32),
    "timm/res2net": (partial(_timm, "res2net50_26w_4s", layers=(1, 1, 1, 1)), 32),
    "timm/skresnet": (partial(_timm, "skresnet18", layers=(1, 1, 1, 1)), 32),
    "timm/convnext": (partial(_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 24)), 32),
    "unet": (own.UNet, 16),
    "calibrated": (own.Calibrated, 16),
}
OTHERS: dict[str, tuple[Build, Callable[[], Tensor]]] = {
    "textcnn": (own.TextCNN, _tokens),
    "lstm": (partial(own.Recurrent, nn.LSTM, words=True), _tokens),
    "padded transformer": (own.Padded, _tokens),
    "gpt": (own.GPT, _tokens),
    "gru": (partial(own.Recurrent, nn.GRU, words=False, bidirectional=True), lambda: torch.randn(4, 16, 8)),
    "series": (own.series, lambda: torch.randn(4, 8, 16)),
    "weight norm": (own.WeightNorm, lambda: torch.randn(4, 8, 16)),
    "table": (own.table, lambda: torch.randn(4, 9)),
    "gated table": (own.Gated, lambda: torch.randn(4, 9)),
    "ft-transformer": (own.FTTransformer, lambda: torch.randn(4, 9)),
    "dense gcn": (own.DenseGCN, lambda: torch.randn(4, 7, 4)),
    "dense gin": (own.DenseGIN, lambda: torch.randn(4, 7, 4)),
    "edge gcn": (own.EdgeGCN, lambda: torch.randn(4, 7, 4)),
}
NETWORKS: dict[str, tuple[Build, Callable[[], Tensor]]] = {
    **{name: (build, partial(_images, size)) for name, (build, size) in IMAGES.items()},
    **OTHERS,
}
