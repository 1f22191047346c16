"""Strategies of the methods, which are subclasses of `FederatedStrategy`."""
