"""Local training with a labelled public dataset mixed in."""

from fedhet.config import client_setup


def test_public_examples_in_local_training(federate):
    mixed = federate("local", public_samples=64, **{"local.public": "mixed"})
    alone = federate("local", "alone", public_samples=64)
    assert mixed.failures == []
    steps = [row["work"]["steps"] for row in (mixed.rows[1], alone.rows[1])]
    assert steps == [3 * 2 * (32 + 64) // 16, 3 * 2 * 32 // 16]
    public = client_setup.public_dataset(mixed.config)
    right = [
        (done.network("0")(client_setup.dataset_of(done.config).transform(public.inputs)).argmax(1) == public.labels)
        .float()
        .mean()
        for done in (mixed, alone)
    ]
    assert right[0] > right[1] + 0.05
