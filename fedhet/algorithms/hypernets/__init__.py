"""Hypernetworks, which generate the weights of other networks."""
