"""Non-interference of a method at a deployed node: two nodes that differ in private data alone, side by side.

Non-interference: both nodes get the same messages, recorded, and changed by somebody hostile. What may not leave has no
part in their replies, so those are equal, byte for byte.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedhet.client.app import make_client_app
from fedhet.data import ClientData, Examples
from fedhet.flower import ArrayRecord, ClientApp, Context, Message, MetricRecord, RecordDict
from fedhet.flower.grid import FIRST_NODE
from fedhet.flower.insides import RUN_ID, be_server, identify
from fedhet.flower.messages import decode_arrays, encode_arrays, write_refusal
from fedhet.messages.protocol import JOIN
from fedhet.methods.method import KINDS, METRICS, STRUCTURE
from fedhet.setup import client_setup
from fedhet.setup.client_setup import ClientInfo
from fedhet.testing import Case

from .runs import RecordedRuns, where

COUNTS = ("num-examples", "test-examples", "validation-examples", "private-steps", "steps", "forwards")
"""Fields of a reply's metrics that are no metrics: the same for as many examples."""

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Last parts of names of BatchNorm's running statistics, in the built-in networks."""

configured = client_setup.data_of

NODE = 1
"""The node that is attacked, by its partition id."""

HOSTILE: dict[str, dict[str, Any]] = {
    "as it was": {},
    "single examples": {"samples-per-client": 2, "validation": 0.5, "batch-size": 11},
    "test sets": {"test-on": "both", "validation": 0.4, "evaluate-every": 1, "seed": 7},
}
"""Settings that somebody hostile has changed."""


def same_data(client: ClientInfo) -> ClientData:
    """Return the configured data as a user's data function would."""
    client_data, common = client_setup.data_of(client), client_setup.dataset_of(client.config).test
    train, test, common = (
        Examples(part.inputs[:].float() / 16, part.labels) for part in (client_data.train, client_data.test, common)
    )
    return ClientData(train, test, client_data.public, common)


def other_data(client: ClientInfo) -> ClientData:
    """Data of a client with as many examples as the configured ones, and nothing else in common."""
    same, generator = same_data(client), torch.Generator().manual_seed(1)

    def other(part: Examples) -> Examples:
        inputs = torch.rand(part.inputs[:].shape, generator=generator)
        return Examples(inputs, torch.randint(10, part.labels.shape, generator=generator))

    return replace(same, train=other(same.train), test=other(same.test))


def replaced(client: ClientInfo) -> ClientData:
    """Data of a client with as many examples of the configured data set's form as it has, and no others in common."""
    same, generator = configured(client), torch.Generator().manual_seed(1)

    def other(part: Examples) -> Examples:
        inputs = torch.randint(17, part.inputs[:].shape, generator=generator).to(part.inputs[:].dtype)
        return Examples(inputs, torch.randint(10, part.labels.shape, generator=generator))

    validation = other(same.validation) if same.validation else None
    return replace(same, train=other(same.train), test=other(same.test), validation=validation)


class Node:
    """A deployed node with a data function, the kinds that it allows (None: all) and a folder of state."""

    def __init__(self, data: Any, allow: str | None, folder: Path, **further: Any) -> None:
        self.app: ClientApp = make_client_app(data=data)
        config: dict[str, Any] = {"partition-id": NODE, "num-partitions": 4, "state-dir": str(folder)}
        # Classes have few examples, and a node trains only on those that have at least min-examples.
        config |= further if allow is None else {"allow": allow, "min-examples": 1, **further}
        self.context = Context(RUN_ID, FIRST_NODE + NODE, config, RecordDict(), {})

    def answers(self, messages: Sequence[tuple[str, RecordDict]]) -> Iterator[RecordDict]:
        """The replies to messages from elsewhere, each with its type; an error as the refusal that it is."""
        be_server()
        for type, content in messages:
            message = Message(content, self.context.node_id, type, group_id="1")
            identify(message, count(1))
            reply = self.app(message, self.context)
            yield reply.content if reply.has_content() else write_refusal(str(NODE), str(reply.error.reason))


def from_elsewhere(
    content: RecordDict, settings: Mapping[str, Any], request: Mapping[str, Any], scale: float = 1.0
) -> RecordDict:
    """A message as a server on another machine sends it, with other settings and other weights."""
    record = RecordDict(dict(content.items()))
    for name, group in content.array_records.items() if scale != 1.0 else ():
        arrays = decode_arrays(group).items()
        record[name] = encode_arrays({k: a * a.dtype.type(scale) if a.dtype.kind == "f" else a for k, a in arrays})
    texts = dict(content.config_records["request"])
    texts["settings"] = json.dumps(json.loads(str(texts["settings"])) | settings)
    texts["request"] = json.dumps(json.loads(str(texts["request"])) | {"here": "", "run": "elsewhere"} | request)
    record["request"] = type(content.config_records["request"])(texts)
    return record


def lost_state(reply: RecordDict) -> bool:
    """Whether a node refused a message because it lacks the state of a round, in which it did not take part."""
    return reply["report"].get("lost") is True


def leaving(content: RecordDict, sends: Mapping[str, str], without: set[str]) -> dict[str, Any]:
    """Return the values of a reply except those of some kinds, to compare them."""
    values: dict[str, Any] = {}
    for name, record in content.items():
        for key, value in record.items():
            if isinstance(record, MetricRecord):
                kind = STRUCTURE if key in COUNTS else METRICS
            elif isinstance(record, ArrayRecord):
                kind = sends.get(name, "weights")
                kind = "statistics" if kind == "weights" and key.endswith(STATISTICS) else kind
            else:
                kind = sends.get(key, STRUCTURE) if name == "values" else STRUCTURE
            if kind not in without:
                values[f"{name}/{key}"] = value
    return values


def sent_kinds(case: Case) -> set[str]:
    """Return the kinds that a method needs, except metrics."""
    return case.traits.kinds - {STRUCTURE, METRICS} | {"weights", "statistics"}


class Privacy:
    """Private data do not influence a node's replies."""

    def messages(
        self, case: Case, cache: RecordedRuns, request: Mapping[str, Any], **changes: Any
    ) -> list[tuple[str, RecordDict]]:
        """One message of each type and question that the node got in an ordinary run, in their order, changed.

        Behind them it is asked to join as an unseen client, if a method has such clients.
        """
        first: dict[tuple[str, str], tuple[str, RecordDict]] = {}
        for sent, reply in cache("normal").exchanges:
            if str(reply.content["report"]["client"]) != str(NODE):
                continue
            question = str(json.loads(str(sent["request"]["request"]))["question"])
            type = where(reply)[1]
            first.setdefault((type, question), (type, sent))
        messages = [(type, from_elsewhere(sent, request=request, **changes)) for type, sent in first.values()]
        if not case.traits.communicates or case.traits.scored == "received" or case.traits.averages_model:
            trains, unseen = dict(messages)["train"], {"unseen-clients": 1, "unseen-epochs": 0}
            messages.append(("query", from_elsewhere(trains, unseen, {"question": JOIN, "run": "another"})))
        return messages

    @pytest.mark.parametrize(
        "attack", ["as it was", *(pytest.param(each, marks=pytest.mark.slow) for each in list(HOSTILE)[1:])]
    )
    def test_private_data_do_not_influence_replies(
        self, attack: str, case: Case, cache: RecordedRuns, tmp_path: Path
    ) -> None:
        sends, kinds = case.traits.sends, sent_kinds(case)
        scale = 1.0 if attack == "as it was" else -30.0
        request = {} if attack == "as it was" else {"evaluate": True, "expected": -1}
        messages = self.messages(case, cache, request, settings=HOSTILE[attack], scale=scale)
        assert {type for type, _ in messages} == {"query", "train", "evaluate"}
        another = next(kind for kind in KINDS if kind not in kinds)
        allowed = [",".join(kinds), ",".join({*kinds, METRICS}), *kinds, METRICS, another, ""]
        for number, allow in enumerate(allowed[1:] if attack == "as it was" else allowed[:2]):
            nodes = [Node(data, allow, tmp_path / f"{number}-{data.__name__}") for data in (same_data, other_data)]
            for (type, _), one, other in zip(messages, *(node.answers(messages) for node in nodes), strict=True):
                seen, others = (leaving(each, sends, {*allow.split(",")}) for each in (one, other))
                differing = [key for key in {**seen, **others} if seen.get(key) != others.get(key)]
                assert differing == [], f"{type} with allow = {allow!r}"
                served = "refusal" not in one["report"]
                assert not served or allow, "nothing is served where nothing may leave"
                if number == 0 and attack == "as it was":
                    assert served or lost_state(one), one["report"]

    def test_allowing_the_sent_kinds_is_enough(self, case: Case, cache: RecordedRuns, tmp_path: Path) -> None:
        kinds = sent_kinds(case)
        for allow in (kinds, kinds | {METRICS}):
            node = Node(same_data, ",".join(allow), tmp_path / str(len(allow)))
            for reply in node.answers(self.messages(case, cache, {}, settings={})):
                assert "refusal" not in reply["report"] or lost_state(reply), reply["report"]
                metrics = [key for key in reply.get("metrics", {}) if key not in COUNTS]
                assert not metrics or METRICS in allow

    @pytest.mark.parametrize("attack", ["as it was", pytest.param("test sets", marks=pytest.mark.slow)])
    def test_noise_covers_all_that_depends_on_private_data(
        self, attack: str, case: Case, cache: RecordedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where training by DP-SGD does nothing, replies do not depend on the examples, or the method is refused."""

        def idle(self: Any, model: nn.Module, *_: Any) -> None:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

        def idle_sums(self: Any, vectors: Any, examples: Examples, classes: int, size: int) -> tuple[Tensor, Tensor]:
            width = vectors(torch.zeros_like(examples.at(slice(0, 1))[0])).shape[1]
            return torch.zeros(classes, width), torch.full((classes,), 20.0)

        monkeypatch.setattr("fedhet.training.privacy.Privacy.backward", idle)
        monkeypatch.setattr("fedhet.training.privacy.Privacy.class_sums", idle_sums)
        monkeypatch.setattr("secrets.randbits", lambda bits: 7)
        untrained = {"batch-norm": "re-estimate", "local-epochs": 0}
        settings = HOSTILE[attack] | (untrained if attack != "as it was" else {})
        request = {"evaluate": True, "expected": -1} if attack != "as it was" else {}
        messages, noise = self.messages(case, cache, request, settings=settings), {"dp-noise": 1.0, "dp-clip": 1.0}
        replies = []
        for data in (same_data, other_data):
            own = data if attack == "as it was" else None
            if own is None:  # the common test set is that of the data set
                monkeypatch.setattr(client_setup, "data_of", configured if data is same_data else replaced)
            replies.append([*Node(own, None, tmp_path / data.__name__, **noise).answers(messages)])
        for one, other in zip(*replies, strict=True):
            seen, others = (leaving(each, case.traits.sends, set()) for each in (one, other))
            assert [key for key in {**seen, **others} if seen.get(key) != others.get(key)] == []
