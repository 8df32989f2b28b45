"""What tests of trackers share: a run that is killed, and the lines that each service has afterwards."""

import os
import signal
import sqlite3
import time
from pathlib import Path

import orjson
from tests.writers.wandb_files import read_history

from trainwright import Hook


class KillAt(Hook):
    """Ends the process in a step with a signal that nothing can catch, after the services had time to write."""

    def __init__(self, step, seconds=0.0):
        self.step, self.seconds = step, seconds

    def before_step(self):
        if self.trainer.step + 1 == self.step:
            time.sleep(self.seconds)
            os.kill(os.getpid(), signal.SIGKILL)


def wandb_lines(folder):
    """Returns (step, loss) of each line, as the newest recording has it."""
    return [(row["step"], row["loss"]) for row in read_history(folder) if "loss" in row]


def mlflow_lines(client, experiment):
    """Returns (step, loss) of each line of the only run of an experiment."""
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "loss")]


def trackio_rows(project):
    """Returns (run, step, values) of each line of a project."""
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / f"{project}.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    return [(name, step, orjson.loads(values)) for name, step, values in rows]
