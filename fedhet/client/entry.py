"""Flower's entry point for clients."""

from fedhet.client.app import make_client_app

app = make_client_app()
