"""Loading slices of a checkpoint's weights, where tensor parallelism cuts them, through transformers' own loader.

In the model cut weights stay meta tensors of their whole shapes, which transformers' conversions look at; their slices
are kept beside it. A tensor of the checkpoint that is such a weight as it stands is read in part only; one that
transformers puts together from several (experts) is whole while it does, one weight at a time.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.modeling_utils import load_state_dict

from .slice_init import SliceKeeper
from .tensor_parallel import Slicing, TensorParallel, give_slices


class SliceLoading:
    """How one rank loads its slices of those of the weights `names` that are cut.

    Args:
        model: on the meta device.

    Attributes:
        keeper: has the slices.
        mismatched: (name, shape in the checkpoint, shape in the model) of tensors that were left out.

    Raises:
        ValueError: a weight has not the shape that `cut` was made for.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str], cut: TensorParallel) -> None:
        self.keeper = SliceKeeper(cut.index, cut.size)
        self.mismatched: set[tuple[str, Any, Any]] = set()
        self._cut = cut
        self._slicings: dict[str, Slicing] = {name: cut.shards[name] for name in names if name in cut.shards}
        self._shapes = {name: model.get_parameter(name).shape for name in self._slicings}
        misfits = [
            f"{name}: {list(shape)} in the checkpoint, {list(cut.whole_shape(name, shape))} in the model"
            for name, shape in sorted(self._shapes.items())
            if cut.whole_shape(name, shape) != tuple(shape)
        ]
        if misfits:
            raise ValueError(f"the checkpoint does not fit the model: {'; '.join(misfits)}")
        # By name, whether the checkpoint has the same values as for the weight that the model ties it to.
        self._equal_to_tied: dict[str, bool] = {}

    @contextlib.contextmanager
    def sources(
        self, model: PreTrainedModel, files: Sequence[str], transforms: Sequence[Any] | None
    ) -> Iterator[dict[str, Any]]:
        """What to load from, by the checkpoint's names, for as long as the context lasts.

        Args:
            transforms: transformers' renamings and converters of the checkpoint's names.
        """
        plain: dict[str, _SlicedSource] = {}
        fused: set[str] = set()
        with contextlib.ExitStack() as opened:
            found: dict[str, Any] = {}
            for key, source, name, converted in _named(model, files, transforms, opened):
                found[key] = source
                if name not in self._slicings:
                    continue
                if converted:
                    fused.add(name)
                elif (shape := _shape_of(source)) != self._shapes[name]:
                    self.mismatched.add((name, shape, self._shapes[name]))
                    del found[key]
                else:
                    found[key] = plain[name] = _SlicedSource(source, self._slicings[name], self._cut)
            for target, tied in _pairs_of_ties(model.all_tied_weights_keys, fused | plain.keys()):
                if target not in plain or tied not in plain:
                    raise NotImplementedError(f"cannot tell whether the checkpoint has {target} and {tied} alike")
                dtype = model.get_parameter(target).dtype
                self._equal_to_tied[target] = plain[target].equals(plain[tied], dtype)
            opened.enter_context(self._keeping_slices(plain.keys()))
            if fused:
                opened.enter_context(_reading_in_turn())
            yield found

    @contextlib.contextmanager
    def _keeping_slices(self, plain: Collection[str]) -> Iterator[None]:
        """Inside, of what transformers has read for a cut weight the slice is kept; of `plain` ones it is that."""
        original = core_model_loading.set_param_for_module

        def set_slice(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
            if name not in self._slicings:
                original(model, name, value, info, quantizer)
                return
            info.missing_keys.discard(name)
            if name not in plain:
                if value.shape != self._shapes[name]:
                    info.mismatched_keys.add((name, value.shape, self._shapes[name]))
                    return
                value = self._slicings[name].take(value, self._cut.index, self._cut.size)
            parameter = _renewed(model, name, value.dtype)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' own mark
            self.keeper.keep(parameter, self._slicings[name], value)

        core_model_loading.set_param_for_module = set_slice
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = original

    def initialise_later(self, model: PreTrainedModel, names: Collection[str]) -> set[str]:
        """Prepare the cut ones of `names`, which the checkpoint lacks, for their initialisation. Returns them."""
        chosen = self._slicings.keys() & set(names)
        for name in chosen:
            self.keeper.watch(_renewed(model, name), self._slicings[name])
        return chosen

    def find_ties(self, model: PreTrainedModel, missing: set[str]) -> None:
        """Make transformers tie what the checkpoint has alike under two names, and nothing that it has unlike.

        It compares values where it finds some, but here are slices, which may be alike when the whole weights are not.
        """
        for target, equal in self._equal_to_tied.items():
            if equal:
                missing.add(target)
            else:
                model.all_tied_weights_keys.pop(target)

    def finish(self, model: PreTrainedModel) -> None:
        """Leave the slices where `TensorParallel.apply` finds them."""
        give_slices(model, self.keeper.slice_of)


class _SlicedSource:
    """A tensor in a file, of which indexing reads this rank's slice."""

    def __init__(self, source: Any, slicing: Slicing, cut: TensorParallel) -> None:
        self._source, self._slicing, self._cut = source, slicing, cut

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._read(self._cut.index)

    def equals(self, other: _SlicedSource, dtype: torch.dtype) -> bool:
        """Whether the whole tensors are equal in a model of type `dtype`; they are read a slice at a time."""
        indices = range(self._cut.size)
        return all(torch.equal(self._read(i).to(dtype), other._read(i).to(dtype)) for i in indices)

    def _read(self, index: int) -> torch.Tensor:
        shape = _shape_of(self._source)
        before = (slice(None),) * (self._slicing.dim % len(shape))
        ranges = self._slicing.ranges(shape, index, self._cut.size)
        # A copy: what a file is mapped to would stay mapped as a whole.
        return torch.cat([self._source[(*before, slice(start, stop))] for start, stop in ranges], len(before))


def _pairs_of_ties(ties: Mapping[str, str], loaded: Collection[str]) -> Iterator[tuple[str, str]]:
    """Of names that are tied and were all loaded, each but the first with the first: the source if it is there.

    Args:
        ties: from each name to its source.
    """
    first: dict[str, str] = {source: source for source in ties.values() if source in loaded}
    for target, source in ties.items():
        if target in loaded and first.setdefault(source, target) != target:
            yield target, first[source]


def _named(
    model: PreTrainedModel, files: Sequence[str], transforms: Sequence[Any] | None, opened: contextlib.ExitStack
) -> Iterator[tuple[str, Any, str, bool]]:
    """Of each tensor in a checkpoint its name, itself (unread), its name in the model, and whether it is converted.

    Follows transformers' `convert_and_load_state_dict_in_model`, on copies of the transforms, which remember names.
    """
    transforms = copy.deepcopy(list(transforms or ()))
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    names, prefix = model.state_dict(), model.base_model_prefix
    for key, source in sorted(_tensors_of(files, opened), key=lambda item: dot_natural_key(item[0])):
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        yield key, source, name, pattern is not None


def _tensors_of(files: Sequence[str], opened: contextlib.ExitStack) -> Iterator[tuple[str, Any]]:
    """Names and unread tensors of a checkpoint's files."""
    for file in files:
        if file.endswith(".safetensors"):
            pointer = opened.enter_context(safe_open(file, framework="pt", device="cpu"))
            for key in pointer.keys():  # noqa: SIM118  # no mapping
                yield key, pointer.get_slice(key)
        else:
            tensors: Mapping[str, torch.Tensor] = load_state_dict(file)
            yield from tensors.items()


def _shape_of(source: Any) -> torch.Size:
    return source.shape if isinstance(source, torch.Tensor) else torch.Size(source.get_shape())


def _renewed(model: nn.Module, name: str, dtype: torch.dtype | None = None) -> nn.Parameter:
    """Put a new meta tensor in a parameter's place, under this one of its names only, as loading does; return it."""
    owner, _, attribute = name.rpartition(".")
    old = model.get_parameter(name)
    new = nn.Parameter(torch.empty(old.shape, dtype=dtype or old.dtype, device="meta"), old.requires_grad)
    setattr(model.get_submodule(owner), attribute, new)
    return new


@contextlib.contextmanager
def _reading_in_turn() -> Iterator[None]:
    """Inside, transformers reads each tensor when its turn has come: ahead, in threads, it would hold many whole
    ones."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
