"""The Flower ServerApp: one of fedhet's strategies, started like any of Flower's."""

from flwr.serverapp import ServerApp

from fedhet import FedHeNN

app = ServerApp()


@app.main()
def main(grid, context):
    """Run the rounds that the run config says."""
    # `fedhet keys fedhenn` shows what there is to set
    strategy = FedHeNN(dataset="own", learning_rate=0.1, out="runs/first")
    strategy.start(grid=grid, num_rounds=context.run_config["num-server-rounds"])
