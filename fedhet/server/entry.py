"""Flower's entry point for the server."""

from fedhet.server.app import make_server_app

app = make_server_app()
