"""The Flower ServerApp: a strategy of fedhet, started like a strategy of Flower."""

from flwr.serverapp import ServerApp

from fedhet import FedHeNN

app = ServerApp()


@app.main()
def main(grid, context):
    """Run a federation on the nodes of `grid`; `context` has the run config of pyproject.toml."""
    training = {"fraction_train": 1.0, "local_epochs": 5, "batch_size": 10, "learning_rate": 0.05, "momentum": 0.5}
    method = {"eta0": 1.0, "schedule": "constant", "rad_every": 4}  # `fedhet keys fedhenn` shows what there is to set
    strategy = FedHeNN(dataset="own", closing_epochs=0, out="runs/first", **training, **method)
    strategy.start(grid=grid, num_rounds=context.run_config["num-server-rounds"])
