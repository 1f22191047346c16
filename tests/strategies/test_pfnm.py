"""PFNM end to end: one shot, and rounds beyond the paper."""

import pytest

TINY = {"partition": "dirichlet", "clients": 4, "local_epochs": 8, "momentum": 0.9, "learning_rate": 0.05}


def test_matching_beats_averaging(federate):
    own = TINY | {"samples_per_client": 0, "rounds": 1, "shared_init": False}
    pfnm, fedavg = (federate(method, method, **own) for method in ("pfnm", "fedavg"))
    assert pfnm.rows[1]["trained"] == fedavg.rows[1]["trained"]  # the same networks are merged
    assert pfnm.rows[1]["trained"]["accuracy"]["weighted"] > 0.7
    score, average = (done.summary["personal_accuracy"]["weighted"] for done in (pfnm, fedavg))
    assert score > average + 0.1


@pytest.mark.parametrize("batch_norm", ["local", "re-estimate"])
def test_statistics_are_sent(batch_norm, federate):
    settings = {"architectures": "resnet8", "local_epochs": 1, "samples_per_client": 16, "clients": 2, "rounds": 2}
    done = federate("pfnm", batch_norm=batch_norm, **settings)
    assert done.failures == []
    assert len(done.saved("global")["body.1.running_mean"]) == len(done.saved("global")["body.0.weight"])
