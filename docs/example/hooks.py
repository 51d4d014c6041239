"""Hooks for the training program: allow=[hooks] train.hooks=[hooks.WeightsAndBiases]"""

import dataclasses

from shardtrain.train import Hook


class WeightsAndBiases(Hook):
    """A hook that sends a run's scalars to wandb."""

    def before_fit(self, trainer):
        if trainer.rank == 0:
            import wandb

            self.run = wandb.init(project="shardtrain", config=dataclasses.asdict(trainer.config))

    def after_step(self, trainer, step, finite):
        if trainer.rank == 0 and step % 10 == 0:
            self.run.log(trainer.monitor.scalars, step=step)

    def at_end(self, trainer):
        if trainer.rank == 0:
            self.run.finish()


class Mlflow(Hook):
    """A hook that sends a run's scores to MLflow."""

    def after_evaluation(self, trainer, step, evaluation):
        if trainer.rank == 0:
            import mlflow

            mlflow.log_metrics(evaluation.scalars(), step=step)
