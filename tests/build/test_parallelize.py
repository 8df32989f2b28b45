"""What each rank of a split run has before the first step, who has built it, and what that takes of memory."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml
from tests.messages import raises
from tests.parallel.forked_ranks import on_ranks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainwright import RunConfig, Task, Trainer
from trainwright.backends import pick_backend
from trainwright.build.components import Build
from trainwright.build.parallelize import parallelize_model
from trainwright.build.run import _build_models
from trainwright.data.randomness import seed_generators
from trainwright.errors import CheckpointError
from trainwright.models.llama import Llama
from trainwright.parallel.collectives import Ranks
from trainwright.parallel.mesh import ALONE, Mesh, is_split, local

SMALL = {"vocab_size": 37, "hidden_size": 16, "num_layers": 3, "num_heads": 4, "intermediate_size": 24}
TEXT = {**SMALL, "vocab_size": 38}
SECTIONS = {
    "tied": {"type": "llama", **SMALL},
    "untied": {"type": "llama", **SMALL, "num_kv_heads": 2, "tie_embeddings": False, "attention_bias": "qkv"},
    "gpt2": {"type": "gpt2", **SMALL, "freeze": ["transformer.wte.*"]},
    "bert": {"type": "bert", **TEXT},
    "lora": {"type": "llama", **SMALL, "lora": {"match": "*.q_proj", "rank": 2, "train": ["*norm*"]}},
    "recomputed": {"type": "llama", **SMALL, "activation_checkpointing": ["model.layers.*"]},
}
OF_TWO_AXES = ("tied", "gpt2", "lora")
"""Four ranks are slow: these stand for the others there."""
LAYOUTS = [
    *(({axis: 2}, tuple(SECTIONS)) for axis in ("fsdp", "tensor", "pipeline", "context")),
    *(
        pytest.param(axes, names, marks=marks)
        for axes in ({"fsdp": 2, "tensor": 2}, {"tensor": 2, "pipeline": 2}, {"replicate": 2, "fsdp": 2})
        for names, marks in (
            (OF_TWO_AXES, ()),
            (tuple(name for name in SECTIONS if name not in OF_TWO_AXES), pytest.mark.slow),
        )
    ),
]


class Plain(torch.nn.Module):
    """A user's model."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)


class OwnLlama(Llama):
    """A user's subclass of ours."""


class Reading(Trainer):
    """A user's trainer that sees the model whole."""

    @classmethod
    def build_model(cls, build):
        return build.model()


class Building(Task):
    """A user's task with a model of its own."""

    def build_model(self):
        return Plain()


def load(folder, section, axes=None):
    path = Path(folder) / "run.yaml"
    path.write_text(
        yaml.safe_dump({"output_dir": str(folder), "model": section, "runtime": {"mesh": dict(axes or {})}})
    )
    return RunConfig.load(path)


def ranks_of(mesh):
    return Ranks(dist.get_rank(), dist.get_world_size(), mesh=mesh)


def alone(rank=1, **axes):
    """A rank of two that talks to nobody: what it does without the other would hang or fail."""
    return Ranks(rank, 2, mesh=Mesh({**ALONE, **axes}, rank))


def built(config, ranks, trainer_class=Trainer, task=None):
    seed_generators(7)
    build = Build(config, ranks=ranks)
    build.take_trainer(trainer_class)
    build.take_task(task or Task())
    return build, trainer_class.build_model(build)


def placed_as_in_a_run(config, ranks):
    """What the run has when the model stands: the build, the placed model, and the next random numbers."""
    seed_generators(7)
    build = Build(config, ranks=ranks)
    build.take_trainer(Trainer)
    parallelized, _ = _build_models(Trainer, Task(), build, pick_backend("cpu"), ranks)
    return build, parallelized, torch.rand(3).tolist()


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if is_split(tensor) else tensor


def tensors_of(model):
    return dict(model.named_parameters(remove_duplicate=False))


# weights


@pytest.mark.parametrize(
    ("axes", "names"), LAYOUTS, ids=lambda given: str(given) if isinstance(given, dict) else ", ".join(given)
)
def test_ranks_start_with_the_weights_of_one_process_in_every_layout(tmp_path, axes, names):
    configs = {name: load(tmp_path, SECTIONS[name], axes) for name in names}
    expected = {name: placed_as_in_a_run(config, Ranks()) for name, config in configs.items()}

    def act(mesh):
        ranks, found = ranks_of(mesh), {}
        for name, (_, one, numbers) in expected.items():
            build, parallelized, own_numbers = placed_as_in_a_run(configs[name], ranks)
            own, theirs = tensors_of(parallelized.model), tensors_of(one.model)
            same = [key for key, value in own.items() if torch.equal(whole(value), theirs[key])]
            assert same == list(own)
            assert all(own[key].requires_grad == theirs[key].requires_grad for key in own)
            for first in own:  # names of one weight there are names of one here
                assert all((own[first] is own[key]) == (theirs[first] is theirs[key]) for key in own)
            hooks = {key: len(value._backward_hooks or {}) for key, value in own.items()}
            found[name] = build.first_has_weights, own_numbers == numbers, set(own), hooks
        return found

    ranks = on_ranks(tmp_path, axes, act)
    for name in names:
        assert all(rank[name][:2] == (True, True) for rank in ranks)
        assert set.union(*(rank[name][2] for rank in ranks)) == set(tensors_of(expected[name][1].model))
        if "pipeline" not in axes:
            assert all(rank[name][3] == ranks[0][name][3] for rank in ranks)


def test_only_the_first_rank_reads_pretrained_weights(tmp_path):
    torch.manual_seed(3)
    model = Llama(**{**SMALL, "tie_embeddings": False}).to(torch.bfloat16)
    folder = model.save_pretrained(tmp_path / "published")
    lora = {"match": "*.q_proj", "rank": 2, "train": ["*layernorm*"]}

    def act(mesh):
        ranks = ranks_of(mesh)
        mine = tmp_path / f"rank-{ranks.rank}"
        mine.mkdir()
        seen = str(folder if ranks.is_first else mine / "nowhere")
        section = {"type": "llama", "pretrained": {"folder": seen, "dtype": "bf16"}, "lora": lora}
        build, parallelized, _ = placed_as_in_a_run(load(mine, section, {"fsdp": 2}), ranks)
        own = tensors_of(parallelized.model)
        same = all(torch.equal(whole(own[name]), value) for name, value in tensors_of(model).items())
        adapters = [whole(value) for name, value in own.items() if "lora" in name]
        # Trained in two dtypes in one block: the smaller part stays whole, and its gradient is still reduced.
        kept_whole = [name for name, value in own.items() if any(value is one for one in parallelized.sync._whole)]
        dtypes = {name: str(value.dtype) for name, value in own.items()}
        return same, adapters, dtypes, kept_whole, build.pretrained_facts, local(own["lm_head.weight"]).numel()

    (same, adapters, *first), (same_there, adapters_there, *other) = on_ranks(tmp_path, {"fsdp": 2}, act)
    assert same
    assert same_there
    assert all(torch.equal(left, right) for left, right in zip(adapters, adapters_there, strict=True))
    assert first[:3] == other[:3]
    assert len(first[1]) == 2 * SMALL["num_layers"]
    assert first[3] + other[3] == model.lm_head.weight.numel()


def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path):
    section = {"type": "llama", "pretrained": str(tmp_path / "nowhere")}
    config = load(tmp_path, section, {"fsdp": 2})

    def act(mesh):
        with raises(CheckpointError):
            built(config, ranks_of(mesh))

    on_ranks(tmp_path, {"fsdp": 2}, act)


# who builds what


@pytest.mark.parametrize(
    ("section", "trainer_class", "task"),
    [
        ({"type": f"{__file__}:Plain"}, Trainer, None),
        ({"type": f"{__file__}:OwnLlama", **SMALL}, Trainer, None),
        ({**SECTIONS["tied"], "replace": {"model.norm": {"type": f"{__file__}:Plain"}}}, Trainer, None),
        (SECTIONS["tied"], Reading, None),
        (None, Trainer, Building()),
    ],
    ids=["class", "subclass", "replacement", "trainer", "task"],
)
def test_every_rank_builds_the_whole_model_if_user_code_reads_it(tmp_path, section, trainer_class, task):
    build, model = built(load(tmp_path, section), alone(fsdp=2), trainer_class, task)
    assert not build.first_has_weights
    assert not any(each.is_meta for each in model.parameters())


def test_a_model_that_is_not_sharded_is_built_on_every_rank(tmp_path):
    build, model = built(load(tmp_path, SECTIONS["tied"]), alone(replicate=2))
    assert not build.first_has_weights
    assert not any(each.is_meta for each in model.parameters())


@pytest.mark.parametrize(
    "setting", ["gather_precision=fp32", "reshard_after_forward=false", "accumulate_unsharded=true"]
)
def test_a_setting_of_fsdp_warns_in_a_run_without_it(setting, tmp_path, caplog):
    load(tmp_path, {"type": "llama", **SMALL})
    config = RunConfig.load(tmp_path / "run.yaml", [f"runtime.{setting}"])
    model = torch.nn.Linear(2, 2)
    parallelize_model(model, Ranks(), config, torch.device("cpu"), for_training=False)
    assert caplog.records == []
    parallelize_model(model, Ranks(), config, torch.device("cpu"))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"runtime.{setting.partition('=')[0]}" in record.getMessage()


# memory


def test_ranks_keep_only_their_shards(tmp_path):
    config = load(tmp_path, {"type": "llama", **SMALL}, {"fsdp": 2, "tensor": 2})

    def act(mesh):
        ranks = ranks_of(mesh)
        with Peak() as peak:
            build, model = built(config, ranks)
            assert all(parameter.is_meta for parameter in model.parameters()) != ranks.is_first
            sizes = [parameter.nbytes for parameter in model.parameters()]
            arrays = followed(model) if ranks.is_first else []
            parallelized = parallelize_model(
                model, ranks, config, torch.device("cpu"), first_has_weights=build.first_has_weights
            )
        parts = sum(local(parameter).nbytes for parameter in parallelized.model.parameters())
        gc.collect()  # whether a reference cycle is freed before depends on the load of the machine
        return peak.num_bytes, parts, sizes, sum(each() is not None for each in arrays)

    (most, parts, sizes, num_left), *others = on_ranks(tmp_path, {"fsdp": 2, "tensor": 2}, act)
    assert num_left == 0
    assert most > sum(sizes) > 3 * parts
    for peak, parts_there, _, _ in others:
        padding = 0.1 * parts_there  # torch lets each part begin with as many rows as the others have
        assert parts_there <= peak < parts_there + max(sizes) + padding


class Peak(TorchDispatchMode):
    """Counts the bytes of all tensors in main memory that are made within it and alive at the same time."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0
        self._alive = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its own operations follow, on local tensors
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._alive.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))
        self._alive = [each for each in self._alive if not each[2].expired()]
        self.num_bytes = max(self.num_bytes, sum({address: size for address, size, _ in self._alive}.values()))
        return made


def followed(model):
    """Puts weights into memory of which one hears when it is let go."""
    arrays = []
    for parameter in model.parameters():
        array = parameter.detach().numpy().copy()
        parameter.data = torch.from_numpy(array)
        arrays.append(weakref.ref(array))
    return arrays
