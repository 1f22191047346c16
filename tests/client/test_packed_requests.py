"""Packed numbers of a request: a client refuses what is not of their format, in a sentence, and the run goes on."""

import numpy as np
import pytest

from fedhet.engines.running import run_locally
from fedhet.flower import decode_arrays, encode_arrays
from fedhet.testing import Case, Run, Tampering, at

pytestmark = pytest.mark.usefixtures("no_report")

HARM = {"learning-rate": 0.01, "fedharm.blocks": "body.1,body.2,head; body.2,body.4,head", "fedharm.slots": "32,32,10"}
MD = {"optimizer": "sgd", "fedmd.public-epochs": 0, "fedmd.private-epochs": 0, "fedmd.public-batch": 32}
CASES = {"fedhenn": ({"fedhenn.eta0": 1.0}, "target", ""), "fedharm": (HARM, "target", "0/"), "fedmd": (MD, "mean", "")}


def changed(array, what):
    return {
        "exponent": lambda: np.array(9999, np.int64),
        "dtype": lambda: array.astype(np.float64),
        "rows": lambda: array[:-1],
    }[what]()


@pytest.mark.parametrize("what", ["exponent", "dtype", "rows"])
@pytest.mark.parametrize("method", CASES)
def test_invalid_targets(method, what, tmp_path):
    own, group, part = CASES[method]

    def before(message, client):
        if at([2], "1")(message, client):
            arrays = dict(decode_arrays(message.content[group]))
            for key in [key for key in arrays if key.startswith(part)]:
                name = key.removeprefix(part)
                if name == "exponent" if what == "exponent" else name in ("values", "rows"):
                    arrays[key] = changed(arrays[key], what)
            message.content[group] = encode_arrays(arrays)

    config = Case.of(method, own).config(rounds=2, local_epochs=1)
    run_locally(config, tmp_path / "run", app=Tampering(before=before))
    done = Run(tmp_path / "run")
    assert done.failures == [(2, "1")]
    reason = done.row(2)["failures"][0]["reason"]
    assert reason.startswith(f"the server's request is damaged: its {group} cannot be used: "), reason


@pytest.mark.parametrize("rows", [[0, 1, 99_999], [-1, 2, 3], [[1, 2]]])
def test_invalid_public_rows(rows, tmp_path):
    def before(message, client):
        if at([1], "1")(message, client):
            kind = np.int32 if not any(isinstance(row, float) for row in rows) else np.float32
            message.content["next-rows"] = encode_arrays({"rows": np.array(rows, kind)})

    config = Case.of("fedmd", MD).config(rounds=1, closing_epochs=1)
    run_locally(config, tmp_path / "run", app=Tampering(before=before))
    reason = Run(tmp_path / "run").row(1)["failures"][0]["reason"]
    assert reason.startswith("the server's request is damaged: its rows of the public dataset cannot be used: "), reason
