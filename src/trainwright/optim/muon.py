"""Muon: hidden matrices are updated with orthogonalized momentum (Jordan et al., 2024), all other parameters with
AdamW.

A sharded matrix is gathered on one rank and orthogonalized there, and the shards are sent back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from trainwright.errors import ConfigError
from trainwright.models.layers.settings import keywords_of
from trainwright.models.names import as_globs, unmatched
from trainwright.optim.adamw import STATE_DTYPES, has_fused_kernel, step_group
from trainwright.optim.device_step import (
    ListOptimizer,
    in_chunks,
    unless,
    unscale_gradients,
)
from trainwright.optim.param_groups import reject_impossible, uses_muon
from trainwright.optim.sharded import shard_like, sharded_axes
from trainwright.parallel.mesh import is_split, local

RATIOS: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""The factor on an orthogonal update in addition to lr; rows and columns are the weight's."""

NS_DTYPES = {**STATE_DTYPES, "fp64": torch.float64}


@dataclass(frozen=True)
class _SplitRule:
    """How an added group is split into Muon's parameters and AdamW's."""

    kinds: Mapping[str, str] | None
    exclude: tuple[str, ...]
    adamw_settings: Mapping[str, float | None]


class Muon(ListOptimizer):
    """Muon for hidden matrices and convolutions (flattened), fused AdamW for embeddings, heads, vectors and the rest.

    Every group is split in two, which are distinguished by `use_muon`. `kinds` (parameter name → kind) is what
    `classify_parameters(model)` returns; the builder passes it. Without it, kinds are guessed from shapes and from
    names as in `model.named_parameters()`. A parameter's attribute `no_muon` overrides its kind, and `exclude` is a
    list of globs over the names of parameters for AdamW.

    `adjust_lr_fn` is that of torch: `match_rms_adamw` scales updates to the size of AdamW's, so both can use the same
    lr and weight_decay; `original` needs a larger lr for Muon and a smaller `adamw_lr`. None for `adamw_lr` and
    `adamw_weight_decay` means the same as Muon's. A group's own lr or weight_decay applies to both of its halves.
    `ns_dtype` is the dtype of the iteration, `bf16`, `fp32` or `fp64`. Matrices of equal shape are one batch; sharded
    matrices are distributed over their ranks.
    `master_weights` keeps an fp32 master of every 16-bit weight, and all of its state in fp32; `stochastic` rounds bf16
    weights stochastically instead. `report` returns `update_norm`, at the cost of one more copy of the weights.
    """

    averages = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    needs_parameter_kinds = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        ns_dtype: str = "bf16",
        eps: float = 1e-7,
        adjust_lr_fn: str = "match_rms_adamw",
        adamw_lr: float | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        exclude: str | Sequence[str] = (),
        kinds: Mapping[str, str] | None = None,
        master_weights: bool | str = False,
        report: bool = False,
    ) -> None:
        defaults = keywords_of(locals())
        for name in ("params", "adamw_lr", "adamw_weight_decay", "exclude", "kinds"):
            del defaults[name]
        defaults |= {"ns_coefficients": tuple(ns_coefficients), "adamw_betas": tuple(adamw_betas)}
        reject_impossible(**defaults)
        reject_impossible(adamw_lr=adamw_lr, adamw_weight_decay=adamw_weight_decay)
        globs = as_globs("exclude", exclude)
        self._rule = _SplitRule(kinds, globs, {"lr": adamw_lr, "weight_decay": adamw_weight_decay})
        super().__init__(params, defaults)
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for glob in globs:
            if not names:
                raise ConfigError("exclude needs names. Pass model.named_parameters() instead of parameters().")
            if not any(fnmatchcase(name, glob) for name in names):
                raise ConfigError(f"exclude: {unmatched(glob, names, 'parameter')}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, as in torch, split into Muon's parameters and AdamW's; either half may be empty."""
        group = dict(param_group)
        settings = {**self.defaults, **group}
        for name, known in (("adjust_lr_fn", RATIOS), ("ns_dtype", NS_DTYPES)):
            if settings[name] not in known:
                raise ConfigError(f"{name} is {settings[name]!r}. Use one of: {', '.join(known)}.")
        if len(settings["ns_coefficients"]) != 3:
            raise ConfigError(f"ns_coefficients are {settings['ns_coefficients']}. Use three numbers.")
        members = group.pop("params")
        members = [members] if isinstance(members, Tensor) else list(members)
        names = group.pop("param_names", [None] * len(members))
        halves: dict[bool, list[Any]] = {True: [], False: []}
        for name, member in zip(names, members, strict=True):
            name, parameter = member if isinstance(member, tuple) else (name, member)
            is_excluded = name is not None and any(fnmatchcase(name, glob) for glob in self._rule.exclude)
            use_muon = not is_excluded and uses_muon(name, parameter, self._rule.kinds)
            halves[use_muon].append(parameter if name is None else (name, parameter))
        for use_muon, half in halves.items():
            if not half:
                continue
            parameters = [member[1] if isinstance(member, tuple) else member for member in half]
            # `fused` is torch's name for a step that reads found_inf.
            half_group = {**group, "params": half, "use_muon": use_muon, "fused": True}
            if not use_muon:
                own = {key: value for key, value in self._rule.adamw_settings.items() if value is not None}
                half_group = {**own, **half_group, "fused": all(map(has_fused_kernel, parameters))}
            if settings["master_weights"] and not half_group["fused"]:
                raise ConfigError("master_weights needs torch's fused AdamW, which this device lacks.")
            super().add_param_group(half_group)

    def step_group(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        """Steps the parameters of one half that have a gradient."""
        if not group["use_muon"]:
            self._step_by_adamw(parameters, group)
            return
        turn = 0
        for alike in _by_shape(parameters, has_shards=self.is_sharded):
            for chunk in in_chunks(alike):
                self._step_matrices(alike[chunk], group, turn)
                turn += len(alike[chunk])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rule": self._rule}

    def _step_matrices(self, parameters: list[Tensor], group: Mapping[str, Any], turn: int) -> None:
        """Steps matrices whose wide forms have one shape: one batch through Newton–Schulz."""
        stepped = self.stepped_weights(parameters, group)
        buffers = self.state_of(parameters, stepped, "momentum_buffer")
        gradients, weights = self.gradients_of(parameters, group), self.shards_of(stepped)
        skip = unscale_gradients(self, gradients, buffers)
        updates = self._orthogonal_updates(parameters, gradients, buffers, group, turn)
        rate = unless(skip, group["lr"], 0.0)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
        for tall in (False, True):  # a matrix and its transpose share a batch, but their ratio may differ
            some = [n for n, parameter in enumerate(parameters) if _is_tall(parameter) is tall]
            if some:
                rows = parameters[some[0]].shape[0]
                ratio = RATIOS[group["adjust_lr_fn"]](rows, parameters[some[0]].numel() // rows)
                # Two passes: a single one accepts the rate only as a number, and rounds differently.
                torch._foreach_mul_([updates[n] for n in some], rate * ratio)
                torch._foreach_sub_([weights[n] for n in some], [updates[n] for n in some])
        self.round_weights(parameters, stepped, group)

    def _orthogonal_updates(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
        group: Mapping[str, Any],
        turn: int,
    ) -> list[Tensor]:
        """Updates the momentum and returns it orthogonalized, in its own dtype and layout for the foreach kernels."""
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, buffers, group["momentum"]))
        else:
            updates = [buffer.clone() for buffer in buffers]
        if self.is_sharded:
            narrow = [update.to(NS_DTYPES[group["ns_dtype"]]) for update in updates]  # bf16 halves the communication
            orthogonal = map_full_tensors(lambda full: _orthogonal(full, group), narrow, parameters, turn=turn)
        else:
            orthogonal = _orthogonal(updates, group)
        torch._foreach_copy_(updates, orthogonal)
        return updates

    def _step_by_adamw(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        if group["master_weights"]:
            settings = {**group, "betas": group["adamw_betas"], "eps": group["adamw_eps"], "maximize": False}
            step_group(self, settings, torch.float32)
            return
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                device = parameter.device if group["fused"] else torch.device("cpu")
                self.state[parameter]["step"] = torch.zeros((), dtype=torch.float32, device=device)
        if parameters:
            adamw(
                self.shards_of(parameters),
                self.gradients_of(parameters, group),
                self.state_of(parameters, parameters, "exp_avg"),
                self.state_of(parameters, parameters, "exp_avg_sq"),
                [],
                [self.state[parameter]["step"] for parameter in parameters],
                fused=group["fused"] or None,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                amsgrad=False,
                beta1=group["adamw_betas"][0],
                beta2=group["adamw_betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["adamw_eps"],
                maximize=False,
            )


def orthogonalize(batch: Tensor, coefficients: Sequence[float], *, steps: int, eps: float) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near 1. The batch is overwritten.

    The shape is [matrices, rows, columns] with rows ≤ columns, because the products of the iteration are rows × rows. A
    matrix with a norm below `eps` becomes small, not large; zeros stay zeros.
    """
    a, b, c = coefficients
    # A sum of squares in bf16 would lose most of its bits.
    norm_dtype = torch.promote_types(batch.dtype, torch.float32)
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True, dtype=norm_dtype)
    batch.div_(norms.clamp(min=eps))  # the largest singular value is now at most 1
    for _ in range(steps):
        gram = batch @ batch.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·G + c·G²
        batch = torch.baddbmm(batch, polynomial, batch, beta=a)  # a·X + (b·G + c·G²)·X
    return batch


def as_wide_matrix(tensor: Tensor) -> Tensor:
    """Returns the tensor as [dim 0, the other dims], transposed if it has more rows than columns."""
    matrix = tensor.flatten(1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _is_tall(parameter: Tensor) -> bool:
    rows: int = parameter.shape[0]
    return rows * rows > parameter.numel()


def _orthogonal(updates: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Returns the updates orthogonalized, in the dtype of the iteration; all have one wide shape."""
    matrices = [as_wide_matrix(update) for update in updates]
    shape = (len(matrices), *matrices[0].shape)
    batch = torch.empty(shape, dtype=NS_DTYPES[group["ns_dtype"]], device=matrices[0].device)
    torch._foreach_copy_(list(batch.unbind()), matrices)
    batch = orthogonalize(batch, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
    return [
        (matrix.mT if _is_tall(update) else matrix).reshape(update.shape)
        for matrix, update in zip(batch, updates, strict=True)
    ]


def _by_shape(parameters: list[Tensor], *, has_shards: bool) -> list[list[Tensor]]:
    """Groups parameters whose matrices have one shape; a matrix and its transpose count as one shape.

    Sharded ones are grouped only if shape and layout are equal, because they are exchanged together.
    """
    alike = defaultdict(list)
    for parameter in parameters:
        rows = parameter.shape[0]
        sides = sorted((rows, parameter.numel() // rows))
        layout = (parameter.shape, layout_of(parameter)) if has_shards else None
        alike[(*sides, parameter.dtype, parameter.device, layout)].append(parameter)
    return list(alike.values())


def layout_of(parameter: Any) -> object:
    """Returns a value that is equal for parameters with the same sharding; None for one that is not sharded."""
    return (parameter.device_mesh, parameter.placements) if is_split(parameter) else None


FullTensorFunction = Callable[[list[Tensor]], list[Tensor]]
"""Maps full tensors to others of the same shapes."""


def map_full_tensors(
    function: FullTensorFunction, shards: Sequence[Tensor], parameters: Sequence[Any], *, turn: int = 0
) -> list[Tensor]:
    """Applies `function` to the full tensors, of which `shards` are this rank's shards, and returns this rank's shards
    of the result.

    All `parameters` have one shape and one sharding. Tensor n is computed by rank (turn + n) of those that share it.
    Collective along the axes along which the parameters are sharded.
    """
    first = parameters[0]
    axes = sharded_axes(first)
    if not axes:
        return function(list(shards))
    placement = first.placements[axes[0]]
    if len(axes) == 1 and placement.is_shard():
        group = first.device_mesh.get_group(axes[0])
        return _map_on_owners(function, shards, first.shape, placement.dim, group, turn)
    # If tensors are sharded along several axes, their shards are nested: torch gathers them, and every rank computes
    # all tensors.
    from torch.distributed.tensor import DTensor  # slow to import, and a single process does not need it

    full = []
    for shard, parameter in zip(shards, parameters, strict=True):
        options: Any = {"run_check": False, "shape": parameter.shape, "stride": parameter.stride()}
        full.append(DTensor.from_local(shard, parameter.device_mesh, parameter.placements, **options).full_tensor())
    return [
        local(shard_like(result.contiguous(), parameter))
        for result, parameter in zip(function(full), parameters, strict=True)
    ]


def _map_on_owners(
    function: FullTensorFunction, shards: Sequence[Tensor], shape: torch.Size, dim: int, group: Any, turn: int
) -> list[Tensor]:
    """Sends tensors sharded along one dim to their owners and the results back: two all-to-alls."""
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    longest = -(-shape[dim] // num_ranks)
    lengths = [min(longest, max(shape[dim] - longest * each, 0)) for each in range(num_ranks)]
    shapes = [torch.Size((*shape[:dim], length, *shape[dim + 1 :])) for length in lengths]
    owners = [(turn + number) % num_ranks for number in range(len(shards))]
    num_owned = [owners.count(each) for each in range(num_ranks)]
    own = num_owned[rank]
    order = sorted(range(len(shards)), key=lambda number: owners[number])
    sizes_there = [shapes[rank].numel() * count for count in num_owned]
    sizes_back = [each.numel() * own for each in shapes]
    received = _exchange(torch.cat([shards[n].reshape(-1) for n in order]), sizes_there, sizes_back, group)
    results = received.new_empty(0)
    if own:
        # Each rank has sent its shards of all tensors that this rank owns, one after the other.
        stacks = [
            chunk.view(own, *each)
            for chunk, each in zip(received.split(sizes_back), shapes, strict=True)  # type: ignore[no-untyped-call]
        ]
        done = torch.stack(function(list(torch.cat(stacks, dim=dim + 1).unbind())))
        results = torch.cat([chunk.reshape(-1) for chunk in done.split(lengths, dim=dim + 1)])  # type: ignore[no-untyped-call]
    received = _exchange(results, sizes_back, sizes_there, group)
    chunks = dict(zip(order, received.view(len(shards), shapes[rank].numel()), strict=True))
    return [chunks[number].view(shapes[rank]) for number in range(len(shards))]


def _exchange(sent: Tensor, sizes: list[int], sizes_received: list[int], group: Any) -> Tensor:
    received = sent.new_empty(sum(sizes_received))
    dist.all_to_all_single(received, sent, sizes_received, sizes, group=group)
    return received
