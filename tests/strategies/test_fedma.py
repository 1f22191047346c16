"""FedMA end to end: what travels when, who may be missing, going on at any group, what is computed."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from fedhet import make_client_app, models
from fedhet.config.configuration import resolve
from fedhet.engines.running import run_locally
from fedhet.errors import FedhetError
from fedhet.results.history import read_history
from fedhet.training import Trained

TINY = {
    **{"partition": "iid", "samples_per_client": 24, "architectures": "cnn", "rounds": 0, "local_epochs": 1},
    **{"batch_size": 8, "learning_rate": 0.05, "test_on": "both"},
}
GROUPS = 4  # of the CNN: two convolutions, two linear layers


@pytest.fixture(scope="session")
def run(federated):
    """Runs a method, FedMA unless it is given, in a folder."""
    return lambda folder, method="fedma", **settings: federated(folder, method, **TINY | settings)


@pytest.fixture(scope="module")
def ordinary(run, tmp_path_factory):
    """Two passes of three clients."""
    return run(tmp_path_factory.mktemp("ordinary") / "run", fedma__passes=2, report=False)


# ---- an ordinary pass


def test_exchange_of_a_pass(ordinary):
    sent, received, states = ordinary.sent, ordinary.received, ordinary.states
    names = [["body.0.weight", "body.0.bias"], ["body.3.weight", "body.3.bias"]]
    names += [["body.7.weight", "body.7.bias"], ["body.9.weight", "body.9.bias"], ["head.weight", "head.bias"]]
    for number in range(1, 2 * GROUPS + 3):
        step = (number - 1) % (GROUPS + 1)
        for client in "012":
            up, down = sent[number, client], received[number, client]
            assert list(up["update"]) == names[step]
            assert up.keys() - {"update"} == ({"classes"} if step == GROUPS else set())
            before = {"group", "assignment"} if step else {"last"} if number > 1 else set()
            assert down.keys() == before
            if step:
                assignment = down["assignment"]["units"]
                assert assignment.dtype == np.int32
                rows = down["group"]["rows"]
                assert len(set(assignment.tolist())) == len(assignment) <= len(rows)
    widths = [len(states[GROUPS + 1].group[str(index)]["rows"]) for index in range(GROUPS)]
    assert sent[GROUPS, "0"]["update"]["body.9.weight"].shape == (32, widths[2])
    assert sent[GROUPS + 1, "0"]["update"]["head.weight"].shape == (10, widths[3])


def test_incomplete_pass_in_rounds(run, tmp_path, caplog):
    needs = rf"rounds = {GROUPS}: a pass of fedma over these networks takes {GROUPS + 1} rounds"
    with pytest.raises(FedhetError, match=needs):
        run(tmp_path / "short", rounds=GROUPS)
    assert read_history(tmp_path / "short") == []
    done = run(tmp_path / "run", rounds=GROUPS + 2, local_epochs=0)
    (line,) = [line for line in caplog.messages if "set rounds to a multiple of" in line]
    assert "the last 1 round(s) will not change the global model: rounds = " in line
    assert done.summary["status"] == "completed"


def test_no_complete_pass(run, tmp_path):
    """All clients miss a round; with shared-init they were given the first one's network before it."""
    with pytest.raises(FedhetError, match=f"no global model after round {GROUPS + 1}"):
        run(tmp_path / "run", before=lambda round, _: crash([2])(round, "1"), shared_init=True)


def test_evaluation_between_passes(ordinary):
    evaluated = [row["round"] for row in ordinary.rows if row["received"]]
    assert evaluated == [GROUPS + 2, 2 * GROUPS + 3]
    assert [row["trained"] is not None for row in ordinary.rows] == [False, *[True] * 10, False]


def test_participants_of_a_pass(run, tmp_path):
    done = run(tmp_path / "run", architectures="mlp", clients=4, fraction_train=0.5, fedma__passes=2)
    drawn = [row["participants"] for row in done.rows]
    assert drawn[1] == drawn[2] == drawn[3]
    assert drawn[4] == drawn[5] == drawn[6] != drawn[3]
    assert len(drawn[1]) == len(drawn[4]) == 2
    joining = next(client for client in drawn[4] if client not in drawn[1])
    assert "model" in done.received[4, joining]
    assert done.rows[4]["received"]["clients"] == done.rows[-1]["received"]["clients"] == 4


def test_trained_layers(run, tmp_path, monkeypatch):
    phases = []

    def record(training):
        phase = training.phase
        live = [name for name, _ in training.model.named_parameters() if phase.trains is None or phase.trains(name)]
        phases.append((phase.epochs, len(live), phase.optimisation))
        return Trained(loss=1.0, epochs=1)

    monkeypatch.setattr("fedhet.training.training.Training.result", record)
    own = {
        "fedma__retrain_epochs": 5,
        "fedma__last_epochs": 2,
        "fedma__last_learning_rate": 0.005,
        "weight_decay": 0.1,
        "local_epochs": 7,
    }
    run(tmp_path / "run", clients=1, architectures="mlp", **own)
    assert [(epochs, live) for epochs, live, _ in phases] == [(7, 6), (5, 4), (10, 2)]
    rates = [(how.learning_rate, how.weight_decay) for *_, how in phases]
    assert rates == [(0.05, 0.1), (0.05, 0.0), (0.005, 1e-4)]


# ---- who is missing


def crash(rounds, name="1"):
    def before(number, client):
        if number in rounds and client == name:
            raise RuntimeError("out of order")

    return before


def test_client_that_misses_a_round(run, tmp_path):
    """It leaves the pass, and takes part in the next one with the units of the whole global model."""
    done = run(tmp_path / "run", before=crash([2]), fedma__passes=2)
    assert [row["participants"] for row in done.rows[1:]][: 2 * GROUPS + 2] == [
        ["0", "1", "2"],
        *[["0", "2"]] * GROUPS,
        *[["0", "1", "2"]] * (GROUPS + 1),
    ]
    assert done.received[GROUPS + 2, "1"].keys() == {"model"}
    assert done.received[GROUPS + 2, "0"].keys() == {"last"}
    assert done.sent[GROUPS + 2, "1"]["update"]["body.0.weight"].shape[0] == 32
    assert done.rows[-1]["received"]["clients"] == 3


def test_other_connections(run, tmp_path):
    class Twice(nn.Module):
        """Two layers of the same shapes, one behind the other or side by side."""

        def __init__(self, apart: bool) -> None:
            super().__init__()
            self.apart, self.flat = apart, nn.Flatten()
            self.one, self.two, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            x = self.flat(x)
            hidden = self.one(x).relu() + self.two(x).relu() if self.apart else self.two(self.one(x).relu()).relu()
            return self.head(hidden)

    own = {"model": lambda client: Twice(client.name == "2"), "architectures": ""}
    done = run(tmp_path / "run", **own, test_on="local")
    (failure,) = done.rows[0]["failures"]
    assert failure["client"] == "2"
    assert "the client's digest of layers and connections is" in failure["reason"]


# ---- clients of other widths

WIDTHS = {"architectures": "mlp-widths", "learning_rate": 0.1, "samples_per_client": 48, "local_epochs": 4}


def test_three_widths(run, tmp_path):
    """Two passes of three clients, 100, 150 and 200 units wide."""
    done = run(tmp_path / "run", fedma__passes=2, **WIDTHS)
    states = done.states
    for client, units in (("0", 100), ("1", 150), ("2", 200)):
        own = states[3].assignments[client]
        assert [len(set(own[group].tolist())) for group in "01"] == [units, units]
        # The second pass begins with them, a little trained.
        update = done.sent[4, client]["update"]["body.1.weight"]
        assert update.shape == (units, 64)
        apart = np.linalg.norm(update[:, None] - states[3].model["body.1.weight"], axis=2)
        assert np.median(apart.min(axis=1)) > 0
        assert np.mean(apart.argmin(axis=1) == own["0"]) > 0.6
    assert len(done.saved("global")["body.1.weight"]) >= 200
    assert done.rows[-1]["common"]["received"]["accuracy"] > 0.6
    assert done.rows[-1]["received"]["clients"] == 3


def test_client_wider_than_the_global_model(run, tmp_path):
    """The widest client misses the first round, which leaves a global model narrower than it."""
    settings = WIDTHS | {"pfnm__max_growth": 1.0, "rounds": 2, "method": "pfnm"}
    done = run(tmp_path / "run", before=crash([1], "2"), **settings)
    assert len(done.states[1].model["body.1.weight"]) == 150
    assert done.received[2, "1"].keys() >= {"model"}
    assert done.received[2, "2"] == {}
    assert len(done.saved("global")["body.1.weight"]) == 200
    assert [len(done.states[2].assignments[client]["0"]) for client in "012"] == [100, 150, 200]


def test_shared_init_with_other_widths(run, tmp_path):
    told = "the client's digest of layers and connections is .* in equal widths, or shared-init = false"
    with pytest.raises(FedhetError, match=rf"only client 0 was admitted.*\n  client 1: {told}"):
        run(tmp_path / "run", shared_init=True, **WIDTHS)


# ---- what is computed


@pytest.mark.long
def test_vgg9_of_table_7(tmp_path):
    def images(client):
        generator = torch.Generator().manual_seed(int(client.name))
        inputs, labels = torch.randn(12, 3, 32, 32, generator=generator), torch.randint(10, (12,), generator=generator)
        return (inputs[:8], labels[:8]), (inputs[8:], labels[8:])

    app = make_client_app(model=lambda client: models.build("vgg9", (3, 32, 32), 10), data=images)
    folder = tmp_path / "run"
    run_locally(resolve({"method": "fedma", "clients": 16, "local-epochs": 0}), folder, app=app)
    model = load_file(folder / "models" / "global.safetensors")
    assert sum(array.size for array in model.values()) == 3_900_235
    order = [f"body.{index}.weight" for index in (0, 2, 5, 7, 11, 13, 18, 20)]
    assert [len(model[name]) for name in order] == [47, 79, 143, 143, 271, 271, 527, 527]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["bytes_up"] / 16 == pytest.approx(14.94e6, rel=1e-3)
    assert summary["bytes_down"] / 16 == pytest.approx(15.60e6, rel=1e-3)
    assert summary["personal_accuracy"] is not None


FEW = {"partition": "dirichlet", "clients": 4, "local_epochs": 8, "momentum": 0.9, "learning_rate": 0.05}


def test_pfnm_beats_averaging(federate):
    own = FEW | {"samples_per_client": 0, "rounds": 1, "shared_init": False}
    pfnm, fedavg = (federate(method, method, **own) for method in ("pfnm", "fedavg"))
    assert pfnm.rows[1]["trained"] == fedavg.rows[1]["trained"]  # the same networks are merged
    assert pfnm.rows[1]["trained"]["accuracy"]["weighted"] > 0.7
    score, average = (done.summary["personal_accuracy"]["weighted"] for done in (pfnm, fedavg))
    assert score > average + 0.1


@pytest.mark.parametrize("batch_norm", ["local", "re-estimate"])
def test_pfnm_receives_statistics(batch_norm, federate):
    settings = {"architectures": "resnet8", "local_epochs": 1, "samples_per_client": 16, "clients": 2, "rounds": 2}
    done = federate("pfnm", batch_norm=batch_norm, **settings)
    assert done.failures == []
    assert len(done.saved("global")["body.1.running_mean"]) == len(done.saved("global")["body.0.weight"])


def test_a_network_too_wide_to_be_matched_is_refused(federate, monkeypatch):
    """Its arrays are few, but the costs of its units would fill the server's memory."""

    def model(client):
        width = 60 if client.name == "1" else 40
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    monkeypatch.setattr("fedhet.messages.protocol.memory", lambda: 4 * 30_000)
    done = federate("pfnm", model=model, clients=3, rounds=1, samples_per_client=16, local_epochs=1)
    ((_, client, reason),) = done.failures
    assert client == "1"
    assert "the server needs memory to match the client's hidden units" in reason
