"""Trains each fold as a separate run: `python kfold.py`. Running it again continues with the first unfinished fold."""

from statistics import mean, stdev

from trainwright import RunConfig, build_trainer

accuracies = []
for fold in range(5):
    logs = build_trainer(RunConfig.load("run.yaml", [f"data.train.fold={fold}"])).train()
    accuracies.append(logs["valid/accuracy"])
print(f"accuracy {mean(accuracies):.3f} ± {stdev(accuracies):.3f}")
