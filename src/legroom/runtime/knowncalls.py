"""Calls whose ops follow from their arguments, and are recorded without being looked at.

To see the ops of a call takes a dispatch mode, about 35 microseconds an op, and more than that to write each down. But
a call of one function with arguments of one form runs the same ops every time. So the step that learns the calls also
notes how the ops inside come by their arguments, and later steps fill that in with tensors of their own. What a call
depends on beside its arguments is compared too: autocast, grad mode, cuDNN, modes of others. Where anything differs,
the ops are looked at.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from legroom.runtime.lineage import (
    Argument,
    Blank,
    Form,
    Lineage,
    Made,
    Node,
    RandomState,
    Statistics,
    form_of,
    hidden_writes,
    tensors_in,
)
from legroom.runtime.residency import Entry, Layout, layout_of, saved_elsewhere

# Ops that a function comes to by its arguments alone. Not here: whatever has not been looked into.
_FOLLOWING = frozenset(
    """
    _adaptive_avg_pool2d _log_softmax _softmax _to_copy _unsafe_view abs add add_ addmm alias as_strided avg_pool2d
    baddbmm bmm cat clamp clamp_min clone constant_pad_nd convolution cos cudnn_batch_norm detach div div_ elu
    embedding empty empty_like erf exp expand gelu hardsigmoid hardswish hardswish_ hardtanh hardtanh_ leaky_relu
    leaky_relu_ log masked_fill max_pool2d_with_indices mean mm mul mul_ native_batch_norm native_dropout
    native_group_norm native_layer_norm neg permute pow relu relu_ reshape rsqrt select sigmoid sigmoid_ silu silu_
    sin slice softplus split split_with_sizes sqrt squeeze stack sub sub_ sum t tanh tanh_ transpose unbind
    unsqueeze upsample_nearest2d view where
    """.split()  # noqa: SIM905
)
# Chosen by switches that a program may turn at any time: those are compared, too. The softmax is that of attention made
# of matrix products, as it is where a mask needs a gradient.
_ATTENTION = frozenset(
    """
    _safe_softmax _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
    """.split()  # noqa: SIM905
)
_SWITCHES: tuple[Callable[[], Any], ...] = tuple(
    getattr(torch._C, name)
    for name in (
        "_get_flash_sdp_enabled",
        "_get_fa3_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_cudnn_sdp_enabled",
        "_get_overrideable_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_sdp_priority_order",
        "_get_deterministic_algorithms",
        "_get_cudnn_deterministic",
    )
    if hasattr(torch._C, name)
)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Functions in Python that are known to do nothing but call others; one of a program may do anything.
_PYTHON_MODULES = frozenset(("torch.nn.functional", "torch._tensor"))
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_CONSTANTS = frozenset(
    (int, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size)
)
_NEVER = object()
_NO_STORAGE = (NotImplementedError, RuntimeError)  # of its own; some tensors say so in one way, some in the other
_STRIDED = torch.strided
_transformed: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # None outside of vmap and its like


def _surroundings(device_type: str) -> tuple[Any, ...] | None:
    """What the ops of a call may depend on beside its arguments; None where others change what is called."""
    if torch._C._len_torch_function_stack() or _transformed() is not None:
        return None
    autocast = torch.is_autocast_enabled(device_type)
    return (
        torch.is_grad_enabled(),
        autocast and (torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()),
        torch._C._get_cudnn_enabled(),
    )


def _switches() -> tuple[Any, ...]:
    return tuple([switch() for switch in _SWITCHES])


def _form_of(value: Any) -> Any:
    """What an argument must be like for a call to run the same ops; _NEVER where that cannot be told."""
    kind = type(value)
    if kind in _PLAIN:
        if saved_elsewhere(value):
            return _NEVER
        return kind, value.requires_grad, value.device, layout_of(value)
    if kind is float:
        return kind, value, math.copysign(1.0, value)  # zeros of both signs are equal
    if kind in _CONSTANTS:
        return kind, value
    if kind is list or kind is tuple:
        forms = tuple(_NEVER if type(item) in (list, tuple) else _form_of(item) for item in value)
        return _NEVER if _NEVER in forms else (kind, forms)
    return _NEVER


def _all_alike(values: Iterable[Any], forms: Iterable[Any], found: list[torch.Tensor]) -> bool:
    """Whether arguments have these forms, as many as there are; their tensors are added to those that were found.

    Written out: it runs for every argument of the calls that are recorded, and took longer than to record them.
    """
    for value, form in zip(values, forms, strict=True):
        kind = type(value)
        if kind is not form[0]:
            return False
        if kind in _PLAIN:
            if value.layout is not _STRIDED or value.requires_grad is not form[1] or value.device != form[2]:
                return False
            dtype, size, stride, offset, conj, neg = form[3]
            if value.dtype is not dtype or value.shape != size or value.stride() != stride:
                return False
            if value.storage_offset() != offset or value.is_neg() is not neg:
                return False
            if dtype.is_complex and value.is_conj() is not conj:
                return False
            found.append(value)
        elif kind is list or kind is tuple:
            if len(value) != len(form[1]) or not _all_alike(value, form[1], found):
                return False
        elif value != form[1] or (kind is float and math.copysign(1.0, value) != form[2]):
            return False
    return True


_Guards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # None: PyTorch has it no longer


def _may_change(value: Any) -> bool:
    """Whether the same object may be another argument the next time."""
    return type(value) is list or (type(value) is tuple and any(isinstance(item, torch.Tensor) for item in value))


_MOST_GUARDS = 4  # of one call: where they are in force again and again, something changes that is not compared


class Likeness:
    """The comparison of arguments with their forms by one call of PyTorch's own, made from arguments that passed.

    It says yes to less: constants must be the very objects. What it does not pass is compared one by one. Caches are
    all alike, so that the calls that hold them can be compared.
    """

    __slots__ = ("_check", "_constants", "_made", "_offsets", "_places")

    def __init__(self) -> None:
        self._check: Callable[..., bool] | None = None
        self._made = 0

    def __eq__(self, other: object) -> bool:
        return type(other) is Likeness

    def __hash__(self) -> int:
        return 0

    def tensors(self, values: Sequence[Any]) -> list[torch.Tensor] | None:
        """Those among the arguments; None where they have to be compared one by one."""
        check = self._check
        if check is None:
            return None
        for place, constant in self._constants:
            if values[place] is not constant:
                return None
        found = [values[place] for place in self._places]
        if not check(*found):
            return None
        for tensor, offset in zip(found, self._offsets, strict=True):
            if tensor.storage_offset() != offset:
                return None
        return found

    def learn(self, values: Sequence[Any]) -> None:
        """From arguments that have the forms."""
        if _Guards is None or self._made >= _MOST_GUARDS:
            return
        self._made += 1
        places = [place for place, value in enumerate(values) if type(value) in _PLAIN]
        if not places or any(_may_change(value) for value in values):
            self._made = _MOST_GUARDS
            return
        found = [values[place] for place in places]
        sizes, strides = [list(tensor.size()) for tensor in found], [list(tensor.stride()) for tensor in found]
        self._places = places
        self._constants = [(at, value) for at, value in enumerate(values) if at not in places]
        self._offsets = [tensor.storage_offset() for tensor in found]
        self._check = _Guards(*found, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _shared(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    first: dict[int, int] = {}
    return tuple(first.setdefault(t.untyped_storage()._cdata, position) for position, t in enumerate(tensors))


class Origin(NamedTuple):
    """Where an op inside a call has a tensor from: one of three, the others are negative."""

    position: int = -1  # among the tensors that were given to the call
    op: int = -1  # among the ops of the call that are recorded
    saved: int = -1  # the number of a storage that was saved in the call
    output: int = 0  # of the op


class Inner(NamedTuple):
    """A recorded op inside a call."""

    number: int  # in the step
    func: Any
    args: tuple[Any, ...]  # with None in place of tensors
    # Of each tensor: the argument, the place in it if it is a list, where it is from, how it lies.
    places: tuple[tuple[int, int, Origin, Layout], ...]
    kwargs: dict[str, Any]
    form: Form
    written: Sequence[int]
    statistics: tuple[int, int] | None = None  # the storages of its own, where a replay has a use for them


class KnownCall(NamedTuple):
    """All that a later step needs to record a call."""

    surroundings: tuple[Any, ...]
    args: tuple[Any, ...]  # the forms of the arguments
    kwargs: dict[str, Any]
    ops: tuple[Inner, ...]
    read: tuple[int, ...]  # positions of tensors that recorded ops read
    results: tuple[tuple[int, int, int], ...]  # place among the results, op, output
    saved: tuple[tuple[int, int, int], ...]  # number of the storage, op, output
    written: int  # position of the tensor that the call writes; -1: it writes none
    moved: tuple[int, ...]  # positions of running statistics
    seeded: bool
    shared: tuple[int, ...]  # of each tensor, the first with the same storage; () where all have their own
    packs: tuple[int, ...]  # the storages that are saved, one after the other
    needs: frozenset[int]  # those whose hooks must run in the call, for ops read them and have them from nowhere else
    casts_weights: bool  # and may be handed a copy that autocast has made of them before
    switches: tuple[Any, ...] | None  # of attention; None: there is none
    on_cpu: bool  # whether one of its tensors is
    likeness: Likeness

    def tensors(self, args: Any, kwargs: Any, device_type: str) -> list[torch.Tensor] | None:
        """The tensors that the call is given; None where it is not sure to run the same ops."""
        if len(args) != len(self.args) or torch._C._len_torch_dispatch_stack():
            return None
        named = self.kwargs
        if kwargs.keys() != named.keys() or _surroundings(device_type) != self.surroundings:
            return None
        if self.switches is not None and _switches() != self.switches:
            return None
        values = (*args, *[kwargs[name] for name in named]) if named else args
        found = self.likeness.tensors(values)
        if found is None:
            found = []
            if not _all_alike(values, (*self.args, *named.values()), found):
                return None
            self.likeness.learn(values)
        # Those that shared none may share one: then they are one value, found by its storage.
        return found if not self.shared or _shared(found) == self.shared else None


class Recording:
    """One call of which all is known, from before it is made: its ops as if they had been seen.

    saved_as: a tensor over a storage that was saved in the call, if it is in memory. The ops are numbered from `first`.
    told: it is known from other sizes of the input.
    """

    def __init__(
        self,
        known: KnownCall,
        tensors: list[torch.Tensor],
        lineage: Lineage,
        entries: Mapping[int, Entry],
        first: int,
        saved_as: Callable[[int], torch.Tensor | None],
        *,
        told: bool,
    ) -> None:
        self._known, self._tensors, self._told = known, tensors, told
        self._lineage, self._entries, self._first, self._saved_as = lineage, entries, first, saved_as
        self._given: dict[int, Node] = {}
        node_of = lineage.node_of
        for position in known.read:
            tensor = tensors[position]
            self._given[position] = node_of(tensor, tensor.untyped_storage()._cdata)
        if known.written >= 0:
            lineage.before_write((tensors[known.written],))
        if known.moved:
            lineage.before_write([tensors[position] for position in known.moved])
        self._rng: RandomState | None = None
        if known.seeded:
            # What is known to follow from its arguments draws from the generator of their device.
            self._rng = RandomState(None) if known.on_cpu else RandomState.of_device(tensors[0].device)
        self._threads = torch.get_num_threads() if known.on_cpu else None
        self._values: dict[tuple[int, int], Node] = {}
        self.made: list[Made] = []

    def is_saved(self, entry: Entry, packs: tuple[int, ...]) -> bool:
        """An entry is to go before the call is through: whether it is known by now what made it.

        packs: the storages for which those stood that were saved in the call until now.
        """
        if packs != self._known.packs[: len(packs)]:
            return False
        for number, op, output in self._known.saved:
            if number == entry.number:
                if not self._make(op + 1):
                    return False
                self._lineage.saved_unseen(entry, self._value(op, output))
                return True
        return False

    def ended(self, result: Any, packs: tuple[int, ...]) -> None:
        """The call was made, and saved what stood for these storages.

        Where a step saves more or less than the one that was learned, without drifting, another tensor may stand for a
        storage: then nothing is written down.
        """
        known, lineage = self._known, self._lineage
        as_learned = packs == known.packs or (not packs and not known.needs)
        if not as_learned or not self._make(len(known.ops)):
            self.made = []
        made = self.made
        if known.written >= 0:
            node = lineage.rewritten(self._tensors[known.written], made[0] if made else None)
            if node is not None:
                self._values[0, -1] = node
        if not made:
            return
        if packs:
            for inner, again in zip(known.ops, made, strict=True):
                if inner.statistics is not None:
                    mean, scale = (self._saved_as(number) for number in inner.statistics)
                    if mean is not None and scale is not None:
                        again.statistics = Statistics.of(mean, scale)
        for place, op, output in known.results:
            tensor = result if place < 0 else result[place]
            lineage.nodes[tensor.untyped_storage()._cdata] = self._value(op, output).shown_by(tensor)
        for number, op, output in known.saved if packs else ():
            entry = self._entries.get(number)
            if entry is not None and entry.node is None and entry.views and entry.in_memory:
                lineage.saved_unseen(entry, self._value(op, output))

    def _value(self, op: int, output: int) -> Node:
        node = self._values.get((op, output))
        if node is None:
            node = self._values[op, output] = Node.unseen(self.made[op], output)
        return node

    def _make(self, count: int) -> bool:
        """So many of the ops. Not where something that one reads is not there: then what they made is lost."""
        made, known, given, entries = self.made, self._known, self._given, self._entries
        grad = known.surroundings[0]  # not that of this moment: hooks run without
        for inner in known.ops[len(made) : count]:
            inputs: list[Node] = []
            for _, _, (position, op, saved, output), _ in inner.places:
                if position >= 0:
                    inputs.append(given[position])
                elif op >= 0:
                    inputs.append(self._value(op, output))
                else:
                    entry = entries.get(saved)
                    if entry is None or not entry.views or not entry.in_memory:
                        return False
                    inputs.append(self._lineage.node_of(entry.a_tensor(), entry.key))
            order = self._first + inner.number
            made.append(Made.again(order, inner, inputs, self._rng, self._threads, grad=grad, told=self._told))
        return True


class Witness:
    """Sees a call from outside and from inside, in the step that learns, and tells what to know of it."""

    def __init__(self, device_type: str, lineage: Lineage, entries: Mapping[int, Entry]) -> None:
        self._device_type = device_type
        self._lineage = lineage
        self._entries = entries
        self._watches = False
        self._made: list[tuple[int, Made, list[int]]] = []
        # Forms and layouts, each once: those of a layer are those of the next one. Types are in them, so that equal
        # ones are alike in all ways.
        self._alike: dict[Any, Any] = {}

    def begin(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        try:
            self._begin(func, args, kwargs)
        except _NO_STORAGE:
            self._watches = False

    def _begin(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self._made = []
        is_pure = isinstance(func, _C_FUNCTIONS) or getattr(func, "__module__", None) in _PYTHON_MODULES
        self._watches = is_pure and torch._C._len_torch_dispatch_stack() == 1  # ours
        if not self._watches:
            return
        self._args = self._one(tuple(_form_of(value) for value in args))
        self._kwargs = {name: self._one(_form_of(value)) for name, value in kwargs.items()}
        self._watches = _NEVER not in self._args and _NEVER not in self._kwargs.values()
        surroundings = _surroundings(self._device_type)
        if surroundings is None or not self._watches:
            self._watches = False
            return
        self._surroundings = self._one(surroundings)
        self._ops = self._writes = self._seeds = 0
        self._written = -1
        self._moved: list[int] = []
        given = tensors_in((*args, *kwargs.values()))
        self._shared = _shared(given)
        self._positions = {tensor.untyped_storage()._cdata: at for tensor, at in zip(given, self._shared, strict=True)}
        self._weights = {at for at, tensor in enumerate(given) if tensor.requires_grad and tensor.is_leaf}
        self._on_cpu = not given or any(tensor.is_cpu for tensor in given)
        self._casts_weights = False
        self._attention: tuple[Any, ...] | None = None

    def saw(self, number: int, func: Any, args: tuple[Any, ...], made: Made | None, keys: list[int]) -> None:
        """An op inside the call; where it is recorded, with the storages of its arguments."""
        if self._watches:
            try:
                self._saw(number, func, args, made, keys)
            except _NO_STORAGE:
                self._watches = False

    def _saw(self, number: int, func: Any, args: tuple[Any, ...], made: Made | None, keys: list[int]) -> None:
        form = form_of(func)
        self._ops += 1
        self._seeds += form.seeded
        if func.namespace == "aten" and func._opname in _ATTENTION:
            self._attention = _switches()
        elif func.namespace != "aten" or func._opname not in _FOLLOWING or form.reshapes:
            self._watches = False
        elif form.written:
            self._writes += 1
            written = tensors_in(args[i] for i, _ in form.written if i < len(args))
            if len(form.written) == len(written) == 1:
                self._written = self._position(written[0])
        elif func._opname == "_to_copy" and self._surroundings[1]:
            self._casts_weights |= self._position(args[0]) in self._weights
        elif form.has_statistics:
            self._moved += [self._position(tensor) for tensor in hidden_writes(func, args)]
        if made is not None:
            self._made.append((number, made, keys))

    def _one(self, form: Any) -> Any:
        return self._alike.setdefault(form, form)

    def _position(self, tensor: torch.Tensor) -> int:
        return self._positions.get(tensor.untyped_storage()._cdata, -1)

    def told(self, result: Any, packs: Iterable[int]) -> KnownCall | None:
        """The call is over; packs: the storages that were saved in it."""
        seen, self._made = self._made, []  # what they hold is not held on to
        if not self._watches or self._seeds > 1 or -1 in self._moved:
            return None
        if self._writes and (self._ops != 1 or self._written < 0):
            return None
        numbers = {id(made): op for op, (_, made, _) in enumerate(seen)}
        in_order = tuple(packs)
        saved = frozenset(in_order)
        ops = [self._inner(number, made, keys, numbers, saved) for number, made, keys in seen]
        try:
            results = self._results(result, numbers)
        except _NO_STORAGE:
            return None
        known = [op for op in ops if op is not None]
        if results is None or len(known) != len(ops):
            return None
        return KnownCall(
            surroundings=self._surroundings,
            args=self._args,
            kwargs=self._kwargs,
            ops=tuple(known),
            read=tuple(sorted({o.position for op in known for _, _, o, _ in op.places if o.position >= 0})),
            results=tuple(results),
            saved=tuple(self._saved(saved, numbers)),
            written=self._written,
            moved=tuple(self._moved),
            seeded=any(op.form.seeded for op in known),
            shared=self._shared if len(set(self._shared)) < len(self._shared) else (),
            packs=in_order,
            needs=frozenset(o.saved for op in known for _, _, o, _ in op.places if o.saved >= 0),
            casts_weights=self._casts_weights,
            switches=self._attention,
            on_cpu=self._on_cpu,
            likeness=Likeness(),
        )

    def _inner(
        self, number: int, made: Made, keys: list[int], numbers: Mapping[int, int], saved: frozenset[int]
    ) -> Inner | None:
        if made.grad is not self._surroundings[0]:
            return None
        places: list[tuple[int, int, Origin, Layout]] = []
        template: list[Any] = []
        storages = iter(keys)
        for at, value in enumerate(made.args):
            items = value if type(value) is list else [value]
            for within, item in enumerate(items):
                if type(item) is list:
                    return None
                if type(item) is Argument:
                    origin = self._origin(item.node, next(storages), numbers, saved)
                    if origin is None:
                        return None
                    places.append((at, within if items is value else -1, origin, self._one(item.layout)))
            if any(type(item) is Argument for item in items):
                template.append(tuple(_without_tensors(items)) if items is value else None)
            else:
                template.append(value)
        if any(type(value) in (Argument, list, Blank) for value in made.kwargs.values()):
            return None
        return Inner(number, made.func, tuple(template), tuple(places), made.kwargs, made.form, made.written)

    def _origin(self, node: Node, key: int, numbers: Mapping[int, int], saved: frozenset[int]) -> Origin | None:
        op = numbers.get(id(node.maker), -1)
        if op >= 0:
            return Origin(op=op, output=node.output)
        if key in self._positions:
            return Origin(position=self._positions[key])
        entry = node.entry
        if entry is not None and entry.node is node and entry.number in saved:
            return Origin(saved=entry.number)
        return None

    def _results(self, result: Any, numbers: Mapping[int, int]) -> list[tuple[int, int, int]] | None:
        found = []
        for place, tensor in enumerate(result) if isinstance(result, (list, tuple)) else ((-1, result),):
            if tensor is None:
                continue
            if type(tensor) not in _PLAIN or saved_elsewhere(tensor):
                return None
            node = self._lineage.nodes.get(tensor.untyped_storage()._cdata)
            if node is not None and id(node.maker) in numbers and node.output >= 0:
                found.append((place, numbers[id(node.maker)], node.output))
        return found

    def _saved(self, saved: Iterable[int], numbers: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
        for number in sorted(saved):
            entry = self._entries.get(number)
            if entry is not None and entry.node is not None and id(entry.node.maker) in numbers:
                yield number, numbers[id(entry.node.maker)], entry.node.output


def _without_tensors(items: Iterable[Any]) -> Iterator[Any]:
    return (None if type(item) is Argument else item for item in items)
