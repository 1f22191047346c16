"""Label spreading from a client's own examples to the public dataset: a baseline without networks or communication."""

from fedhet.methods.included._classical import classical

method = classical("label-spreading", public="inputs")
