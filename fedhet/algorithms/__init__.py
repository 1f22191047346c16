"""Algorithms of the methods, independent of Flower: graphs of networks, matching, hypernetworks and alignment."""
