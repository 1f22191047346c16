"""Flower's entry point for clients."""

from fedhet.application import make_client_app

app = make_client_app()
