"""The numerics of the methods, without Flower: graphs, matching, hypernetworks and alignment of representations."""
