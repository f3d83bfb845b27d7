"""Loading slices of a checkpoint's weights, where tensor parallelism cuts them, through transformers' own loader.

transformers sees a model whose cut weights have the shapes of this rank's slices. A tensor of the checkpoint that is
such a weight as it stands is read in part only; one that transformers fuses from several first (experts) is whole
while it is put together, one weight at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.modeling_utils import load_state_dict

from .slice_init import SliceKeeper
from .tensor_parallel import SLICES, Slicing, TensorParallel, replace_parameters


class SliceLoading:
    """How one rank loads its slices of the weights `names` of a model.

    Args:
        model: on the meta device; its cut weights become meta tensors of the slices' shapes.
    """

    def __init__(self, model: PreTrainedModel, names: Collection[str], cut: TensorParallel) -> None:
        self.keeper = SliceKeeper(cut.index, cut.size)
        self._cut = cut
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._slicings: dict[str, Slicing] = {name: cut.shards[name] for name in parameters if name in cut.shards}
        self._slicings = {name: slicing for name, slicing in self._slicings.items() if name in names}
        self._whole = {name: parameters[name] for name in self._slicings}
        parts = {}
        for name, slicing in self._slicings.items():
            whole = parameters[name]
            shape = slicing.shape(whole.shape, cut.size)
            parts[whole] = nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)
        replace_parameters(model, parts)

    @contextlib.contextmanager
    def sources(
        self, model: PreTrainedModel, files: Sequence[str], transforms: Sequence[Any] | None, ignore_mismatch: bool
    ) -> Iterator[dict[str, Any]]:
        """What to load from, by the checkpoint's names, for as long as the context lasts.

        Args:
            transforms: transformers' renamings and converters of the checkpoint's names.
            ignore_mismatch: leave out tensors of another shape, rather than to raise.

        Raises:
            ValueError: a tensor has not the shape of the model's weight.
        """
        renamings = [entry for entry in transforms or () if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms or () if isinstance(entry, WeightConverter)]
        names, prefix = model.state_dict(), model.base_model_prefix
        with contextlib.ExitStack() as opened:
            found: dict[str, Any] = {}
            plain: set[str] = set()
            for key, source in _tensors_of(files, opened):
                name, pattern = rename_source_key(key, renamings, converters, prefix, names)
                if name not in names and key in names:
                    name, pattern = rename_source_key(key, [], [], prefix, names)
                if pattern is None and name in self._slicings:
                    shape, whole = _shape_of(source), tuple(self._whole[name].shape)
                    if shape != whole:
                        if ignore_mismatch:
                            continue
                        raise ValueError(
                            f"the checkpoint does not fit the model: {name}: {list(shape)} in the checkpoint, "
                            f"{list(whole)} in the model"
                        )
                    plain.add(name)
                    source = _SlicedSource(source, self._slicings[name], self._cut)
                found[key] = source
            opened.enter_context(self._taking_slices(self._slicings.keys() - plain))
            yield found

    @contextlib.contextmanager
    def _taking_slices(self, names: Collection[str]) -> Iterator[None]:
        """Inside, what transformers puts together for the weights `names` is cut before it is kept."""
        original, before = core_model_loading.set_param_for_module, os.environ.get("HF_DEACTIVATE_ASYNC_LOAD")

        def set_slice(model: Any, name: str, value: torch.Tensor, info: Any, quantizer: Any) -> None:
            if name in names:
                whole = self._whole[name].shape
                if value.shape != whole:
                    info.missing_keys.discard(name)
                    info.mismatched_keys.add((name, value.shape, whole))
                    return
                value = self._slicings[name].take(value, self._cut.index, self._cut.size)
            original(model, name, value, info, quantizer)

        core_model_loading.set_param_for_module = set_slice
        # In the background whole tensors would be read long before they are cut.
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
        try:
            yield
        finally:
            core_model_loading.set_param_for_module = original
            if before is None:
                del os.environ["HF_DEACTIVATE_ASYNC_LOAD"]
            else:
                os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = before

    def initialise_later(self, model: PreTrainedModel, names: Collection[str]) -> set[str]:
        """Prepare the cut ones of `names`, which the checkpoint lacks, for their initialisation. Returns them."""
        chosen = self._slicings.keys() & set(names)
        for name in chosen:
            part, whole = model.get_parameter(name), self._whole[name]
            if part is not whole:
                replace_parameters(model, {part: whole})
                self.keeper.watch(whole, self._slicings[name])
        return chosen

    def finish(self, model: PreTrainedModel) -> None:
        """Leave the slices where `TensorParallel.apply` finds them, with whole meta tensors in their places."""
        slices: dict[str, torch.Tensor] = {}
        for name in self._slicings:
            parameter = model.get_parameter(name)
            kept = self.keeper.slice_of(parameter)
            if kept is None:
                kept, shape = parameter.detach(), self._whole[name].shape
                whole = nn.Parameter(torch.empty(shape, dtype=kept.dtype, device="meta"), parameter.requires_grad)
                replace_parameters(model, {parameter: whole})
                # Further names of a tied weight find the same slice.
                self.keeper.keep(whole, self._slicings[name], kept)
            slices[name] = kept
        model.__dict__[SLICES] = slices


class _SlicedSource:
    """A tensor in a file, of which indexing reads this rank's slice."""

    def __init__(self, source: Any, slicing: Slicing, cut: TensorParallel) -> None:
        self._source, self._slicing, self._cut = source, slicing, cut

    def __getitem__(self, _: Any) -> torch.Tensor:
        shape = _shape_of(self._source)
        before = (slice(None),) * (self._slicing.dim % len(shape))
        ranges = self._slicing.ranges(shape, self._cut.index, self._cut.size)
        # A copy: what a file is mapped to would stay mapped as a whole.
        return torch.cat([self._source[(*before, slice(start, stop))] for start, stop in ranges], len(before))


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


def _shape_of(source: Any) -> tuple[int, ...]:
    return tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source.get_shape())
