"""How a loss adds up over samples: as a sum, as a mean, as neither, found in the operations that made it.

A forward is followed with twice and with four times as many samples. Dimensions, and numbers that the code takes from
them, that then double have the samples. So a sum that is divided by `len(labels)` is a mean, and one that is divided by
100 is a sum, without a look at the code. Each operation is known by what torch says of it: whether it is elementwise,
which argument is its dimension or its reduction. What is not known to leave samples apart counts as mixing them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

# Operations that give sums of what they are given, or put it elsewhere; or a constant of its form.
_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "sum", "mean", "stack", "cat", "clone", "detach", "alias", "view", "_unsafe_view",
    "reshape", "expand", "unsqueeze", "squeeze", "select", "slice", "unbind", "split", "t", "transpose", "permute",
    "_to_copy", "copy", "lift_fresh", "nan_to_num", "zeros_like", "ones_like", "new_zeros",
})  # fmt: skip
# Operations that move elements, or make a tensor of the same form, beside views.
_MOVES = frozenset({
    "_unsafe_view", "_reshape_copy", "clone", "copy", "_to_copy", "repeat", "lift_fresh", "detach", "contiguous",
    "constant_pad_nd",
})  # fmt: skip
# Operations whose result has one value everywhere.
_FILLS = frozenset(
    {"empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zero", "fill"}
)
# Operations of which an argument decides what is where.
_DECIDES = {
    "where": "condition", "masked_fill": "mask", "index": "indices", "masked_select": "mask", "gather": "index",
    "index_select": "index", "index_put": "indices",
}  # fmt: skip
# Products of matrices; and functions of each sample by itself that have no argument which says so.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"})
_BY_SAMPLES = frozenset({"embedding", "_ctc_loss", "log_sigmoid_forward"})
# Their mean is over the elements that are not ignored, and weighted.
_CLASS_LOSSES = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "cross_entropy_loss"})
# Constants of one shape with more elements are taken to be equal.
_MOST_COMPARED = 1 << 16


class LossPart(NamedTuple):
    """A part of the sum that a loss is: the result of loss function number `call`, or what else there is (None). It
    grows with this `power` of the number of samples: 0 for means, 1 for sums, None for neither."""

    call: int | None
    power: int | None
    over_items: bool = False  # whether it was divided by a number of the whole batch


MIXED = LossPart(None, None)
LossParts = frozenset[LossPart]


class Constant(NamedTuple):
    """Does not depend on the samples. `number`: is made from a number of the whole batch."""

    number: bool = False


class Rows(NamedTuple):
    """Has the samples along a dimension, each element made of one sample; `chosen`: of as many as values decide."""

    dim: int
    power: int = 0
    chosen: bool = False


State = Constant | Rows | LossParts


class TensorRef(NamedTuple):
    """A tensor by the step that made it; None if its storage was changed in part since, by any of the first
    `num_makers` of the steps `makers`."""

    step: int | None
    shape: torch.Size
    makers: Sequence[int] = ()
    num_makers: int = 0

    @property
    def steps(self) -> Sequence[int]:
        """Those that may have made it."""
        return self.makers[: self.num_makers] if self.step is None else (self.step,)


@dataclass(frozen=True, slots=True)
class Step:
    """One output of an operation; or, without one, where a tensor begins: an input (`given`), a unit's value
    (`of_unit`), a number of the whole batch (`number`), the result of loss function number `call`, a sum if `is_sum`,
    else a mean."""

    shape: torch.Size
    func: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    output: int = 0
    chosen: bool = False
    given: str = ""
    of_unit: bool = False
    number: bool = False
    call: int | None = None
    is_sum: bool = False

    @property
    def name(self) -> str:
        return str(self.func._schema.name).removeprefix("aten::").rstrip("_")

    @property
    def leaves(self) -> list[Any]:
        return _leaves(list(self.arguments.values()))

    def refs(self) -> Iterator[TensorRef]:
        return (leaf for leaf in self.leaves if isinstance(leaf, TensorRef))


class Declared(NamedTuple):
    """The arguments of an operation: their names, the usual values of those that have one, and which are written."""

    names: tuple[str, ...]
    usual: dict[str, Any]
    written: tuple[str, ...]


@cache
def _declared(func: Any) -> Declared:
    arguments = func._schema.arguments
    return Declared(
        names=tuple(each.name for each in arguments),
        usual={each.name: each.default_value for each in arguments if each.default_value is not None},
        written=tuple(each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write),
    )


Geometry = tuple[Any, ...]


class OperationRecord:
    """The operations of one forward on what depends on its inputs, in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        # Truth values that Python asked for.
        self.asked: list[int | None] = []
        # Tensors and whatever else units and loss functions were given.
        self._uses: list[Any] = []
        # By storage: which step made which of its views, as they are now; and all steps that have made any.
        self._at: dict[int, dict[Geometry, int]] = {}
        self._makers: dict[int, list[int]] = {}

    def begin(self, tensor: torch.Tensor, **what: Any) -> None:
        """`tensor`, an input say, begins here."""
        self._at[storage_of(tensor)._cdata] = {}
        self._makers[storage_of(tensor)._cdata] = []
        self._put(tensor, Step(tensor.shape, **what))

    def use(self, leaves: Iterable[Any]) -> None:
        """A unit, or a loss function, is given these."""
        with torch._C.DisableTorchFunctionSubclass():  # logits that are made in chunks do not say where they are
            self._uses += [self._as_argument(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        chosen: bool,
        with_number: bool = False,
    ) -> None:
        """An operation was done, maybe `with_number`s that Python has read of tensors."""
        declared = _declared(func)
        given = {**declared.usual, **dict(zip(declared.names, args, strict=False)), **kwargs}
        arguments = pytree.tree_map_only(torch.Tensor, self._as_argument, given)
        if not (with_number or any(isinstance(leaf, TensorRef) for leaf in _leaves(arguments))):
            return
        for name in declared.written:  # views made before have other contents now
            for tensor in pytree.tree_leaves(given.get(name)):
                if isinstance(tensor, torch.Tensor):
                    self._at[storage_of(tensor)._cdata] = {}
        for number, tensor in enumerate(pytree.tree_leaves(output)):
            if isinstance(tensor, torch.Tensor) and not (func.is_view and self._knows(tensor)):
                self._put(tensor, Step(tensor.shape, func, arguments, number, chosen))

    def ask(self, tensor: torch.Tensor) -> None:
        ref = self._as_argument(tensor)
        if isinstance(ref, TensorRef):
            self.asked.append(ref.step)

    def find(self, tensor: torch.Tensor) -> TensorRef | None:
        """The step that made a tensor; None if it is a constant."""
        ref = self._as_argument(tensor)
        return ref if isinstance(ref, TensorRef) else None

    def _put(self, tensor: torch.Tensor, step: Step) -> None:
        self.steps.append(step)
        key, index = storage_of(tensor)._cdata, len(self.steps) - 1
        self._at.setdefault(key, {})[_geometry(tensor)] = index
        self._makers.setdefault(key, []).append(index)

    def _knows(self, tensor: torch.Tensor) -> bool:
        return _geometry(tensor) in self._at.get(storage_of(tensor)._cdata, ())

    def _as_argument(self, tensor: torch.Tensor) -> TensorRef | torch.Tensor:
        key = storage_of(tensor)._cdata
        steps = self._at.get(key)
        if steps is None:
            return tensor
        step = steps.get(_geometry(tensor))
        makers: Sequence[int] = self._makers.get(key) or range(len(self.steps))
        return TensorRef(step, tensor.shape) if step is not None else TensorRef(None, tensor.shape, makers, len(makers))

    def keeps(self, tensor: torch.Tensor, labels: Collection[str], others: Collection[str] = ()) -> bool:
        """Whether a tensor has nothing but values of inputs, and constants, whatever the units compute. `labels` may
        decide which only by being compared with a number of zero or less. The operations `others` count as keeping
        values."""
        ref = self.find(tensor)
        if ref is None:
            return True
        return ref.step not in self.reaching(lambda step: step.of_unit) and self._keeps(ref, labels, others)

    def _keeps(self, ref: TensorRef, labels: Collection[str], others: Collection[str]) -> bool:
        if ref.step is None:
            return False
        step = self.steps[ref.step]
        if step.func is None:
            return True
        deciding = step.arguments.get(_DECIDES.get(step.name, ""))
        decide = [leaf for leaf in _leaves(deciding) if isinstance(leaf, TensorRef)]
        moves = step.func.is_view or step.name in _MOVES or step.name in others or bool(decide)
        return (
            moves
            and all(self._keeps(each, labels, others) for each in step.refs() if each not in decide)
            and not any(self._asks_values(each, labels) for each in decide)
        )

    def _asks_values(self, ref: TensorRef, labels: Collection[str]) -> bool:
        """Whether a mask depends on more of labels than how they compare with a number of zero or less."""
        if ref.step is None:
            return True
        step = self.steps[ref.step]
        if step.func is None:
            return step.given in labels
        bounds = [leaf for leaf in step.leaves if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf <= 0]
        if step.name in ("ge", "gt", "lt", "le", "eq", "ne") and bounds:
            return False
        return any(self._asks_values(each, labels) for each in step.refs())

    # -- without other sizes -------------------------------------------------------------------------------------------

    def calls_alone(self, loss: torch.Tensor) -> LossParts | None:
        """The parts of a loss that is made of nothing but loss functions' results, added up, or divided by a number of
        the batch; None if more is to be known."""
        ref = self.find(loss)
        reaching = self.reaching(lambda step: step.call is not None)
        if ref is None or ref.step is None or any(step is None or step in reaching for step in self.asked):
            return None
        return self._calls_alone(ref.step)

    def _calls_alone(self, index: int) -> LossParts | None:
        step = self.steps[index]
        if step.call is not None:
            return frozenset({LossPart(step.call, int(step.is_sum))})
        if step.func is None or step.name not in ("add", "div", "_to_copy", "clone", "view", "squeeze", "copy"):
            return None
        first, *others = [
            leaf for leaf in _leaves(list(step.arguments.values())) if isinstance(leaf, TensorRef | float | int)
        ]
        if step.name == "div":
            divisor = others[0] if others else None
            if not (isinstance(divisor, TensorRef) and divisor.step is not None and self._is_number(divisor.step)):
                return None
            others = []
        elif step.name == "add":
            others = [other for other in others if isinstance(other, TensorRef)]
            if len(others) != 1 or step.arguments.get("alpha", 1) != 1:
                return None
        else:
            others = []
        every = [
            self._calls_alone(each.step) if isinstance(each, TensorRef) and each.step is not None else None
            for each in (first, *others)
        ]
        return None if None in every else frozenset[LossPart]().union(*(parts for parts in every if parts is not None))

    def used_calls(self, tensor: torch.Tensor) -> LossParts:
        """The results of loss functions from which a tensor was made, whatever was done with them."""
        ref = self.find(tensor)
        parts, todo = set(), [] if ref is None or ref.step is None else [ref.step]
        seen = set(todo)
        while todo:
            step = self.steps[todo.pop()]
            if step.call is not None:
                parts.add(LossPart(step.call, int(step.is_sum)))
                continue
            before = {each.step for each in step.refs() if each.step is not None} - seen
            seen |= before
            todo += before
        return frozenset(parts)

    def _is_number(self, index: int) -> bool:
        step = self.steps[index]
        refs = list(step.refs())
        return step.number or (bool(refs) and all(ref.step is not None and self._is_number(ref.step) for ref in refs))

    def reaching(self, begins: Callable[[Step], bool]) -> set[int]:
        """The steps of which `begins` is true, and those that are made from them."""
        reached: set[int] = set()
        for index, step in enumerate(self.steps):
            if begins(step) or any(ref.step in reached for ref in step.refs()):
                reached.add(index)
        return reached

    def way_to(self, loss: torch.Tensor) -> list[Any]:
        """What tells how a loss, and what units are given, is made: by which operations, on which numbers and
        constants, but not of which shapes."""
        ends = [*self._uses, self._as_argument(loss)]
        reached = {step for leaf in ends if isinstance(leaf, TensorRef) for step in leaf.steps}
        for index in reversed(range(len(self.steps))):
            if index in reached:
                reached.update(step for ref in self.steps[index].refs() for step in ref.steps)
        places = {index: place for place, index in enumerate(sorted(reached))}

        def word(leaf: Any) -> Any:
            if isinstance(leaf, TensorRef):
                return "" if leaf.step is None else places[leaf.step]
            return leaf if isinstance(leaf, torch.Tensor) else repr(leaf) if isinstance(leaf, int | float | str) else ""

        way: list[Any] = [word(leaf) for leaf in ends]
        for step in (self.steps[index] for index in places):
            way += (step.func, step.output, step.call)
            for value in step.arguments.values():  # whole numbers in lists are sizes and dimensions
                is_list = isinstance(value, list | tuple) and not isinstance(value, TensorRef)
                way += [word(leaf) for leaf in _leaves(value) if not (is_list and isinstance(leaf, int))]
        return way


def is_same_way(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether losses of two forwards are made alike, by their `way_to`."""

    def same(first: Any, second: Any) -> bool:
        if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
            return type(first) is type(second) and bool(first == second)
        if first is second or first.is_meta or second.is_meta:
            return True
        if first.layout is not torch.strided and first.numel() > _MOST_COMPARED:
            return True
        alike = first.shape == second.shape and first.dtype == second.dtype
        return alike and torch.equal(sample(first), sample(second))

    def sample(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
        every = [1 + size // 8 if tensor.numel() > _MOST_COMPARED else 1 for size in tensor.shape]
        some = tensor[tuple(slice(None, None, step) for step in every)]
        some = torch.view_as_real(some.resolve_conj()) if some.is_complex() else some
        return (some.double() if some.is_floating_point() else some).nan_to_num()  # of which torch has none for float8

    return len(one) == len(other) and all(map(same, one, other))


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one shape have the same values; torch compares none that are sparse."""
    first, second = (each if each.layout is torch.strided else each.to_dense() for each in (first, second))
    return torch.equal(first, second)


def parts_of(records: Sequence[OperationRecord], losses: Sequence[torch.Tensor]) -> LossParts | None:
    """The parts of a loss, from two forwards of which the second has twice as many samples as the first; None if the
    two did different things."""
    one, two = records
    refs = [record.find(loss) for record, loss in zip(records, losses, strict=True)]
    if None in refs:
        return frozenset() if refs == [None, None] else None
    if [step.func for step in one.steps] != [step.func for step in two.steps] or one.asked != two.asked:
        return None
    states: list[State] = []
    for step, other in zip(one.steps, two.steps, strict=True):
        states.append(_Pair(step, other, states).state())

    def at(index: int | None) -> State:
        return frozenset({MIXED}) if index is None else states[index]

    state = next(at(ref.step) for ref in refs if ref is not None)
    if isinstance(state, Constant):
        return frozenset({LossPart(None, 0)})
    if isinstance(state, Rows):  # a loss of a single sample
        return frozenset({MIXED})
    # A loss that decides what Python does is no sum of its parts, whatever is made of it then.
    computed = one.reaching(lambda step: step.of_unit or step.call is not None)
    asked = [at(index) for index in one.asked if index is None or index in computed]
    decides = any(not isinstance(each, Constant | Rows) and each - {MIXED} for each in asked)
    return state | {MIXED} if decides else state


class _Pair:
    """An operation with some samples and with twice as many, and how its result depends on them."""

    def __init__(self, one: Step, two: Step, states: Sequence[State]) -> None:
        self._one, self._two = one, two
        self._before = states
        self._leaves = list(zip(one.leaves, two.leaves, strict=False))
        same = len(one.shape) == len(two.shape)
        self._varying = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a != b]
        self._doubles = same and all(2 * one.shape[d] == two.shape[d] for d in self._varying)

    def state(self) -> State:
        one = self._one
        if one.call is not None:
            return frozenset({LossPart(one.call, int(one.is_sum))})
        if one.number:
            return Constant(True)
        if one.func is None:
            if not self._varying:
                return frozenset({MIXED}) if one.of_unit else Constant()
            return Rows(self._varying[0]) if self._is_rows() else frozenset({MIXED})
        tensors = [
            (a, self._of_argument(a, b))
            for a, b in self._leaves
            if isinstance(a, TensorRef | torch.Tensor)
        ]  # fmt: skip
        live = [state for _, state in tensors if not isinstance(state, Constant)]
        parts = frozenset[LossPart]().union(*(state for state in live if isinstance(state, frozenset)))
        if any(isinstance(state, frozenset) for state in live):
            has_rows = any(isinstance(state, Rows) for state in live)
            return (None if has_rows else self._of_parts(parts, tensors)) or parts | {MIXED}
        if not live:
            number = any(isinstance(state, Constant) and state.number for _, state in tensors)
            same = self._numbers_ratio() == 1 or one.func.is_view
            if self._varying:
                return Rows(self._varying[0]) if self._is_rows() and same else frozenset({MIXED})
            return Constant(number) if same else frozenset({MIXED})
        return self._of_rows(tensors) or frozenset({MIXED})

    def _filled(self) -> State | None:
        value = [
            _number(each.arguments.get("value", each.arguments.get("fill_value", 0))) for each in (self._one, self._two)
        ]
        if value[0] is None or value[0] != value[1]:
            return None
        return (Rows(self._varying[0]) if self._is_rows() else None) if self._varying else Constant()

    def _is_rows(self) -> bool:
        return self._doubles and len(self._varying) == 1

    def _of_argument(self, one: Any, two: Any) -> State:
        if isinstance(one, TensorRef):
            same = isinstance(two, TensorRef) and two.step == one.step
            return self._before[one.step] if same and one.step is not None else frozenset({MIXED})
        if not isinstance(two, torch.Tensor):
            return frozenset({MIXED})
        if one.shape == two.shape:
            small = one.numel() <= _MOST_COMPARED and not one.is_meta
            # A number may hold the number of samples; see `_numbers_ratio`.
            return Constant() if one.dim() == 0 or not small or _equal(one, two) else frozenset({MIXED})
        varying = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a != b]
        if len(varying) == 1 and one.dim() == two.dim() and not one.is_meta:
            doubled = torch.cat([one, one], varying[0])
            if doubled.shape == two.shape and _equal(doubled, two):
                return Rows(varying[0])
            if self._one.name == "index" and _is_range(one) and _is_range(two):
                return Rows(0)
        return frozenset({MIXED})

    # -- of sums and means ---------------------------------------------------------------------------------------------

    def _of_parts(self, parts: LossParts, tensors: Sequence[tuple[Any, State]]) -> LossParts | None:
        """The result on sums and means that does not mix them; None if there is none."""
        name = self._one.name
        if self._varying:
            return None
        constants = [each for each in tensors if isinstance(each[1], Constant)]
        if name in ("mul", "div"):
            if len(tensors) - len(constants) > 1 or (name == "div" and isinstance(tensors[0][1], Constant)):
                return None
            shift = {1.0: 0, 2.0: 1, 0.5: -1}.get(self._numbers_ratio() or 0.0)
            if shift is None:
                return None
            shift = -shift if name == "div" else shift
            by_number = name == "div" and any(state.number for _, state in constants)  # type: ignore[union-attr]  # a Constant
            return frozenset(
                LossPart(p.call, None if p.power is None else p.power + shift, p.over_items or by_number) for p in parts
            )
        if name not in _LINEAR:
            return None
        if name in ("add", "sub", "rsub", "stack", "cat"):
            if self._numbers_ratio() != 1:
                return None
            added = name not in ("stack", "cat") and not all(isinstance(a, TensorRef) for a, _ in tensors[:2])
            if constants or added or len(tensors) == 1:
                return parts | {LossPart(None, 0)} if name not in ("stack", "cat") or constants else parts
        return parts

    # -- of samples ----------------------------------------------------------------------------------------------------

    def _of_rows(self, tensors: Sequence[tuple[Any, State]]) -> State | None:
        """The result on tensors that have samples; None if it mixes them."""
        one, name = self._one, self._one.name
        if name in _FILLS:
            return self._filled()
        rows = [(leaf, state) for leaf, state in tensors if isinstance(state, Rows)]
        powers = {state.power for _, state in rows}
        power = powers.pop() if len(powers) == 1 else None
        if power is None:
            return None
        chosen = any(state.chosen for _, state in rows)
        reduction = one.arguments.get("reduction")
        if name in _BY_SAMPLES:
            return Rows(self._varying[0]) if self._is_rows() and power == 0 else None
        if one.chosen:  # by values: as many as there are
            along_first = all(state.dim == 0 for _, state in rows) and power == 0
            return Rows(0, 0, True) if along_first and one.output == 0 else None
        if chosen:
            return self._of_chosen(rows, power)
        if not self._doubles or len(self._varying) > 1:
            return None
        if not self._varying:
            if isinstance(reduction, int) and power == 0 and one.output == 0 and not isinstance(reduction, bool):
                if reduction == 2:
                    return frozenset({LossPart(None, 1)})
                return frozenset({LossPart(None, 0)}) if reduction == 1 and name not in _CLASS_LOSSES else None
            if name in ("sum", "mean"):
                return frozenset({LossPart(None, power + (name == "sum"))})
            return None
        dim = self._varying[0]
        keeps = self._keeps_samples(rows, dim)
        if not keeps:
            return None
        scaled = self._power_of_rows(tensors, power)
        return None if scaled is None else Rows(dim, scaled)

    def _of_chosen(self, rows: Sequence[tuple[Any, Rows]], power: int) -> State | None:
        name, reduces = self._one.name, len(self._one.shape) == 0
        if reduces and name == "sum":
            return frozenset({LossPart(None, power + 1)})
        elementwise = _is_elementwise(self._one.func) or name in ("_to_copy", "clone", "neg")
        if elementwise and self._numbers_ratio() == 1 and all(state.chosen for _, state in rows):
            return Rows(rows[0][1].dim, power, True)
        return None

    def _keeps_samples(self, rows: Sequence[tuple[Any, Rows]], dim: int) -> bool:
        """Whether each element of the result, which has samples along `dim`, is made of one sample."""
        one, name, arguments = self._one, self._one.name, self._one.arguments
        size, ndim = one.shape[dim], len(one.shape)
        if _is_elementwise(one.func) and name not in _MOVES:
            return all(state.dim - len(leaf.shape) == dim - ndim for leaf, state in rows)
        if arguments.get("reduction") == 0:
            return True
        if name in _PRODUCTS:
            return len(rows) == 1 or (name in ("bmm", "baddbmm") and dim == 0 and all(s.dim == 0 for _, s in rows))
        if name == "index":
            return self._indexes_samples(rows, dim)
        if one.func.is_view or name in _MOVES:
            return all(self._moves(leaf, state, size) for leaf, state in rows)
        dims = next((arguments[key] for key in ("dim", "dims") if arguments.get(key) not in (None, [])), None)
        if dims is None or name == "renorm":
            return False
        ndim = len(rows[0][0].shape)
        along = {each % ndim for each in (dims if isinstance(dims, list | tuple) else [dims])}
        source = arguments.get("self")
        if name in ("gather", "index_select") and not any(leaf is source for leaf, _ in rows):
            return True  # entries of a constant, chosen by what each sample says
        return all(
            state.dim not in along and leaf.shape[state.dim] == size and len(leaf.shape) == ndim for leaf, state in rows
        )

    def _moves(self, leaf: Any, state: Rows, size: int) -> bool:
        """Whether all samples are where they were, or each is taken apart into rows, or put together from rows."""
        before, numel = leaf.shape[state.dim], leaf.shape.numel()
        if before == size:
            return True
        whole = numel == self._one.shape.numel()
        return bool(whole and (size % before == 0 or before % size == 0) and leaf.shape[: state.dim].numel() == 1)

    def _indexes_samples(self, rows: Sequence[tuple[Any, Rows]], dim: int) -> bool:
        """Of `x[indices]`: entries of a constant, or for each sample some of its own."""
        source, indices = self._one.arguments["self"], self._one.arguments["indices"]
        state = next((state for leaf, state in rows if leaf is source), None)
        if state is None:
            return not any(isinstance(index, torch.Tensor) and _is_range(index) for index in indices)
        samples = indices[state.dim] if state.dim < len(indices) else None
        if samples is None:
            return all(leaf is source for leaf, _ in rows) and source.shape[state.dim] == self._one.shape[dim]
        return isinstance(samples, torch.Tensor) and _is_range(samples) and len(samples) == source.shape[state.dim]

    def _power_of_rows(self, tensors: Sequence[tuple[Any, State]], power: int) -> int | None:
        """With which power of the number of samples the elements grow; None if in no such way."""
        one, name = self._one, self._one.name
        if one.func.is_view or name in _MOVES:
            return power
        ratio = self._numbers_ratio()
        scales = name in ("mul", "div") and sum(isinstance(state, Rows) for _, state in tensors) == 1
        if scales and not (name == "div" and isinstance(tensors[0][1], Constant)):
            shift = {1.0: 0, 2.0: 1, 0.5: -1}.get(ratio or 0.0)
            return None if shift is None else power + (-shift if name == "div" else shift)
        if _is_elementwise(one.func) and ratio != 1:
            return None
        return power if power == 0 or name in _LINEAR else None

    def _numbers_ratio(self) -> float | None:
        """Of the numbers that the operation is given, Python's and tensors of one element: 1 if they are the same, 2 if
        they double, 1/2 if they are halved, None otherwise."""
        ratios = set()
        for pair in self._leaves:
            values = [_number(each) for each in pair]
            if values[0] is None or values[1] is None or values[0] == values[1]:
                continue
            close = [r for r in (2.0, 0.5) if abs(values[0] * r - values[1]) <= 1e-6 * abs(values[1])]
            ratios.add(close[0] if close else None)
        if not ratios:
            return 1.0
        return ratios.pop() if len(ratios) == 1 else None


def _is_range(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and torch.equal(tensor.cpu(), torch.arange(len(tensor), dtype=tensor.dtype))


@cache
def _is_elementwise(func: Any) -> bool:
    """As torch says, which does not say it of all operations that work in place."""
    name = func._schema.name.removeprefix("aten::")
    other = getattr(getattr(torch.ops.aten, name.rstrip("_"), None), func._overloadname, func)
    return torch.Tag.pointwise in func.tags or torch.Tag.pointwise in other.tags


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return None if value.numel() != 1 or value.is_meta or value.is_complex() else float(value)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda leaf: isinstance(leaf, TensorRef))


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Where a tensor's elements are: of a sparse one those that it has."""
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.untyped_storage()


def _geometry(tensor: torch.Tensor) -> Geometry:
    if tensor.layout is not torch.strided:
        return 0, tuple(tensor.shape), (), tensor.dtype
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype
