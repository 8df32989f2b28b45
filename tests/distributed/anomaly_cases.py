"""One rank of two, whose loss goes wrong; for test_anomalies_two_processes.py."""

import json

import torch
import torch.distributed as dist

from trainwright.anomaly.detection import AnomalyDetector, join_ranks
from trainwright.config import AnomaliesSection
from trainwright.loop.outputs import ForwardResult
from trainwright.loop.update import ScheduledOptimizer, Updater
from trainwright.parallel import processes
from trainwright.parallel.collectives import Ranks


def run(factors, ranks, *, detector=None):
    """The weights after steps with these factors of this rank's loss."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    updater = Updater(
        {"main": ScheduledOptimizer(optimizer, lambda step, max_steps: 1.0)},
        global_batch_size=4,
        max_steps=10,
        ranks=ranks,
        detector=detector,
    )
    for step, factor in enumerate(factors):
        updater.begin_step(step)
        update = updater.begin(lambda: 2)
        update.backward(ForwardResult((weight * factor).square().sum(), 2))
        update.apply()
    return weight.tolist()


def main(folder):
    rank = processes.rank_and_size().rank
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    ranks = Ranks(rank, 2, control=dist.new_group(backend="gloo"))
    section = AnomaliesSection(non_finite="skip", spike="rollback", spike_window=8)
    watch = AnomalyDetector(section, device=torch.device("cpu"), rank=rank)
    bad = {6: float("nan"), 8: 1e3} if rank == 1 else {}
    factors = [bad.get(step, 1.0 + rank) for step in range(10)]
    held = run(factors, ranks, detector=watch)
    found = join_ranks(ranks.gather(watch.look()))
    plain = run([1.0 + rank] * 8, ranks)
    facts = {"held": held, "plain": plain, "found": [(each.step, each.kind, each.ranks) for each in found]}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    ranks.part()
    dist.destroy_process_group()
