"""The Flower ClientApp: it supports every method that the server may run."""

from data import my_data
from model import my_model

from fedhet import make_client_app

app = make_client_app(model=my_model, data=my_data)
