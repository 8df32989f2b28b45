"""A custom driver: loads an experiment by name with files and overrides, and sends a message after the training."""

import argparse
import json
import os
import urllib.request

import experiments  # noqa: F401  # registers them

from trainwright import load_experiment, run_experiment


def notify(message):
    print(message)
    address = os.environ.get("NOTIFY_URL")  # such as a chat's incoming webhook
    if address is not None and os.environ.get("RANK", "0") == "0":
        body = json.dumps({"text": message}).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=10).close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiment", required=True)
    parser.add_argument("--mode", default="train_and_eval")
    parser.add_argument("--model_dir")
    parser.add_argument("--config_file", action="append", default=[])
    parser.add_argument("overrides", nargs="*", help="settings, such as trainer.max_steps=500")
    given = parser.parse_args()
    config = load_experiment(given.experiment, config_files=given.config_file, overrides=given.overrides)
    _, logs = run_experiment(config, mode=given.mode, model_dir=given.model_dir)
    notify(f"{given.experiment} has ended: " + ", ".join(f"{name} {value:.3f}" for name, value in logs.items()))


if __name__ == "__main__":
    main()
