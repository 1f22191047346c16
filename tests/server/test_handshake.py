"""Who is refused in the handshake, and why."""

import pytest

from fedhet.errors import FedhetError
from fedhet.messages import Payload, Reply, Report
from fedhet.methods.method import Method, Traits
from fedhet.methods.options import Config
from fedhet.methods.sharing import Sharing
from fedhet.results.state import State
from fedhet.server.federation import Federation
from fedhet.server.handshake import Admission, Handshake
from fedhet.server.run import Run

WEIGHT = {"w": ((2, 3), "float32")}


def handshake(*replies, networks="any", averaged=True):
    """A handshake that has admitted the clients of these replies."""
    method = Method("fedthis", Traits(networks=networks, shares=Sharing("everything", averaged=averaged)))
    run = Run(method, Config(), State())
    hooks = Admission(lambda: None, lambda reply: {}, lambda reply: None, lambda missing: None, 0)
    made = Handshake(run, Federation(run), hooks)
    for node, reply in enumerate(replies, start=1):
        made._admit(node, reply, joining=False)
    return made


def reply(client, spec=None, metric="accuracy"):
    return Reply(14, Payload(), Report(client, metric=metric, spec=WEIGHT if spec is None else spec))


def refusal(*replies, **traits):
    """Why the last of these clients is refused after the others."""
    *first, last = replies
    with pytest.raises(FedhetError) as caught:
        handshake(*first, **traits)._admit(9, last, joining=False)
    return str(caught.value)


@pytest.mark.parametrize(
    ("networks", "spec", "difference"),
    [
        ("equal", {"w": ((4, 3), "float32")}, " differs from client 3's: its w has shape [4, 3], not [2, 3]"),
        ("equal", {}, " differs from client 3's: it lacks w"),
        ("widths", {"w": ((2, 3, 1), "float32")}, " differs from client 3's: its w has 3 axes, not 2"),
        ("widths", {"v": ((2, 3), "float32")}, " differs from client 3's: it alone has v"),
    ],
)
def test_different_architectures_are_refused(networks, spec, difference):
    reason = refusal(reply("3"), reply("1"), reply("4", spec), networks=networks)
    assert reason.startswith("fedthis needs equal architectures" + " except for their widths" * (networks == "widths"))
    assert difference in reason
    handshake(reply("3"), reply("4", spec), networks="any", averaged=False)


def test_different_widths():
    handshake(reply("3"), reply("4", {"w": ((4, 5), "float32")}), networks="widths")


def test_averaged_arrays_must_be_alike():
    known = reply("0", {}), reply("3"), reply("5", {"v": ((1,), "float32")})
    told = "shared arrays must have equal shapes and dtypes"
    wide = reply("4", {"w": ((4, 3), "float32")})
    assert refusal(*known, wide) == (
        f"fedthis averages w over clients, but this client's is float32[4, 3] and client 3's is float32[2, 3]: {told}"
    )
    assert "is float64[1] and client 5's is float32[1]" in refusal(*known, reply("4", {"v": ((1,), "float64")}))
    handshake(*known, reply("4", {"u": ((9,), "float32")}))
    handshake(*known, wide, averaged=False)
