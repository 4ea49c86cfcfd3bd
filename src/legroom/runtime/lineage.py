"""Lineage: which op made a value, from which values, and how to make it again.

A `Node` is a value: one version of one storage, in this very step. It can be had from a tensor held for it, from the
saved entry whose bytes it is, or from the op that made it. Nothing is looked up by position in a trace: a program
that takes another path than the one planned for is replayed along the path it took.

Replays run below autograd and autocast, with the generator state, grad mode and thread count of the first run.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._C import _DisableTorchDispatch as no_dispatch
from torch.multiprocessing.reductions import StorageWeakRef

from legroom.errors import StepError
from legroom.runtime.residency import Entry, Layout, Ledger, layout_of

# Ops that write tensors their schema does not declare, and where: running means and variances. In training they
# do not enter the result, so a replay hands in copies.
HIDDEN_WRITES: dict[str, tuple[int, ...]] = {
    "aten.native_batch_norm.default": (3, 4),
    "aten.cudnn_batch_norm.default": (3, 4),
    "aten.miopen_batch_norm.default": (3, 4),
    "aten._batch_norm_impl_index.default": (3, 4),
}
_TRAINING = 5  # where all of them take whether they train


def hidden_writes(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The running statistics that a call moves without saying so; none where it only evaluates."""
    places = HIDDEN_WRITES.get(str(func), ())
    if not places or len(args) <= _TRAINING or not args[_TRAINING]:
        return []
    return [args[i] for i in places if isinstance(args[i], torch.Tensor)]


# Ops that take only the shape of their argument: replayed as `empty_strided`, so that they need no bytes.
SHAPE_ONLY = ("empty_like", "new_empty", "new_empty_strided")


@functools.cache
def is_uninitialised(func: Any) -> bool:
    """Whether an op gives memory that nobody has written."""
    return bool(func.__name__.startswith(("empty", "new_empty")))


@functools.cache
def never_replayed(func: Any) -> str:
    """Why an op is not replayed whatever its result; "" where a proof may be tried."""
    if torch.Tag.inplace_view in func.tags:
        return "changes a tensor's shape in place"
    if func.namespace not in ("aten", "prims"):
        return "an op from outside PyTorch may have state of its own"
    name = func.__name__
    if name.startswith(("_foreach", "_fused")):
        return "an op over lists of tensors"
    if "out" in name.split(".")[-1].split("_"):
        return "an out= op"
    if name.startswith(("_cudnn_rnn", "set_", "resize", "_resize", "_local_scalar", "item", "equal")):
        return "an op with state, or one that changes storages"
    return ""


_KeySet, _Key = torch._C.DispatchKeySet, torch._C.DispatchKey
_NO_KEYS = _KeySet(_Key.Undefined)
_PYTHON_KEYS = _KeySet(_Key.Python) | _KeySet(_Key.PythonTLSSnapshot)


def tensors_in(args: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in an op's arguments, in order, one level of lists deep as schemas have them."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(item for item in arg if isinstance(item, torch.Tensor))
    return found


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments whose bytes the schema says an op writes; `t_()` and its like write none."""
    if torch.Tag.inplace_view in func.tags:
        return ()
    return tuple(
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


class Statistics(NamedTuple):
    """Of a normalisation, with which it is made again in one pass."""

    mean: torch.Tensor
    scale: torch.Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, mean: torch.Tensor, scale: torch.Tensor) -> Statistics:
        return cls(mean, scale, (version_of(mean), version_of(scale)))

    def unchanged(self) -> bool:
        """They may be the program's as well, which may write to them."""
        return (version_of(self.mean), version_of(self.scale)) == self.versions


# A value by the op that made it: its order, and which output (-1 - i: the i-th written argument).
Slot = tuple[int, int]


def version_of(tensor: torch.Tensor) -> int:
    """PyTorch's count of writes. Tensors of inference mode have none, and cannot be written outside of it."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


class Node:
    """One value of this step."""

    __slots__ = (
        "__weakref__",
        "entry",
        "maker",
        "on_cpu",
        "output",
        "relied",
        "seen",
        "slot",
        "storage",
        "tensor",
        "twin",
        "weak",
    )

    def __init__(self, tensor: torch.Tensor, maker: Made | None, output: int) -> None:
        # By PyTorch's count of writes, which goes up once an op that writes is through. A tensor that is ahead of it
        # was written by an op that nobody saw, and shows another value.
        self.seen = version_of(tensor) + (output < 0)
        self.on_cpu = tensor.is_cpu
        self.maker = maker
        self.output = output
        self.slot: Slot | None = (maker.order, output) if maker is not None else None
        self.entry: Entry | None = None
        self.tensor: torch.Tensor | None = None  # held for its bytes: a leaf
        self.relied = False  # something was dropped that is made from the tensor held here
        self.twin: Node | None = None  # the same bytes, whose entry answers for both
        # Either keeps the address from being handed out again.
        self.storage: torch.UntypedStorage | None = None
        self.weak: StorageWeakRef | None = StorageWeakRef(tensor.untyped_storage()) if maker is not None else None

    @classmethod
    def unseen(cls, maker: Made, output: int) -> Node:
        """What an op made that was not looked at."""
        node = cls.__new__(cls)
        node.seen = 0
        node.on_cpu = maker.threads is not None
        node.maker = maker
        node.output = output
        node.slot = maker.order, output
        node.entry = node.tensor = node.storage = node.weak = node.twin = None
        node.relied = False
        return node

    def shown_by(self, tensor: torch.Tensor) -> Node:
        """The tensor that was not seen before. What wrote it is through."""
        self.seen = version_of(tensor)
        self.on_cpu = tensor.is_cpu
        self.weak = StorageWeakRef(tensor.untyped_storage())
        return self

    def hold(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf:
            # Not the tensor itself, which holds the graph. Inside a mode detach() runs below the layer that makes it
            # share the count of writes: go through all layers.
            with torch._C._ForceDispatchKeyGuard(_NO_KEYS, _PYTHON_KEYS):
                tensor = tensor.detach()
        self.tensor = tensor
        self.storage = tensor.untyped_storage()
        self.seen = version_of(tensor)

    def hand_over(self, entry: Entry, storage: torch.UntypedStorage) -> None:
        """From now on the entry answers for the bytes."""
        self.entry, entry.node = entry, self
        if self.weak is None:
            self.weak = StorageWeakRef(storage)
        self.tensor = self.storage = None

    def holds(self, key: int) -> bool:
        """Whether it is a leaf that is kept alive for these bytes."""
        return self.storage is not None and self.storage._cdata == key

    def follow(self, other: Node) -> None:
        """Its bytes are those of another value: from now on it is had as that one is, or made again as that one is."""
        self.entry, self.twin = None, other
        self.maker, self.output, self.slot = other.maker, other.output, other.slot

    def owner(self) -> Entry | None:
        """The entry that answers for its bytes."""
        entry = self.entry
        if entry is not None and entry.node is self:
            return entry
        return self.twin.owner() if self.twin is not None else None

    def expired(self) -> bool:
        return self.storage is None and (self.weak is None or self.weak.expired())

    def bytes_at_hand(self) -> torch.Tensor | None:
        """A tensor over this value's storage if it is in memory."""
        entry = self.owner()
        if entry is not None and entry.in_memory:
            entry.finish_loading()
            return entry.a_tensor()
        tensor, storage = self.tensor, self.storage
        if tensor is not None and storage is not None:
            if tensor.untyped_storage()._cdata != storage._cdata:  # its `data` is another one now
                return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            if version_of(tensor) != self.seen:
                raise StepError(
                    f"a tensor of shape {list(tensor.shape)} that a dropped activation is recomputed from was changed "
                    "in place during backward; legroom cannot replay from it. Move the change after backward"
                )
            return tensor
        return None

    def sources(self) -> list[Entry] | None:
        """The entries that a replay of this value would read, or None if something it needs cannot be had."""
        entries: dict[int, Entry] = {}
        seen: set[int] = set()
        stack = [self]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            entry = node.owner()
            if entry is not None and node is not self:
                entries[id(entry)] = entry
                # What was dropped before holds on to what itself is made from: only chains of what is new are walked.
                if entry.key or entry.host is not None or id(entry) in entry.ledger.pinned:
                    continue
            elif node.tensor is not None:
                node.relied = True
                continue
            if node.maker is None:
                return None
            stack.extend(node.maker.inputs)
        return list(entries.values())

    def on_host(self) -> Entry | None:
        entry = self.owner()
        return entry if entry is not None and entry.host is not None else None


class Argument:
    """A tensor argument of a recorded op: a value, and how it was viewed."""

    __slots__ = ("layout", "node")

    def __init__(self, node: Node, layout: Layout) -> None:
        self.node = node
        self.layout = layout


class Blank:
    """A tensor argument whose bytes do not matter: batch norm's statistics in training."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size, self.dtype, self.device = tensor.size(), tensor.dtype, tensor.device


NodeOf = Callable[[torch.Tensor, int], "Node"]  # given the tensor's storage, too
_SCALARS = frozenset((int, float, bool, type(None), torch.dtype, torch.device))


def _reference(value: Any, made: Made, node_of: NodeOf) -> Any:
    """An argument with its tensors replaced. Not a closure: one that calls itself is a cycle and keeps what it saw."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        key = value.untyped_storage()._cdata
        argument = Argument(node_of(value, key), layout_of(value))
        made.keys.append(key)
        made.inputs.append(argument.node)
        return argument
    if isinstance(value, (list, tuple)):
        return [_reference(item, made, node_of) for item in value]
    return value


class Form(NamedTuple):
    """What of an op is the same in every call."""

    written: tuple[tuple[int, str], ...]
    reshapes: bool  # in place: counted by PyTorch as a write
    shape_only: bool
    has_statistics: bool
    seeded: bool


_forms: dict[int, tuple[Any, Form]] = {}


def form_of(func: Any) -> Form:
    # By identity, and held: an op overload hashes in Python.
    known = _forms.get(id(func))
    if known is None:
        known = _forms[id(func)] = func, _form(func)
    return known[1]


def _form(func: Any) -> Form:
    return Form(
        written=written_arguments(func),
        reshapes=torch.Tag.inplace_view in func.tags,
        shape_only=func.__name__.split(".")[0] in SHAPE_ONLY,
        has_statistics=str(func) in HIDDEN_WRITES,
        seeded=torch.Tag.nondeterministic_seeded in func.tags,
    )


class Pattern(Protocol):
    """An op that is known by what was given to the call it runs in."""

    @property
    def func(self) -> Any: ...
    @property
    def args(self) -> tuple[Any, ...]:
        """With None in place of tensors."""

    @property
    def places(self) -> tuple[tuple[int, int, Any, Layout], ...]:
        """Of each tensor: the argument, the place in it if it is a list, where it is from, how it lies."""

    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def form(self) -> Form: ...
    @property
    def written(self) -> Sequence[int]: ...


def filled(pattern: Pattern, tensors: Iterable[Any]) -> list[Any]:
    """Its arguments, with what is given in place of tensors."""
    args = list(pattern.args)
    for (at, within, _, _), tensor in zip(pattern.places, tensors, strict=True):
        if within < 0:
            args[at] = tensor
        else:
            if type(args[at]) is tuple:
                args[at] = list(args[at])
            args[at][within] = tensor
    return args


class Made:
    """One recorded op, with all that is needed to run it again."""

    __slots__ = (
        "__weakref__",
        "args",
        "form",
        "func",
        "grad",
        "inputs",
        "keys",
        "kwargs",
        "order",
        "pattern",
        "rng",
        "statistics",
        "threads",
        "told",
        "written",
    )

    def __init__(
        self,
        order: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        node_of: NodeOf,
    ) -> None:
        self.order = order
        self.func = func
        self.pattern: Pattern | None = None
        self.args: list[Any]
        self.inputs: list[Node] = []
        self.keys: list[int] = []  # the storages of its arguments, until its outputs are known
        self.form = form = form_of(func)
        if form.shape_only:
            args, kwargs = (), {}  # become_empty_like() will fill them in
        # Running statistics do not enter the result: their bytes are not held for a replay.
        blank = hidden_writes(func, args) if form.has_statistics else ()
        self.args = [
            Blank(value) if blank and any(value is s for s in blank) else _reference(value, self, node_of)
            for value in args
        ]
        self.kwargs = {name: _reference(value, self, node_of) for name, value in kwargs.items()} if kwargs else kwargs
        self.told = False  # whether its arguments are as at other sizes of the input, and were not looked at
        self.grad = torch.is_grad_enabled()
        # The thread count changes bits of what the CPU computes; kernels elsewhere do not know of it.
        on_cpu = not self.inputs or any(node.on_cpu for node in self.inputs)
        self.threads = torch.get_num_threads() if on_cpu else None
        self.statistics: Statistics | None = None
        self.rng: RandomState | None = None
        if form.seeded:
            self.rng = RandomState(next((v for v in (*args, *kwargs.values()) if isinstance(v, torch.Generator)), None))
        self.written: Sequence[int] = ()
        if form.written:
            self.written = [i for i, _ in form.written if i < len(args) and isinstance(args[i], torch.Tensor)]

    @classmethod
    def again(
        cls,
        order: int,
        pattern: Pattern,
        inputs: list[Node],
        rng: RandomState | None,
        threads: int | None,
        *,
        grad: bool,
        told: bool,
    ) -> Made:
        """An op that was not looked at, of which all this is known. inputs: one for each place of the pattern."""
        made = cls.__new__(cls)
        made.order, made.func, made.kwargs, made.inputs = order, pattern.func, pattern.kwargs, inputs
        made.pattern = pattern
        made.form = form = pattern.form
        made.written = pattern.written
        made.grad, made.told = grad, told
        made.statistics = None
        made.rng = rng if form.seeded else None
        made.threads = threads
        return made

    def __getattr__(self, name: str) -> Any:
        """Arguments of what was not looked at are put together when somebody asks: most replays do without."""
        if name != "args" or self.pattern is None:
            raise AttributeError(name)
        places = zip(self.pattern.places, self.inputs, strict=True)
        self.args = filled(self.pattern, [Argument(node, layout) for (_, _, _, layout), node in places])
        return self.args

    def become_empty_like(self, tensor: torch.Tensor) -> None:
        self.func = torch.ops.aten.empty_strided.default
        self.args = [list(tensor.size()), list(tensor.stride())]
        self.kwargs = {"dtype": tensor.dtype, "device": tensor.device}


class RandomState:
    """The state of the generators an op may draw from, and the way back to it.

    Clones of generators, not their states: a state is a tensor, and would count.
    """

    __slots__ = ("_clones", "_generators")

    def __init__(self, generator: torch.Generator | None) -> None:
        self._generators = [generator] if generator is not None else [torch.default_generator]
        if generator is None and torch.cuda.is_initialized():
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        self._clones = [g.clone_state() for g in self._generators]

    @classmethod
    def of_device(cls, device: torch.device) -> RandomState:
        """Of what draws from no other generator than that of a GPU."""
        index = device.index if device.index is not None else torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        state = cls.__new__(cls)
        state._generators, state._clones = [generator], [generator.clone_state()]
        return state

    def restore(self) -> None:
        with no_dispatch():
            for generator, clone in zip(self._generators, self._clones, strict=True):
                generator.set_state(clone.get_state())

    def enter(self) -> list[torch.Generator]:
        """Until `leave`, to which the answer goes: the generators in this state. It may be entered again."""
        before: list[torch.Generator] = []
        with no_dispatch():
            for generator, clone in zip(self._generators, self._clones, strict=True):
                if generator.device.type == "cuda":
                    # By reference: copied, a state takes five times as long, and a graph that was captured would go on
                    # with one that is no more in use.
                    before.append(generator.graphsafe_get_state())
                    generator.graphsafe_set_state(clone.clone_state())
                else:
                    before.append(generator.clone_state())
                    generator.set_state(clone.get_state())
        return before

    def leave(self, before: list[torch.Generator]) -> None:
        with no_dispatch():
            for generator, state in zip(self._generators, before, strict=True):
                if generator.device.type == "cuda":
                    generator.graphsafe_set_state(state)
                else:
                    generator.set_state(state.get_state())


class Lineage:
    """The values of one step that a plan may want to make again."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.nodes: dict[int, Node] = {}
        self.leaves: dict[int, weakref.ref[Node]] = {}  # not held: a leaf lives as long as an op that reads it
        self.copies_before_write = 0

    def node_of(self, tensor: torch.Tensor, key: int) -> Node:
        """The value a tensor shows now; `key` is its storage's."""
        node = self.nodes.get(key)
        if node is not None and not node.expired() and version_of(tensor) <= node.seen:
            return node
        entry = self.ledger.by_key.get(key)
        if entry is not None and entry.node is not None and version_of(tensor) <= entry.node.seen:
            return entry.node
        known = self.leaves.get(key)
        node = known() if known is not None else None
        if node is None or not node.holds(key) or version_of(tensor) > node.seen:
            node = Node(tensor, None, 0)
            if entry is not None:
                node.hand_over(entry, tensor.untyped_storage())
            else:
                node.hold(tensor)
            self.leaves[key] = weakref.ref(node)
        self.nodes[key] = node
        return node

    def saved(self, entry: Entry, tensor: torch.Tensor) -> None:
        """A storage became an entry: from now on the entry answers for its bytes."""
        node = self.nodes.get(entry.key)
        if node is not None and version_of(tensor) <= node.seen and not node.expired() and entry.node is None:
            node.hand_over(entry, tensor.untyped_storage())

    def saved_unseen(self, entry: Entry, node: Node) -> None:
        """A storage became an entry before it was known that this is its value."""
        tensor = entry.a_tensor()
        if node.weak is None:
            node.shown_by(tensor)
        self.nodes[entry.key] = node
        node.hand_over(entry, tensor.untyped_storage())

    def knows_any(self, arguments: Iterable[Any]) -> bool:
        """Whether one of these shows a value that a replay makes or reads."""
        nodes, leaves = self.nodes, self.leaves
        if not nodes and not leaves:
            return False
        for value in arguments:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor):
                    try:
                        key = tensor.untyped_storage()._cdata
                    except (NotImplementedError, RuntimeError):  # no storage of its own
                        continue
                    if key in nodes or key in leaves:
                        return True
        return False

    def is_read(self) -> bool:
        """Whether a replay may read something that a write could change; not once all that was saved is gone."""
        if self.nodes or self.ledger.entries:
            return True
        self.leaves.clear()
        return False

    def before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leaves that replays read are about to be changed: keep their old bytes for them."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            known = self.leaves.get(key)
            leaf = known() if known is not None else None
            if leaf is None:
                continue
            if leaf.holds(key) or (leaf.entry is not None and leaf.entry.node is leaf and leaf.entry.key == key):
                leaf.hold(copy_of_bytes(tensor))
                self.copies_before_write += 1

    def after_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Made | None) -> None:
        """Every written storage shows its next version now."""
        for i, tensor in enumerate(written_tensors(func, args, kwargs)):
            key = tensor.untyped_storage()._cdata
            old = self.nodes.pop(key, None)
            entry = self.ledger.by_key.get(key)
            if made is not None:
                node = Node(tensor, made, -1 - i)
                self.nodes[key] = node
                if entry is not None:
                    node.entry, entry.node = entry, node
            elif entry is not None:
                entry.node = None
            if old is not None:
                old.entry = None

    def rewritten(self, tensor: torch.Tensor, made: Made | None) -> Node | None:
        """As after_write, of one tensor, after the call that wrote it and all that it saved."""
        key = tensor.untyped_storage()._cdata
        old = self.nodes.pop(key, None)
        entry = self.ledger.by_key.get(key)
        if old is not None:
            old.entry = None
        if made is None:
            if entry is not None:
                entry.node = None
            return None
        node = self.nodes[key] = Node.unseen(made, -1).shown_by(tensor)
        if entry is not None:
            node.hand_over(entry, tensor.untyped_storage())
        return node

    def reshaped(self, tensor: torch.Tensor) -> None:
        """A tensor was given another shape in place: its bytes are the same, PyTorch's count is not."""
        key = tensor.untyped_storage()._cdata
        entry = self.ledger.by_key.get(key)
        for node in {self.nodes.get(key), entry.node if entry is not None else None}:
            if node is not None:
                node.seen += 1

    def made(self, made: Made, result: Any) -> None:
        """Give every fresh output its node. An output over the storage of an argument is a view."""
        outputs = result if isinstance(result, (list, tuple)) else (result,)
        if made.form.shape_only:
            made.become_empty_like(outputs[0])
        for i, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor):
                key = tensor.untyped_storage()._cdata
                if key not in made.keys:
                    self.nodes[key] = Node(tensor, made, i)
        made.keys.clear()

    def forget_origin(self, node: Node) -> None:
        """It is not made again: what it was made from may go, unless another op that reads that is to be run again."""
        made, node.maker = node.maker, None
        for source in made.inputs if made is not None else ():
            key = source.storage._cdata if source.storage is not None else 0
            if source.maker is None and self.nodes.get(key) is source:
                del self.nodes[key]  # it is among the leaves as long as somebody reads it

    def forget_forward(self) -> None:
        """Backward begins: values nobody has recorded as an input, saved or dropped are of no use any more."""
        self.nodes.clear()


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for i, name in written_arguments(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        found.extend(tensors_in((value,)))
    return found


def copy_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.clone()
