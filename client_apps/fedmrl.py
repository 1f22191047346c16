"""Client side of FedMRL: trains both networks and the projector; evaluates the client's own head."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.client import Loss, Payload, Step, Term
from fedhet.errors import ModelError
from fedhet.models.representation import by_name
from fedhet.strategies.fedmrl import Keys

from .families.small_network import SMALL, Pair, Projected


class Fused(Pair):
    """The client's and the shared network, whose heads use the first entries of one fused representation.

    A forward pass returns the outputs of the client's network. `heads` are the names of the heads of the client's and
    the shared network (`small`), `widths` their inputs' widths. `pool` reduces a text's fused token vectors to one.
    """

    def __init__(
        self,
        network: nn.Module,
        small: nn.Module,
        heads: tuple[str, str],
        widths: tuple[int, int],
        dtype: torch.dtype,
        pool: Callable[[Tensor, Mapping[str, Any]], Tensor],
    ) -> None:
        super().__init__(network, small, nn.Linear(sum(widths), max(widths), dtype=dtype))
        self.heads = heads
        self.widths = widths
        self.pool = pool

    def forward(self, inputs: Tensor) -> Tensor:
        own_head, small_head = self.heads
        own_width, small_width = self.widths

        def fuse(representation: Tensor) -> Tensor:
            fused = representation

            def fuse_shared(shared: Tensor) -> Tensor:
                nonlocal fused
                pooled = shared if shared.shape[1] == small_width else F.adaptive_avg_pool1d(shared, small_width)
                if representation.ndim == 3:  # of each token
                    pooled = pooled[:, None].expand(-1, representation.shape[1], -1)
                fused = self.projector(torch.cat([pooled.to(representation.dtype), representation], -1))
                return self.pool(fused, by_name((inputs,), {}))[:, :small_width].to(shared.dtype)

            with _replaced_input(self.small.get_submodule(small_head), fuse_shared):
                self.small(inputs)
            return fused[..., :own_width]

        with _replaced_input(self.own.get_submodule(own_head), fuse):
            outputs: Tensor = self.own(inputs)
        return outputs


@contextmanager
def _replaced_input(head: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        return (change(next(iter((*args, *kwargs.values())))),), {}

    with head.register_forward_pre_hook(hook, with_kwargs=True):
        yield


class FedMRL(Projected[Keys]):
    def join(self, width: int, small_width: int, dtype: torch.dtype) -> Fused:
        nested = self.options.width or small_width
        if isinstance(head := self.client.model.get_submodule(self.client.head), nn.modules.conv._ConvNd):
            kind = type(head).__name__
            raise ModelError(f"fedmrl needs an nn.Linear as head, but {self.client.head!r} is a {kind}: replace it")
        heads = self.client.head, self.small_head
        pool = self.client.representation.pool
        pair = Fused(self.client.model, self.auxiliary, heads, (width, nested), dtype, pool)
        if nested != small_width:
            head = self.auxiliary.get_submodule(self.small_head)
            if not self.small_head or not isinstance(head, nn.Linear):
                kind = type(head).__name__
                raise ModelError(f"fedmrl.width needs an nn.Linear as head of the shared network, not {kind}: unset it")
            placed = nn.Linear(nested, head.out_features, bias=head.bias is not None, dtype=head.weight.dtype)
            self.auxiliary.set_submodule(self.small_head, placed.to(head.weight.device))
        return pair

    def terms(self, payload: Payload) -> tuple[Loss, ...]:
        return (Term(nested, captures=self.captures, weighted=True),)

    def evaluate(self, when: str) -> Callable[[Tensor], Tensor]:
        return self.pair.eval()


def nested(step: Step) -> Tensor:
    """Return the task's loss of the shared network's outputs in a step."""
    return step.loss(step.captured[SMALL])
