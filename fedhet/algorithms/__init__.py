"""The numerical algorithms of the methods, independent of Flower: graphs, matching, hypernetworks and alignment."""
