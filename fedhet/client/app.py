"""The client side's runtime: one ClientApp for every method, around the method's client side."""

from collections.abc import Sequence
from typing import Any

from fedhet import given, registry
from fedhet.client.application import Application
from fedhet.client.clients import Clients
from fedhet.flower import ClientApp
from fedhet.flower.mods import clips, in_flowers_format
from fedhet.method import Method
from fedhet.task import get_task


def make_client_app(
    model: Any = None,
    data: Any = None,
    *,
    task: str | None = None,
    methods: Sequence[Method] = (),
    mods: list[Any] | None = None,
) -> ClientApp:
    """A Flower ClientApp that serves every method of fedhet; the server tells it which.

    Args:
        model: from a `ClientInfo` to any `nn.Module`, or what else `fedhet.given.model_function` takes; by default the
            configured architecture. Its initial weights are drawn from torch's global generator, which is seeded for
            each client. Of outputs that are a tuple the first counts, of an object its `.logits`.
        data: from a `ClientInfo` to the client's data: a `ClientData`, or (train, test), or a mapping with `train`,
            `test` and optionally `public` (the public dataset: inputs, or inputs and labels), `common` (the common
            test set), `validation` and `augment` (from a training batch, and a generator if it takes one, to a batch);
            each part in a form that `fedhet.data.own` knows. Inputs go to the model as they are, but bytes are scaled
            to [0, 1]. By default the configured data set's part.
        task: `classification`, `multi-label`, `next-character` or `regression`, for data of one's own; by default what
            labels and outputs look like.
        methods: methods of one's own that no installed package announces.
        mods: Flower mods around every message, and those of Flower's that clip and add noise (`LocalDpMod`,
            `fixedclipping_mod`, `adaptiveclipping_mod`) around training alone, which they are made for.

    Raises:
        FedhetError: a method goes by the name of another, there is no such task, or `model` or `data` is none.
    """
    for method in methods:
        registry.give(method)
    clipping = [mod for mod in mods or () if clips(mod)]
    app = ClientApp(mods=[in_flowers_format, *(mod for mod in mods if mod not in clipping)] if mods else None)
    clients = Clients(given.model_function(model), given.data_function(data), get_task(task) if task else None)
    application = Application(clients, mods=bool(mods), clipped=bool(clipping))
    app.query()(application.query)
    app.train(mods=clipping)(application.train)
    app.evaluate()(application.evaluate)
    return app
