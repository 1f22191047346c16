"""Label spreading from a client's own examples over the public dataset: a control without networks or peers."""

from fedhet.methods.included._classical import classical

method = classical("label-spreading", public="inputs")
