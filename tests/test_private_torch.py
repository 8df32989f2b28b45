"""Every private torch name that the package uses: where, why, and that the installed torch has it.

A name is private if a part of its path begins with one underscore: `torch._C`, `torch.utils._pytree`,
`tensor._version`, a method `_init_group` that overrides torch's. The sources are read with `ast`. A new name belongs
into TABLE, with the one file of its subject and the reason why no public name will do.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "src" / "trainwright"
SOURCES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8"))
    for path in PACKAGE.rglob("*.py")
    if "templates" not in path.relative_to(PACKAGE).parts
}

SHARED = "backends/private_torch.py"


class Allowed(NamedTuple):
    files: tuple[str, ...]
    reason: str


def names(reason: str, *paths: str, files: tuple[str, ...] = (SHARED,)) -> dict[str, Allowed]:
    return dict.fromkeys(paths, Allowed(files, reason))


TABLE = {
    **names(
        "torch has no public functions for nested containers.",
        "torch.utils._pytree.tree_leaves",
        files=(SHARED, "api/training_main.py", "loop/state.py"),
    ),
    **names(
        "torch has no public functions for nested containers.",
        "torch.utils._pytree.tree_map",
        "torch.utils._pytree.tree_map_only",
        files=(SHARED, "loop/state.py"),
    ),
    **names(
        "torch has no public functions for nested containers.",
        "torch.utils._pytree.tree_flatten",
        "torch.utils._pytree.tree_flatten_with_path",
        "torch.utils._pytree.tree_unflatten",
        files=(SHARED, "compile/graph.py"),
    ),
    **names(
        "torch has no public functions for nested containers.",
        "torch.utils._pytree.keystr",
        "torch.utils._pytree.tree_leaves_with_path",
    ),
    **names(
        "The only way to see every operation below autograd.",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch.utils._python_dispatch._disable_current_modes",
    ),
    **names(
        "Whether a mode is active is not public.",
        "torch._C._len_torch_function_stack",
        "torch._C._len_torch_dispatch_stack",
    ),
    **names(
        "An operator's schema has no public access.",
        "torch._ops.OpOverload:_schema",
        files=(SHARED,),
    ),
    **names(
        "Tensors without memory that keep their device.",
        "torch._subclasses.fake_tensor.FakeTensor",
        "torch._subclasses.fake_tensor.FakeTensorMode",
    ),
    **names(
        "Autograd's counter of in-place writes has no other name.",
        "torch.Tensor:_version",
        files=(SHARED,),
    ),
    **names(
        "torch.compiler.assume_constant_result sets it, but imports Dynamo, which takes seconds.",
        "torch._dynamo.assume_constant_result:_dynamo_marked_constant",
    ),
    **names(
        "torch's public product of fp8 tensors is not in every supported version.",
        "torch._scaled_mm",
        files=("models/layers/fp8_linear.py",),
    ),
    **names("Whether Triton works here is not public.", "torch.utils._triton.has_triton"),
    **names(
        "The compiler's errors are not exported.",
        "torch._dynamo.exc.TorchDynamoException",
    ),
    **names(
        "The compiler's errors are not exported.",
        "torch._dynamo.exc.Unsupported",
        files=(SHARED, "compile/regions.py"),
    ),
    **names(
        "The compiler's errors are not exported.",
        "torch._dynamo.exc",
        "torch._dynamo.exc.BackendCompilerFailed",
        "torch._dynamo.exc.UserError",
        files=("compile/regions.py",),
    ),
    **names("torch.compiler has neither this setting nor one like it.", "torch._dynamo"),
    **names(
        "torch.compile documents it as the list of its options.",
        "torch._inductor",
        "torch._inductor.list_options",
        files=("compile/regions.py",),
    ),
    **names(
        "torch.compiler has neither this setting nor one like it.",
        "torch._dynamo.config.patch",
        files=(SHARED, "compile/regions.py"),
    ),
    **names(
        "The only trace of breaks that leave no graph.",
        "torch._dynamo.utils.counters",
        files=(SHARED, "compile/reports.py"),
    ),
    **names(
        "torch.compiler has no such settings.",
        "torch._dynamo.error_on_graph_break",
        "torch._functorch.config.patch",
        files=("compile/regions.py",),
    ),
    **names(
        "Compilations and graph breaks are reported nowhere else.",
        "torch._dynamo.callback.callback_handler",
        "torch._dynamo.callback.callback_handler.register_end_callback",
        "torch._dynamo.callback.callback_handler.register_start_callback",
        "torch._dynamo.callback.callback_handler.remove_end_callback",
        "torch._dynamo.callback.callback_handler.remove_start_callback",
        "torch._dynamo.callback.callback_handler.start_callbacks",
        "torch._logging._internal.log_state.artifact_names",
        "torch._logging._internal.log_state.artifact_names.add",
        "torch._logging._internal.log_state.artifact_names.discard",
        files=("compile/reports.py",),
    ),
    **names(
        "memory_snapshot() lacks what torch's viewer reads.",
        "torch.cuda.memory._dump_snapshot",
        files=("backends/cuda.py",),
    ),
    **names(
        "The only sign of a recomputation inside of a backward.",
        "torch._C._current_graph_task_id",
        files=("events/storage.py",),
    ),
    **names(
        "What get_worker_info returns cannot be set otherwise; workers are ended, and their exit codes read, nowhere "
        "else.",
        "torch.utils.data._utils.worker",
        "torch.utils.data._utils.worker._worker_info",
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter:_shutdown_workers",
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter:_workers",
        files=("data/workers.py",),
    ),
    **names(
        "No public function tells which operators decompose above autograd.",
        "torch._C._dispatch_has_kernel_for_dispatch_key",
        files=("memory/activation_checkpointing.py",),
    ),
    **names(
        "context_parallel() rewires attention for the whole process; its parts are not public.",
        "torch.distributed.tensor.experimental._context_parallel._attention._cp_options",
        "torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention",
        "torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention_backward",
        files=("parallel/context.py",),
    ),
    **names(
        "FSDP2 does not tell which gradients of a reduction were zeros.",
        "torch.distributed.fsdp.FSDPModule:_get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_fsdp_param_groups",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam:_unsharded_param",
        files=("parallel/fully_shard.py",),
    ),
    **names(
        "A capture must be joined by the streams on which FSDP2 gathers, which have no public access.",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState:_comm_ctx",
        files=("parallel/fully_shard.py",),
    ),
    **names(
        "FSDP2 copies requires_grad of a parameter once; a run may freeze and unfreeze it.",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_init_mp_dtypes",
        files=("parallel/fully_shard.py",),
    ),
    **names(
        "torch has no public function that says whether a mode is the current one.",
        "torch.overrides._get_current_function_mode",
        files=("parallel/mixed_tensors.py",),
    ),
    **names(
        "FSDP2 rounds reduced gradients to the dtype of the parameters before it adds them up.",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup:_orig_dtype",
        files=("parallel/fully_shard.py",),
    ),
    **names(
        "to_local() is differentiable, and from torch 2.13 on returns a view.",
        "torch.distributed.tensor.DTensor:_local_tensor",
        files=("parallel/mesh.py",),
    ),
    **names(
        "DTensor's cache of layouts outlives the process group.",
        "torch.distributed.tensor.debug._clear_sharding_prop_cache",
        files=("parallel/mesh.py",),
    ),
    **names(
        "The process group's store, counters and flight recorder are not public.",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._resolve_process_group",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.distributed.ProcessGroup:_get_sequence_number_for_group",
        "torch._C._distributed_c10d",
        "torch._C._distributed_c10d._dump_fr_trace_json",
        "torch._C._distributed_c10d._dump_nccl_trace_json",
        files=("parallel/collectives.py",),
    ),
    **names(
        "A pipeline's stage compares shapes, which may differ here; each torch release has one of the two.",
        "torch.distributed.pipelining.PipelineStage:_validate_fwd_outputs",
        "torch.distributed.pipelining.PipelineStage:_validate_stage_tensors",
        files=("parallel/pipeline.py",),
    ),
    **names(
        "swap_tensors() leaves a tensor's hooks behind.",
        "torch.Tensor:_backward_hooks",
        files=("parallel/replicate.py",),
    ),
    **names(
        "The only assertion that does not wait for the device.",
        "torch._assert_async",
        files=("parallel/tensor.py",),
    ),
    **names(
        "Importing it registers the process group of ranks that are not there.",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        files=("analysis/fake_ranks.py",),
    ),
    **names(
        "torch's fused kernel on stretches of parameters; the public class steps whole ones.",
        "torch._fused_adamw_",
        files=("optim/adamw.py",),
    ),
    **names(
        "torch's step on this rank's parts of split parameters.",
        "torch.optim.AdamW:_init_group",
        files=("optim/adamw.py",),
    ),
    **names(
        "Loading by assignment would untie what is tied; many libraries override it.",
        "torch.nn.Module:_load_from_state_dict",
        files=("models/model.py",),
    ),
    **names(
        "Whether Python code runs in an optimizer's step, and whether a step can be skipped on the device.",
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
        "torch.optim.Optimizer:_optimizer_step_pre_hooks",
        "torch.optim.Optimizer:_optimizer_step_post_hooks",
        "torch.optim.SGD:_step_supports_amp_scaling",
        files=("optim/device_step.py",),
    ),
}
"""Paths, where `module.Class:name` is an attribute of an object of that class or a method that is overridden.

One file for each subject; those of loop/, api/ and backends/backend.py next to SHARED are still to use its names.
"""

ONE_OF = (
    ("_fsdp_param_group", "_fsdp_param_groups"),
    ("_validate_fwd_outputs", "_validate_stage_tensors"),
    ("_dump_fr_trace_json", "_dump_nccl_trace_json"),
)
"""Names of which a torch release, or a build of it, may have only one."""

TABLES_OF_MODULES = {
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_non_persistent_buffers_set",
}
"""nn.Module's dicts, which everybody uses and torch cannot rename: allowed everywhere."""

OTHERS = {
    "_asdict": "namedtuple",
    "_fields": "namedtuple",
    "_make": "namedtuple",
    "_replace": "namedtuple",
    "_disable_adapters": "peft's layers, whose public method changes requires_grad as well",
    "_fingerprint": "datasets.Dataset",
    "_reductions": "torchmetrics.Metric",
    "_attn_implementation": "transformers' configs",
    "_can_set_attn_implementation": "transformers' models",
    "_from_config": "transformers' models",
    "_model_mapping": "transformers' auto classes",
    "_new_buffer": "torchao's optimizers",
    "_name_or_path": "transformers' configs",
    "_next_step": "trackio's runs",
    "_original_forward": "our own: memory/module_paths.py sets it",
    "_origins": "our own: config/schema.py's RunConfig",
    "_values": "our own: config/frozen.py's mappings",
}
"""Private names of objects that are not torch's, in files that do not define them."""


class Found(NamedTuple):
    """A path whose parts are known, or the bare name of an object's attribute."""

    name: str
    place: str

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def is_multi_tensor(path: str) -> bool:
    """torch's multi-tensor operations, which its own optimizers are made of: one subject, allowed everywhere."""
    return path.startswith("torch._foreach_")


def is_operator(path: str) -> bool:
    """An operator is no Python name: what begins with an underscore is as stable as the others."""
    return path.startswith("torch.ops.")


class Reader:
    """Reads one file: which torch paths its names stand for, and which private ones it uses."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self.file = file
        self.tree = tree
        self.modules: dict[str, str] = {}
        """What imports and plain assignments make of a name; "" for what is not torch's."""
        self.defined: set[str] = set()
        """Private names that this file gives to its own objects."""
        for node in ast.walk(tree):
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                path = alias.name if alias.asname else top
                self.modules[alias.asname or top] = path if top == "torch" else ""
        elif isinstance(node, ast.ImportFrom):
            is_torch = (node.module or "").partition(".")[0] == "torch"
            for alias in node.names:
                self.modules[alias.asname or alias.name] = f"{node.module}.{alias.name}" if is_torch else ""
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and node.value is not None and (path := self.path_of(node.value)):
                    self.modules[target.id] = path
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) in ("self", "cls"):
                    self.defined.add(target.attr)
                if isinstance(target, ast.Tuple):
                    self.defined |= {each.attr for each in target.elts if isinstance(each, ast.Attribute)}
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.defined.add(each.name)
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                    self.defined.add(each.target.id)
                elif isinstance(each, ast.Assign):
                    self.defined |= {one.id for one in each.targets if isinstance(one, ast.Name)}

    def path_of(self, node: ast.AST) -> str | None:
        """The torch path of `torch.nn.Module`, `dist.x`, …; "" for a name of another package; None: an object."""
        if isinstance(node, ast.Name):
            return self.modules.get(node.id)
        if isinstance(node, ast.Attribute):
            before = self.path_of(node.value)
            return f"{before}.{node.attr}" if before else before
        return None

    def uses(self) -> Iterator[Found]:
        inner: set[ast.AST] = set()  # the torch.a of a torch.a.b, which was seen as a whole
        for node in ast.walk(self.tree):
            place = f"{self.file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                yield from (Found(alias.name, place) for alias in node.names if alias.name.startswith("torch."))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                yield from (Found(f"{node.module}.{alias.name}", place) for alias in node.names)
            elif isinstance(node, ast.Attribute):
                inner.add(node.value)
                path = self.path_of(node)
                if path and node not in inner:
                    yield Found(path, place)
                elif path is None and node.attr not in self.defined:
                    yield Found(node.attr, place)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
                owner, name = node.args[0], node.args[1]
                if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value not in self.defined:
                    path = self.path_of(owner)
                    yield Found(f"{path}.{name.value}" if path else name.value, place)
            elif isinstance(node, ast.ClassDef):
                bases = [found(path) for base in node.bases if (path := self.path_of(base))]
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                yield from (Found(name, place) for name in methods if any(hasattr(base, name) for base in bases))


def found(path: str) -> Any:
    """The object behind a path in the installed torch; raises AttributeError or ImportError where there is none."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise ImportError(path)


def private_uses() -> list[Found]:
    uses = [use for file, tree in SOURCES.items() for use in Reader(file, tree).uses()]
    return [use for use in uses if any(map(is_private, use.name.split(".")))]


USES = private_uses()
TORCH_USES = [
    use
    for use in USES
    if use.name not in TABLES_OF_MODULES | OTHERS.keys() and not is_multi_tensor(use.name) and not is_operator(use.name)
]
BY_NAME = {key if ":" not in key else key.rpartition(":")[2]: allowed for key, allowed in TABLE.items()}


def test_each_private_torch_name_is_in_the_table_and_only_in_its_file():
    unknown = [f"{use.place} {use.name}" for use in TORCH_USES if use.name not in BY_NAME]
    assert unknown == [], "use a public name, or add it to TABLE with its reason"
    elsewhere = [f"{use.place} {use.name}" for use in TORCH_USES if use.file not in BY_NAME[use.name].files]
    assert elsewhere == [], "use the function of the file that TABLE names"


def test_the_table_names_nothing_that_is_not_used():
    unused = [
        f"{file} {key}"
        for key, allowed in TABLE.items()
        for file in allowed.files
        if key.replace(":", ".").rpartition(".")[2] not in (PACKAGE / file).read_text("utf-8")
    ]
    assert unused == []
    assert all(allowed.reason for allowed in TABLE.values())


def has(key: str) -> bool:
    path, _, attribute = key.partition(":")
    try:
        owner = found(path)
    except (ImportError, AttributeError):
        return False
    if not attribute or hasattr(owner, attribute):
        return True
    # An attribute that only objects have is set in the class, or in the function that makes it.
    kinds = owner.__mro__ if isinstance(owner, type) else [owner]
    return any(f".{attribute}" in inspect.getsource(kind) for kind in kinds if kind is not object)


@pytest.mark.parametrize("key", TABLE)
def test_the_installed_torch_has_each_name(key):
    last = key.replace(":", ".").rpartition(".")[2]
    pair = next((pair for pair in ONE_OF if last in pair), (last,))
    assert any(has(key.removesuffix(last) + each) for each in pair), f"torch {torch.__version__} has no {key}"


def test_the_installed_torch_has_each_multi_tensor_operation_and_operator():
    paths = {use.name for use in USES if is_multi_tensor(use.name) or is_operator(use.name)}
    assert len([path for path in paths if is_multi_tensor(path)]) > 5
    assert [path for path in sorted(paths) if not has(path)] == []


def test_the_tables_of_modules_are_there():
    assert vars(torch.nn.Module()).keys() >= TABLES_OF_MODULES


def test_a_new_private_name_is_found_however_it_is_written():
    text = """
import torch
import torch._inductor
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

functions = F._hidden
class Mine(nn.Module):
    def _apply(self, fn): ...
    def _own(self): return self._own
    def call(self, tensor): return tensor._storage_of, getattr(tensor, "_named"), self._forward_hooks_of
"""
    uses = {use.name for use in Reader("new.py", ast.parse(text)).uses() if any(map(is_private, use.name.split(".")))}
    assert uses == {
        "torch._inductor",
        "torch.utils._pytree",
        "torch.nn.functional._hidden",
        "_apply",
        "_storage_of",
        "_named",
        "_forward_hooks_of",
    }
