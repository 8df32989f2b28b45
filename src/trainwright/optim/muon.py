"""Muon: hidden matrices move by their orthogonalized momentum (Jordan et al., 2024); all else moves by AdamW.

Where matrices are sharded, each is assembled on one rank, orthogonalized there, and the shards are sent back.
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
from trainwright.models.names import as_globs, unmatched
from trainwright.optim import adamw as rounded_moments
from trainwright.optim.adamw import STATE_DTYPES, has_fused_kernel
from trainwright.optim.device_step import (
    copy_reported,
    device_of,
    entries_of,
    in_chunks,
    report_update,
    run_closure,
    settle_gradients,
    settle_loaded,
    tensors_of,
    unless,
    updated_parameters,
)
from trainwright.optim.master_weights import check_masters, masters_of, settle_masters, widen, write_back
from trainwright.optim.param_groups import reject_impossible, uses_muon
from trainwright.optim.sharded import has_parts, optimizes_parts, own_gradients, own_parts, part_of, split_axes
from trainwright.parallel.mesh import is_split, local


def orthogonalize(batch: Tensor, coefficients: Sequence[float], *, steps: int, eps: float) -> Tensor:
    """Returns matrices with the same singular vectors and singular values near 1. The batch is overwritten.

    The shape is [matrices, rows, columns] with rows ≤ columns, for the iteration's squares are rows × rows. A matrix
    of norm below `eps` becomes small, not large; one of zeros stays zero.
    """
    a, b, c = coefficients
    norms = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True, dtype=_norm_dtype(batch))
    batch.div_(norms.clamp(min=eps))  # the largest singular value is now at most 1
    for _ in range(steps):
        gram = batch @ batch.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b·G + c·G²
        batch = torch.baddbmm(batch, polynomial, batch, beta=a)  # a·X + (b·G + c·G²)·X
    return batch


def as_wide_matrix(tensor: Tensor) -> Tensor:
    """Returns the tensor as [dim 0, the rest], transposed where that is taller than wide."""
    matrix = tensor.flatten(1)
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _norm_dtype(batch: Tensor) -> torch.dtype:
    return torch.promote_types(batch.dtype, torch.float32)  # a sum of squares in bf16 would lose most of its bits


Act = Callable[[list[Tensor]], list[Tensor]]
"""Turns whole tensors into others of the same shapes; given an empty list where a rank has none to work on."""


def act_on_whole(parts: Sequence[Tensor], parameters: Sequence[Any], act: Act, *, turn: int = 0) -> list[Tensor]:
    """Returns this rank's parts of `act` of the whole tensors, of which `parts` are this rank's.

    `parameters` say how each is split; all must be split alike and have one shape. The one with number n is worked
    on by rank (turn + n) of those that share it. Collective along the axes where the parameters are split.
    """
    first = parameters[0]
    axes = split_axes(first)
    if not axes:
        return act(list(parts))
    placement = first.placements[axes[0]]
    if len(axes) > 1 or not placement.is_shard():
        # Split along several axes: the parts lie in each other, and torch knows how. Every rank does all of the work.
        return _act_everywhere(parts, parameters, act)
    return _Exchange(first.shape, placement.dim, first.device_mesh.get_group(axes[0]), turn).run(parts, act)


def layout_of(parameter: Any) -> object:
    """Returns what is equal for parameters that are split alike; None for one that is whole."""
    return (parameter.device_mesh, parameter.placements) if is_split(parameter) else None


class _Exchange:
    """The two all-to-alls of tensors of one shape that are split along one dim over the ranks of a group."""

    def __init__(self, shape: torch.Size, dim: int, group: Any, turn: int) -> None:
        self.dim = dim
        self.group = group
        self.turn = turn
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        longest = -(-shape[dim] // self.size)
        ends = [min(longest * (rank + 1), shape[dim]) for rank in range(self.size)]
        lengths = [end - min(longest * rank, shape[dim]) for rank, end in enumerate(ends)]
        self.shapes = [torch.Size((*shape[:dim], length, *shape[dim + 1 :])) for length in lengths]

    def run(self, parts: Sequence[Tensor], act: Act) -> list[Tensor]:
        owners = [(self.turn + number) % self.size for number in range(len(parts))]
        num_owned = [owners.count(rank) for rank in range(self.size)]
        own, mine = self.shapes[self.rank].numel(), num_owned[self.rank]
        order = sorted(range(len(parts)), key=lambda number: owners[number])
        sizes_there = [own * count for count in num_owned]
        sizes_back = [shape.numel() * mine for shape in self.shapes]
        sent = torch.cat([parts[number].reshape(-1) for number in order])
        received = _exchange(sent, sizes_there, sizes_back, self.group)
        # From each rank came its parts of all my matrices, one after the other.
        stacks = [
            chunk.view(mine, *shape)
            for chunk, shape in zip(received.split(sizes_back), self.shapes, strict=True)  # type: ignore[no-untyped-call]
        ]
        done = act(list(torch.cat(stacks, dim=self.dim + 1).unbind()) if mine else [])
        if mine:
            lengths = [shape[self.dim] for shape in self.shapes]
            chunks = torch.stack(done).split(lengths, dim=self.dim + 1)  # type: ignore[no-untyped-call]
            sent = torch.cat([chunk.reshape(-1) for chunk in chunks])
        else:
            sent = received.new_empty(0)
        received = _exchange(sent, sizes_back, sizes_there, self.group)
        back: list[Tensor] = [received] * len(parts)
        for number, chunk in zip(order, received.view(len(parts), own), strict=True):
            back[number] = chunk.view(self.shapes[self.rank])
        return back


def _exchange(sent: Tensor, sizes: list[int], sizes_received: list[int], group: Any) -> Tensor:
    received = sent.new_empty(sum(sizes_received))
    dist.all_to_all_single(received, sent, sizes_received, sizes, group=group)
    return received


def _act_everywhere(parts: Sequence[Tensor], parameters: Sequence[Any], act: Act) -> list[Tensor]:
    from torch.distributed.tensor import DTensor  # slow to import, and one process has no use for it

    whole = []
    for part, parameter in zip(parts, parameters, strict=True):
        mesh, placements = parameter.device_mesh, parameter.placements
        laid_out = DTensor.from_local(
            part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        whole.append(laid_out.full_tensor())
    return [
        local(part_of(done.contiguous(), like=parameter))
        for done, parameter in zip(act(whole), parameters, strict=True)
    ]


RATIOS: Mapping[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""What an orthogonal update is multiplied by beside lr; rows and columns are the weight's."""

NS_DTYPES = {**STATE_DTYPES, "fp64": torch.float64}


@dataclass(frozen=True)
class _Rule:
    """What is decided when a group is added."""

    kinds: Mapping[str, str] | None
    exclude: tuple[str, ...]
    adamw_lr: float | None
    adamw_weight_decay: float | None


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices and convolutions (flattened), fused AdamW for embeddings, heads, vectors and the rest.

    Every group is split in two: `use_muon` says which half is which. `kinds` (parameter name → kind) is what
    `classify_parameters(model)` returns; the builder gives it. Without it kinds are guessed from names, such as
    `model.named_parameters()` gives, and shapes. A parameter's attribute `no_muon` overrules its kind, and `exclude`
    is globs over names that go to AdamW.

    `adjust_lr_fn` is torch's: `match_rms_adamw` scales updates to the size of AdamW's, so that one lr and one
    weight_decay serve both; `original` wants a larger lr for Muon and a smaller `adamw_lr`. None for `adamw_lr` and
    `adamw_weight_decay` means the same as Muon's. A group's own lr or weight_decay is for both of its halves.
    `ns_dtype` is what the iteration computes in, `bf16`, `fp32` or `fp64`. Matrices of equal shape go through it
    together; of matrices that are split over ranks each rank does its share (spread_matrices.py).
    `master_weights` keeps an fp32 master of every weight in 16 bits, and all of its state in fp32 (master_weights.py).
    `report` returns `update_norm`, for one more copy of the weights.
    """

    _step_supports_amp_scaling = True
    needs_parameter_kinds = True
    stages: Any = None
    """The process group of the ranks with other layers, whose metrics are summed with these; None: there are none."""
    _has_parts = False

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
        master_weights: bool = False,
        report: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": tuple(ns_coefficients),
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "eps": eps,
            "adjust_lr_fn": adjust_lr_fn,
            "adamw_betas": (adamw_betas[0], adamw_betas[1]),
            "adamw_eps": adamw_eps,
            "master_weights": master_weights,
            "report": report,
        }
        reject_impossible(**defaults)
        reject_impossible(adamw_lr=adamw_lr, adamw_weight_decay=adamw_weight_decay)
        self._rule = _Rule(kinds, as_globs("exclude", exclude), adamw_lr, adamw_weight_decay)
        entries = entries_of(params, owner="Muon")
        if master_weights:
            check_masters(tensors_of(entries))
        super().__init__(entries, defaults)
        self._is_loaded = False
        self._reject_unmatched()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as in torch, split into what is Muon's and what is AdamW's; either may be missing."""
        group = dict(param_group)
        _check_choices({**self.defaults, **group})
        members = _named_members(group)
        halves: dict[bool, list[tuple[str | None, Tensor]]] = {True: [], False: []}
        for name, parameter in members:
            is_excluded = name is not None and any(fnmatchcase(name, glob) for glob in self._rule.exclude)
            halves[not is_excluded and uses_muon(name, parameter, self._rule.kinds)].append((name, parameter))
        for use_muon, half in halves.items():
            if half:
                own = {} if use_muon else self._adamw_settings(group)
                # torch's word for a step that knows found_inf.
                fused = use_muon or all(has_fused_kernel(parameter) for _, parameter in half)
                if not fused and {**self.defaults, **group}["master_weights"]:
                    raise ConfigError("master_weights needs torch's fused AdamW, which this device lacks.")
                entries = [parameter if name is None else (name, parameter) for name, parameter in half]
                super().add_param_group({**own, **group, "params": entries, "use_muon": use_muon, "fused": fused})
                self._has_parts = self._has_parts or has_parts(parameter for _, parameter in half)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Updates the parameters in place and returns the metrics that were asked for."""
        run_closure(closure)
        copied = copy_reported(self)
        if self._is_loaded:
            settle_masters(self, ("momentum_buffer", "exp_avg", "exp_avg_sq"))
            self._is_loaded = False
        for group in self.param_groups:
            parameters = updated_parameters(group)
            if not parameters:
                continue
            if not group["use_muon"]:
                self._step_by_adamw(parameters, group)
                continue
            turn = 0
            for alike in _by_shape(parameters, has_parts=self._has_parts):
                for chunk in in_chunks(alike):
                    self._step_matrices(alike[chunk], group, turn)
                    turn += len(alike[chunk])
        return report_update(copied, stages=self.stages, device=device_of(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores `state_dict()`, each tensor in the dtype that it was saved in."""
        super().load_state_dict(state_dict)
        settle_loaded(self, state_dict)
        self._is_loaded = True

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_rule": self._rule}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_loaded = True
        for group in self.param_groups:
            group.setdefault("master_weights", False)
        self._has_parts = optimizes_parts(self)

    def _gradients(self, parameters: list[Tensor]) -> list[Tensor]:
        if self._has_parts:
            return own_gradients(parameters)
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _step_matrices(self, parameters: list[Tensor], group: Mapping[str, Any], turn: int) -> None:
        """Steps matrices whose wide forms have one shape: one batch through Newton–Schulz."""
        stepped = masters_of(self, parameters) if group["master_weights"] else parameters
        for parameter, weight in zip(parameters, stepped, strict=True):
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(weight)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients, weights = self._gradients(parameters), stepped
        if self._has_parts:
            buffers, weights = own_parts(buffers), own_parts(stepped)
        if group["master_weights"]:
            gradients = widen(gradients)
        skip = settle_gradients(self, gradients, buffers)
        updates = self._orthogonal_updates(parameters, gradients, buffers, group, turn)
        rate = unless(skip, group["lr"], 0.0)
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1.0 - rate * group["weight_decay"])
        for tall in (False, True):  # a matrix and its transpose share a batch, but their ratio may differ
            some = [n for n, parameter in enumerate(parameters) if _is_tall(parameter) is tall]
            if some:
                rows = parameters[some[0]].shape[0]
                ratio = RATIOS[group["adjust_lr_fn"]](rows, parameters[some[0]].numel() // rows)
                # Two passes: one that does both takes the rate only as a number, and rounds otherwise.
                torch._foreach_mul_([updates[n] for n in some], rate * ratio)
                torch._foreach_sub_([weights[n] for n in some], [updates[n] for n in some])
        if group["master_weights"]:
            write_back(own_parts(parameters), weights)

    def _orthogonal_updates(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        buffers: list[Tensor],
        group: Mapping[str, Any],
        turn: int,
    ) -> list[Tensor]:
        """Moves the momentum and returns it orthogonalised, in its own dtype and layout: lists take the fast path."""
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        if group["nesterov"]:
            updates = list(torch._foreach_lerp(gradients, buffers, group["momentum"]))
        else:
            updates = [buffer.clone() for buffer in buffers]
        if self._has_parts:
            narrow = [update.to(NS_DTYPES[group["ns_dtype"]]) for update in updates]  # half of what is sent, in bf16
            orthogonal = act_on_whole(narrow, parameters, lambda whole: _orthogonal(whole, group), turn=turn)
        else:
            orthogonal = _orthogonal(updates, group)
        torch._foreach_copy_(updates, orthogonal)
        return updates

    def _step_by_adamw(self, parameters: list[Tensor], group: Mapping[str, Any]) -> None:
        if group["master_weights"]:
            settings = {**group, "betas": group["adamw_betas"], "eps": group["adamw_eps"], "maximize": False}
            rounded_moments.step_group(self, settings, torch.float32, has_masters=True)
            return
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                device = parameter.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        states = [self.state[parameter] for parameter in parameters]
        gradients = self._gradients(parameters)
        firsts, seconds = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        if self._has_parts:
            parameters, firsts, seconds = own_parts(parameters), own_parts(firsts), own_parts(seconds)
        adamw(
            parameters,
            gradients,
            firsts,
            seconds,
            [],
            [state["step"] for state in states],
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

    def _adamw_settings(self, group: Mapping[str, Any]) -> dict[str, float]:
        own = {"lr": self._rule.adamw_lr, "weight_decay": self._rule.adamw_weight_decay}
        return {key: value for key, value in own.items() if value is not None and key not in group}

    def _reject_unmatched(self) -> None:
        """Rejects globs of `exclude` that match no parameter: they would exclude nothing, silently."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for glob in self._rule.exclude:
            if not names:
                raise ConfigError("exclude needs names. Give model.named_parameters() in place of parameters().")
            if not any(fnmatchcase(name, glob) for name in names):
                raise ConfigError(f"exclude: {unmatched(glob, names, 'parameter')}")


def _named_members(group: dict[str, Any]) -> list[tuple[str | None, Tensor]]:
    """Takes the parameters out of a group, each with its name where it has one."""
    members = group.pop("params")
    members = [members] if isinstance(members, Tensor) else list(members)
    names = group.pop("param_names", [None] * len(members))
    return [
        member if isinstance(member, tuple) else (name, member) for name, member in zip(names, members, strict=True)
    ]


def _check_choices(group: Mapping[str, Any]) -> None:
    for name, known in (("adjust_lr_fn", RATIOS), ("ns_dtype", NS_DTYPES)):
        if group[name] not in known:
            raise ConfigError(f"{name} is {group[name]!r}. Use one of: {', '.join(known)}.")
    if len(group["ns_coefficients"]) != 3:
        raise ConfigError(f"ns_coefficients are {group['ns_coefficients']}. Use three numbers.")


def _orthogonal(updates: list[Tensor], group: Mapping[str, Any]) -> list[Tensor]:
    """Returns the updates orthogonalised, in the dtype of the iteration; all have one wide shape."""
    if not updates:
        return []
    matrices = [as_wide_matrix(update) for update in updates]
    batch = torch.empty(
        (len(matrices), *matrices[0].shape), dtype=NS_DTYPES[group["ns_dtype"]], device=matrices[0].device
    )
    torch._foreach_copy_(list(batch.unbind()), matrices)
    batch = orthogonalize(batch, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
    return [_shaped_back(matrix, to=update) for matrix, update in zip(batch, updates, strict=True)]


def _by_shape(parameters: list[Tensor], *, has_parts: bool) -> list[list[Tensor]]:
    """Groups parameters whose matrices have one shape, counting a matrix and its transpose as one.

    Split ones go together only where they have one shape and are split alike, for they travel together.
    """
    alike = defaultdict(list)
    for parameter in parameters:
        rows = parameter.shape[0]
        sides = sorted((rows, parameter.numel() // rows))
        layout = (parameter.shape, layout_of(parameter)) if has_parts else None
        alike[(*sides, parameter.dtype, parameter.device, layout)].append(parameter)
    return list(alike.values())


def _is_tall(parameter: Tensor) -> bool:
    rows: int = parameter.shape[0]
    return rows * rows > parameter.numel()


def _shaped_back(matrix: Tensor, *, to: Tensor) -> Tensor:
    return (matrix.mT if _is_tall(to) else matrix).reshape(to.shape)
