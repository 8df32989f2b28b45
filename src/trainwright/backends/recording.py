"""Records the tensor operations of one run of a function, and runs them again without Python in between.

On a CPU this is what a CUDA graph is on a GPU: whatever Python decided while recording stays decided. The operations
are torch's own, below autograd, so that a replay gives the same bits as the function would. Tensors that the function
found (weights, moments, buffers) are used where they lie; those that it was given are given anew at each replay.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainwright.errors import HostReadError

# Below autograd a detached tensor is the tensor itself.
_RENAMES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})

# Methods that hand values to the host without an operation.
_READS = frozenset({"tolist", "numpy", "__array__", "__dlpack__"})

Run = Callable[[list[Tensor]], list[Tensor]]


class Recording(Protocol):
    """A run that was recorded."""

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs it again with inputs like the recorded ones; returns fresh tensors, one for each output.

        Parameters that it was told of have the gradients of this run then.
        """
        ...


class OperationRecording:
    """Recorded operations as one straight function."""

    def __init__(self, run: Callable[..., list[Tensor]], num_operations: int) -> None:
        self._run = run
        self.num_operations = num_operations

    def replay(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Runs the operations on these inputs."""
        with torch._C._AutoDispatchBelowAutograd():
            return self._run(*inputs)


def record_operations(
    run: Run, inputs: Sequence[Tensor], *, parameters: Sequence[Tensor] = ()
) -> tuple[OperationRecording, list[Tensor]]:
    """Runs `run` once, recorded; returns the recording and what the run returned.

    Gradients that parameters have after it they have after each replay too; those of `parameters` that have none then
    have none after a replay.
    """
    given = list(inputs)
    recorder = _Recorder(given)
    # Compiled code does not pass through the dispatcher.
    with torch.compiler.set_stance("force_eager"), recorder.noting_generator(), _NoReads(), recorder:
        outputs = run(given)
    recorder.refuse_seeding()
    return recorder.finish(outputs, parameters), [each.clone() if recorder.lasts(each) else each for each in outputs]


class _NoReads(TorchFunctionMode):
    """Refuses what gives values to the host behind the dispatcher's back."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Called for every function of torch, with the mode off."""
        name = getattr(func, "__name__", "")
        if name in _READS:
            raise HostReadError(f"The values of a tensor are read by the host, by {name}.")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Writes a line of code for every operation that reaches the kernels.

    A tensor is known by its identity while it lives: i… are inputs, t… results of operations, f… what was found.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_inputs = len(inputs)
        self._lines: list[tuple[str, list[str], list[str]]] = []
        """Each operation: its code, and the names of the results that it uses and makes."""
        self._names: dict[int, str] = {}
        self._deaths: list[weakref.ref[Tensor]] = []
        self._made: Counter[int] = Counter()
        """How many tensors that operations made lie in a memory, by its address."""
        self._space: dict[str, Any] = {}
        self._shared: dict[int, str] = {}
        self._renamed: set[str] = set()
        """Names that several tensors have, or that a view has which is made only once."""
        self._stands: dict[torch.Generator, Tensor] = {torch.default_generator: torch.default_generator.get_state()}
        """Where the generators stood after the last operation."""
        for number, tensor in enumerate(inputs):
            # Counts as made: memory of a batch that is seen without its name would stay this batch's.
            self._call(tensor, f"i{number}", is_made=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs an operation and writes it down."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            raise HostReadError("The value of a tensor is read by the host.")
        if torch.Tag.dynamic_output_shape in func.tags and not _has_known_shape(func, args):
            name = func._schema.name.removeprefix("aten::")
            raise HostReadError(f"The shape of what {name} gives depends on values.")
        if func is torch.ops.aten.lift_fresh.default:
            func = torch.ops.aten.clone.default  # a constant of the code, fresh in every run
            self._find(args[0])
        self._refuse_reshaping(func, args)
        self.refuse_seeding([each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)])
        used: list[str] = []
        words = [self._word(each, used) for each in args]
        words += [f"**{{{name!r}: {self._word(value, used)}}}" for name, value in kwargs.items()]
        result = func(*args, **kwargs)
        for generator in self._stands:
            self._stands[generator] = generator.get_state()
        if func in _RENAMES:
            name = self._names[id(args[0])]
            self._renamed.add(name)
            self._call(result, name, is_made=not name.startswith("f"))
            return result
        if not used and isinstance(result, Tensor) and _is_view(func) and words[0].startswith("f"):
            # A view of what was found, such as a transposed weight: made once.
            self._renamed.add(self._hold(result))
            return result
        made: list[str] = []
        target = self._target(result, made)
        code = f"{self._constant(func._op)}({', '.join(words)})"
        self._lines.append((f"{target} = {code}" if made else code, used, made))
        return result

    @contextmanager
    def noting_generator(self) -> Iterator[None]:
        """Notes reads and writes of the generator's state, which are no operations: a recomputation draws again."""
        read, write = torch.get_rng_state, torch.set_rng_state
        thread = threading.get_ident()  # others, such as those of the data loading, are left alone

        def get_rng_state() -> Tensor:
            state = read()
            if threading.get_ident() != thread:
                return state
            name = f"t{len(self._deaths)}"
            self._call(state, name, is_made=True)
            self._lines.append((f"{name} = {self._constant(read)}()", [], [name]))
            return state

        def set_rng_state(new_state: Tensor) -> None:
            if threading.get_ident() == thread:
                self.refuse_seeding()
                used: list[str] = []
                self._lines.append((f"{self._constant(write)}({self._word(new_state, used)})", used, []))
                self._stands[torch.default_generator] = new_state
            write(new_state)

        homes = (torch, torch.random)
        for home in homes:
            home.get_rng_state, home.set_rng_state = get_rng_state, set_rng_state  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for home in homes:
                home.get_rng_state, home.set_rng_state = read, write  # type: ignore[attr-defined]

    def refuse_seeding(self, generators: Sequence[torch.Generator] = ()) -> None:
        """Refuses to go on where a generator, of those known or about to be used, was seeded by the host."""
        with _disable_current_modes():  # these comparisons are no part of the step
            is_moved = any(not torch.equal(each.get_state(), state) for each, state in self._stands.items())
            for each in generators:
                if each not in self._stands:
                    self._stands[each] = each.get_state()
                    # The updates before this one have drawn from it.
                    fresh = torch.Generator(each.device).manual_seed(each.initial_seed())
                    is_moved = is_moved or torch.equal(fresh.get_state(), self._stands[each])
        if is_moved:
            raise HostReadError(
                "Before this line a generator is seeded or its state is set, which a replay does not repeat."
            )

    def lasts(self, tensor: Tensor) -> bool:
        """Was a tensor found or given, rather than made?"""
        return not self._names.get(id(tensor), "f").startswith("t")

    def finish(self, outputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> OperationRecording:
        """Makes a function of what was written."""
        end: list[str] = []
        lasting: list[str] = []
        for name, parameter in list(self._space.items()):
            gradient = parameter.grad if isinstance(parameter, Tensor) and parameter.is_leaf else None
            if gradient is not None and id(gradient) in self._names:
                end.append(f"{name}.grad = {self._word(gradient, lasting)}")
        end += [f"{self._word(each, [])}.grad = None" for each in parameters if each.grad is None]
        words = [self._word(each, lasting) + (".clone()" if self.lasts(each) else "") for each in outputs]
        end.append(f"return [{', '.join(words)}]")
        last_uses = {name: number for number, (_, used, made) in enumerate(self._lines) for name in (*made, *used)}
        dying: dict[int, list[str]] = {}
        for name, number in last_uses.items():
            if name not in lasting:
                dying.setdefault(number, []).append(name)
        body = []
        for number, (code, _, _) in enumerate(self._lines):
            body.append(code)
            if number in dying:
                body.append(f"del {', '.join(dying[number])}")
        arguments = ", ".join(f"i{number}" for number in range(self._num_inputs))
        source = "\n    ".join([f"def replay({arguments}):", *body, *end])
        space = dict(self._space)
        exec(compile(source, "<recorded step>", "exec"), space)
        return OperationRecording(space["replay"], len(self._lines))

    def _call(self, tensor: Tensor, name: str, *, is_made: bool = False) -> None:
        """Gives a tensor a name for as long as it lives: another may get its identity then."""
        key, place = id(tensor), tensor.untyped_storage().data_ptr()
        is_made = is_made and place != 0  # where empty tensors lie, all of them
        self._names[key] = name
        self._made[place] += is_made

        def forget(_: object) -> None:
            self._names.pop(key, None)
            self._made[place] -= is_made

        self._deaths.append(weakref.ref(tensor, forget))

    def _target(self, result: Any, made: list[str]) -> str:
        """Returns what an operation's result is assigned to; results that are arguments keep their names."""
        if isinstance(result, Tensor):
            if id(result) in self._names:
                return "_"
            name = f"t{len(self._deaths)}"
            self._call(result, name, is_made=True)
            made.append(name)
            return name
        if isinstance(result, (tuple, list)) and result:
            return f"({''.join(self._target(each, made) + ', ' for each in result)})"
        return "_"

    def _word(self, value: Any, used: list[str]) -> str:
        """Writes an argument."""
        if isinstance(value, Tensor):
            name = self._names.get(id(value)) or self._find(value)
            if name.startswith("t"):
                used.append(name)
            return name
        if isinstance(value, (list, tuple)):
            words = "".join(f"{self._word(each, used)}, " for each in value)
            return f"[{words}]" if isinstance(value, list) else f"({words})"
        return repr(value) if value is None or type(value) in (int, bool) else self._constant(value)

    def _find(self, tensor: Tensor) -> str:
        """Gives a tensor that no operation made a name; it is held and used where it lies."""
        if self._made[tensor.untyped_storage().data_ptr()] > 0:
            raise HostReadError(
                f"A tensor of shape {tuple(tensor.shape)} came into being without an operation of torch, which a "
                "recorded step cannot repeat. Leave out .data, .numpy() and from_numpy on its way."
            )
        return self._hold(tensor)

    def _refuse_reshaping(self, operation: Any, args: tuple[Any, ...]) -> None:
        """Refuses to change the shape in place of a tensor that shares its name: the other would change with it."""
        if torch.Tag.inplace_view in operation.tags and operation is not torch.ops.aten.detach_.default:
            name = self._names.get(id(args[0]))
            if name in self._renamed:
                kind = operation._schema.name.removeprefix("aten::")
                raise HostReadError(f"{kind} changes the shape of a view in place. Use {kind.rstrip('_')} instead.")

    def _hold(self, tensor: Tensor) -> str:
        name = f"f{len(self._space)}"
        self._space[name] = tensor
        self._call(tensor, name)
        return name

    def _constant(self, value: Any) -> str:
        name = self._shared.get(id(value))
        if name is None:
            name = self._shared[id(value)] = f"c{len(self._space)}"
            self._space[name] = value
        return name


def _is_view(operation: Any) -> bool:
    """Does an operation only look at its argument in another way?"""
    aliases = [each.alias_info for each in operation._schema.returns]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)


def _has_known_shape(operation: Any, args: tuple[Any, ...]) -> bool:
    """Is it an indexing by numbers, whose shape follows from those of the indices? Masks count on values."""
    if operation is not torch.ops.aten.index.Tensor:
        return False
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])
