"""Writers for `monitor.writers`: a CSV file, and Weights & Biases. The program calls them on rank 0."""

import csv

from shardtrain.monitor import Writer


class Csv(Writer):
    """A writer of scores.csv: a line per value, with step and tag."""

    def __init__(self, directory, config):
        self.path = directory / "scores.csv"

    def log(self, step, scalars):
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows((step, tag, value) for tag, value in scalars.items())


class WeightsAndBiases(Writer):
    """A run in wandb, under the name of its directory; a resumed run continues there."""

    def __init__(self, directory, config):
        self.settings = {"name": directory.name, "id": directory.name, "resume": "allow", "config": config}

    def facts(self, facts):
        import wandb

        if "started" in facts:  # the first event
            self.run = wandb.init(project="shardtrain", **self.settings)
        self.run.summary.update(facts)
        if "status" in facts:  # the last one
            self.run.finish(exit_code=0 if facts["status"] == "finished" else 1)

    def log(self, step, scalars):
        self.run.log(scalars, step=step)

    def picture(self, step, tag, picture):
        import wandb

        self.run.log({tag: wandb.Image(picture)}, step=step)
