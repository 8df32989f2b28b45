"""A small model with an optimizer and averages, placed on ranks in any layout; saved and restored without a loop.

Its sizes divide by nothing: shards are uneven, and some ranks hold no row of some weights.
"""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainwright.checkpoint import contents
from trainwright.checkpoint.background import BackgroundSaver
from trainwright.checkpoint.retention import Retention
from trainwright.checkpoint.together import Together, encode_share
from trainwright.parallel.collectives import Notes

LAYOUTS = {
    "fsdp": {"fsdp": 4},
    "fsdp-tensor": {"fsdp": 2, "tensor": 2},
    "replicate": {"replicate": 4},
    "hybrid": {"replicate": 2, "fsdp": 2},
    "tensor": {"tensor": 4},
    "replicate-tensor": {"replicate": 2, "tensor": 2},
    "pipeline": {"pipeline": 2, "fsdp": 2},
}


class Net(nn.Module):
    """Two equal weights at both ends are tied."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 7) for _ in range(4))
        self.small = nn.Linear(9, 3)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.tensor([float(seed), 1.0]))


def keep_stage(model, stage):
    """Keeps half of the blocks; the tied weight stays on both."""
    for number in range(4):
        if number // 2 != stage:
            model.blocks[number] = nn.Identity()
    if stage == 0:
        model.small = model.last = nn.Identity()
    else:
        model.first.bias = None  # its weight is needed here too, under both names


def place(model, mesh):
    """Cuts a model as the mesh says: by stages, by rows and columns, by FSDP."""
    if mesh.size("pipeline") > 1:
        keep_stage(model, mesh.rank("pipeline"))
    if mesh.size("tensor") > 1:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.startswith("blocks"):
                for key, parameter in list(module.named_parameters(recurse=False)):
                    dim = int(key == "weight" and name.endswith("1"))
                    split = distribute_tensor(parameter.detach(), mesh.along("tensor"), [Shard(dim)])
                    setattr(module, key, nn.Parameter(split))
    if mesh.size("fsdp") > 1:
        layers = mesh.layers["replicate", "shard"] if mesh.size("replicate") > 1 else mesh.layers["shard"]
        for block in model.blocks:
            if isinstance(block, nn.Linear):
                fully_shard(block, mesh=layers)
        fully_shard(model, mesh=layers)
    return model


class Averages:
    """What a hook that averages weights keeps."""

    def __init__(self, model=None):
        self.averages = {} if model is None else {name: each.detach() * 2 for name, each in model.named_parameters()}
        self.count = 3

    def state_dict(self):
        return {"averages": self.averages, "count": self.count}

    def load_state_dict(self, state):
        self.averages, self.count = state["averages"], state["count"]


class Nothing:
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """There is nothing to load."""


def make_optimizer(model):
    weights = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )


def step(model, optimizer):
    """An update whose gradient is a function of each weight alone, so that it is the same in every layout."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 1.0
    optimizer.step()


def trained(mesh=None):
    """A model after two updates, placed on a mesh or whole; its optimizer and its averages."""
    model = Net() if mesh is None else place(Net(), mesh)
    optimizer = make_optimizer(model)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer, Averages(model)


def parts_of(model, optimizer, averages):
    return contents.collect(
        model=model,
        optimizers={"main": optimizer},
        hooks={"Averages": averages},
        events={},
        data={"position": 5},
        loss_scale=None,
        anomalies=Nothing(),
        generators=[],
        step=2,
        begun_epoch=0,
        data_start=0,
        has_unfinished_step=False,
        max_steps_at_end=0,
        unclaimed_hook_state={},
    )


def saver_for(store, ranks, topic, **options):
    together = Together(ranks.rank, ranks.size, Notes(topic), **options)
    return BackgroundSaver(store, retention=Retention(keep_last=None), backoff=lambda attempt: 0.0, together=together)


def save(ranks, store, number, topic):
    """Saves a trained model in this layout as the checkpoint of that step."""
    share = encode_share(parts_of(*trained(ranks.mesh)), ranks)
    saver = saver_for(store, ranks, topic)
    saver.save(number, share, metrics={"loss": float(number)})
    saver.wait(must_succeed=True)
    saver.close()
    ranks.barrier()
    return share


def restored(read, mesh=None, names=()):
    """A model of another seed, brought to what `read` gives."""
    model = Net(seed=7) if mesh is None else place(Net(seed=7), mesh)
    optimizer, averages = make_optimizer(model), Averages()
    contents.load_model_state(read("model"), model, source="here", other_stages=names)
    contents.restore_optimizers(read("optimizers"), model, {"main": optimizer}, other_stages=names)
    training = read("training")
    assert contents.restore_hooks(training["hooks"], {"Averages": averages}, model=model) == {}
    assert training["data"] == {"position": 5}
    return model, optimizer, averages


def whole(value):
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def everything(model, optimizer, averages):
    """Every tensor by name, whole; all ranks that hold parts of it must ask."""
    found = {f"model.{name}": whole(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"optimizer.{name}.{key}"] = whole(value)
        if name in averages.averages:
            found[f"averages.{name}"] = whole(averages.averages[name])
    return found


def differences(found, expected):
    return [name for name, value in found.items() if name not in expected or not torch.equal(value, expected[name])]
