"""A node with a policy fixes for all runs its groups of examples, its random streams, and which examples there are."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from fedhet.client.clients import Clients
from fedhet.client.secret import NodeSecret, groups_of
from fedhet.config import configuration
from fedhet.data import ClientData, Examples
from fedhet.data.own import examples_of
from fedhet.errors import FedhetError, Refused
from fedhet.setup.client_setup import ClientInfo
from fedhet.tasks import Task
from fedhet.training.training import grouped_batches

LABELS = torch.tensor([0] * 25 + [1] * 9 + [2] * 10)
CLASSES = Task("classification").outputs


def data(labels=LABELS):
    part = Examples(torch.randn(len(labels), 4, generator=torch.Generator().manual_seed(0)), labels)
    return ClientData(part, part)


def rows(groups):
    return [group.tolist() for group in groups]


def test_groups_of_one_class():
    groups = groups_of(LABELS, 10, torch.Generator().manual_seed(0), by_class=True)
    assert sorted(len(group) for group in groups) == [10, 12, 13]
    assert all(len(LABELS[group].unique()) == 1 for group in groups)
    assert sorted(torch.cat(groups).tolist()) == [*range(25), *range(34, 44)]


def test_groups_without_classes():
    groups = groups_of(torch.randn(44, 3), 10, torch.Generator().manual_seed(0), by_class=False)
    assert [len(group) for group in groups] == [11] * 4
    assert sorted(torch.cat(groups).tolist()) == [*range(44)]


def test_batches_of_whole_groups():
    groups = groups_of(LABELS, 10, torch.Generator().manual_seed(0), by_class=True)
    for size, together in ((8, 1), (22, 2), (100, 3)):
        parts = list(grouped_batches(groups, size, torch.Generator().manual_seed(1)))
        assert sorted(torch.cat(parts).tolist()) == sorted(torch.cat(groups).tolist())
        whole = [[set(group.tolist()) <= set(part.tolist()) for group in groups] for part in parts]
        assert sum(map(sum, whole)) == len(groups)
        assert sum(whole[0]) == together


def test_secret_by_node(tmp_path):
    """A node that gets another name has the same groups of the same examples."""
    one, again = (NodeSecret(tmp_path / "one", name, "own") for name in ("north", "renamed"))
    other = NodeSecret(tmp_path / "other", "north", "own")
    assert one.seed == again.seed != other.seed
    grouped = [rows(each.grouped(data(), 10, CLASSES).train.groups) for each in (one, again, other)]
    assert grouped[0] == grouped[1] != grouped[2]


def test_groups_of_survival_data_have_events():
    """A step on one event would disclose its example."""
    events = torch.tensor([1.0] * 25 + [0.0] * 100)
    labels = torch.stack([torch.arange(125.0), events], 1)
    survival = Task("survival").outputs
    source = torch.Generator().manual_seed(0)
    groups = groups_of(labels, 10, source, by_class=False, counting=survival.counting(labels))
    assert sorted(row for group in groups for row in group.tolist()) == [*range(125)]
    assert [int(labels[group][:, 1].sum()) for group in groups] == [13, 12]
    few = labels[16:]
    assert groups_of(few, 10, source, by_class=False, counting=survival.counting(few)) == ()


def test_examples_in_no_group_leave_the_data(tmp_path):
    train = NodeSecret(tmp_path, "north", "own").grouped(data(), 10, CLASSES).train
    assert train.labels.bincount().tolist() == [25, 0, 10]
    assert sorted(row for group in rows(train.groups) for row in group) == [*range(35)]
    assert all(len(train.labels[group].unique()) == 1 for group in train.groups)
    train = NodeSecret(tmp_path, "south", "own").grouped(data(), 26, CLASSES).train
    assert (len(train), train.groups) == (44, ())


@pytest.mark.parametrize("node_config", [{}, {"name": "north"}])
def test_choice_of_examples_outlives_flowers_node_id(node_config, tmp_path):
    clients = Clients(None, lambda client: data(), Task("classification"))
    for number, validation in ((4711, 0.2), (4712, 0.3)):
        name = node_config.get("name", str(number))
        config = configuration.resolve({"method": "fedavg", "validation": validation, "state-dir": str(tmp_path)})
        info = ClientInfo(name, None, None, config, node_config)
        if number == 4711:
            clients._secret_of(info)
    with pytest.raises(Refused, match="validation changed"):
        clients._secret_of(info)


@pytest.mark.parametrize(
    "settings",
    [{"public-samples": 1}, {"test-split": "drawn"}, {"validation": 0.1, "validation-on": "common"}, {}],
)
def test_a_split_seed_does_not_fix_what_the_seed_of_a_run_draws(settings, tmp_path):
    """Sums over the other examples would differ by single ones."""
    clients = Clients(None, None, None)
    node_config = {"name": "north", "split-seed": 7}
    for seed in (0, 1):
        chosen = {"method": "fedavg", "preset": "", "dataset": "digits", "state-dir": str(tmp_path), "seed": seed}
        info = ClientInfo("north", None, None, configuration.resolve(chosen | settings), node_config)
        refused = seed == 1 and settings
        with pytest.raises(Refused, match="seed changed .*: restore seed in the run, ") if refused else nullcontext():
            clients._secret_of(info)


@pytest.mark.parametrize("change", [{"alpha": 2.0}, {"split-seed": 1}])
def test_changed_settings_are_refused(change, tmp_path):
    choice = {"alpha": 1.0, "split-seed": 4711}
    NodeSecret(tmp_path, "north", "digits").keep(choice)
    NodeSecret(tmp_path, "north", "digits").keep(choice)
    NodeSecret(tmp_path, "north", "mnist").keep(choice | change)
    with pytest.raises(Refused, match=f"digits, but {next(iter(change))} changed") as refusal:
        NodeSecret(tmp_path, "north", "digits").keep(choice | change)
    assert "4711" not in str(refusal.value)
    assert f"restore {'seed' if 'split-seed' in change else 'alpha'} in the run" in str(refusal.value)


@pytest.mark.parametrize(("labels", "least"), [(LABELS[:-1], 10), (LABELS, 11)])
def test_changed_examples_are_refused(labels, least, tmp_path):
    NodeSecret(tmp_path, "north", "own").grouped(data(), 10, CLASSES)
    with pytest.raises(Refused, match="this node must use the same examples as in its first run"):
        NodeSecret(tmp_path, "north", "own").grouped(data(labels), least, CLASSES)


@pytest.mark.parametrize("part", ["training", "validation", "test"])
def test_an_example_that_another_one_of_its_class_replaced_is_refused(part, tmp_path):
    """Also one that is only evaluated: two accuracies could differ by it."""
    whole = replace(data(), train=data().train, validation=data().train, test=data().train)
    NodeSecret(tmp_path, "north", "own").grouped(whole, 10, CLASSES)
    changed = data().train
    changed.inputs[3] += 1
    whole = replace(whole, **{part.replace("training", "train"): changed})
    with pytest.raises(Refused, match=f"but {part} inputs changed .*: restore the data, or let the node's owner run"):
        NodeSecret(tmp_path, "north", "own").grouped(whole, 10, CLASSES)


def test_a_changed_number_of_examples_in_a_group_is_restored_in_the_node_config(tmp_path):
    NodeSecret(tmp_path, "north", "own").grouped(data(), 10, CLASSES)
    with pytest.raises(Refused, match="but min-examples changed .*: restore it to 10 in the node config, or let"):
        NodeSecret(tmp_path, "north", "own").grouped(data(), 9, CLASSES)


class OnDemand(torch.utils.data.Dataset):
    """Rows that are read on demand, as from files."""

    def __len__(self):
        return len(LABELS)

    def __getitem__(self, row):
        return torch.rand(4), LABELS[row]


def test_examples_that_are_read_on_demand_are_the_same_after_a_restart(tmp_path):
    parts = [examples_of(OnDemand()) for _ in range(2)]
    groups = [NodeSecret(tmp_path, "north", "own").grouped(ClientData(p, p), 10, CLASSES).train.groups for p in parts]
    assert rows(groups[0]) == rows(groups[1])


def test_damaged_file(tmp_path):
    NodeSecret(tmp_path, "north", "own")
    path = tmp_path / "nodes" / "north.json"
    assert path.stat().st_mode & 0o077 == 0
    kind = "a value is not of the kind that a run writes"
    for content, why in (("{", "Expecting"), ('{"seed": 1}', "'examples' is missing"), ('{"seed": []}', kind)):
        path.write_text(content)
        with pytest.raises(FedhetError, match=f"north.json is damaged: {why}"):
            NodeSecret(tmp_path, "north", "own")
