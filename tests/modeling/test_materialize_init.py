"""A stage that is initialised alone, or a slice of it, is bit for bit what the whole model's initialisation gives."""

import collections
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import initialization

from penstock.modeling.graph.units import list_units
from penstock.modeling.placeholders.ghosts import is_ghost
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.initialise import init_stage, meta_model, resolve_model_class
from penstock.modeling.weights.whole import alias_groups
from penstock.tensor_parallel.apply import TensorParallel
from tests.support.families import FAMILIES
from tests.support.stage_driver import cut
from tests.support.tensor_parallel_ranks import SETTINGS, VOCABULARY


def assert_is_part_of(model: nn.Module, whole: nn.Module) -> set[str]:
    """Every parameter and buffer of `model` equals the whole model's. Returns the names."""
    expected = {**dict(whole.named_parameters(remove_duplicate=False)), **dict(whole.named_buffers())}
    found = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for name, tensor in found.items():
        assert not tensor.is_meta, name
        assert (tensor.dtype, tensor.shape) == (expected[name].dtype, expected[name].shape), name
        assert torch.equal(tensor, expected[name]), name
        assert tensor.requires_grad == expected[name].requires_grad, name
    return set(found)


def assert_is_slice_of(model: nn.Module, whole: nn.Module, stages: Any, local: list[int], cut: TensorParallel) -> None:
    """Cut weights are meta tensors until the model is split; then all are this rank's part of the whole model's."""
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (name in cut.shards), name
        assert parameter.shape == expected[name].shape, name
    SplitModel(model, stages, local, cut)
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found
    for name, parameter in found.items():
        theirs = expected[name].detach()
        if name in cut.shards:
            theirs = cut.shards[name].take(theirs, cut.index, cut.size)
        assert torch.equal(parameter, theirs), name
        assert parameter.dtype == theirs.dtype and parameter.requires_grad == expected[name].requires_grad
    names_of: dict[int, set[str]] = collections.defaultdict(set)
    for name, parameter in expected.items():
        names_of[id(parameter)].add(name)
    for names in names_of.values():
        here = {id(found[name]) for name in names if name in found}
        assert len(here) <= 1, f"{names} are tied"


WITH_A_PLAN = ["bert_mlm", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen3", "vit"]
EACH = [*((family, 1) for family in sorted(FAMILIES)), *((family, 2) for family in WITH_A_PLAN)]


def settings_of(family: str, size: int) -> dict[str, Any]:
    """With which so many ranks can share the model's weights."""
    return SETTINGS.get(family, VOCABULARY) if size > 1 else {}


def configuration(family: str, size: int = 1) -> tuple[Any, Any]:
    row = FAMILIES[family]
    settings = {**row.settings, **settings_of(family, size)}
    return getattr(transformers, row.model_class), getattr(transformers, row.config_class)(**settings)


def parts(
    model_class: Any, config: Any, num_stages: int, size: int
) -> Iterator[tuple[list[list[str]], list[int], TensorParallel | None]]:
    """All stages, those that are here, and the cut of the whole model that each of `size` ranks has of them."""
    skeleton = meta_model(model_class, config)
    stages = cut(list_units(skeleton), num_stages)
    for local in {1: [[0]], 2: [[0], [1]], 3: [[1], [0, 2]]}[num_stages]:
        for index in range(size):
            yield stages, local, TensorParallel(skeleton, index, size, alias_groups(skeleton)) if size > 1 else None


def assert_right(model: nn.Module, whole: nn.Module, stages: Any, local: list[int], cut: TensorParallel | None) -> None:
    """As read or initialised, and when the model is split."""
    if cut is not None:
        assert_is_slice_of(model, whole, stages, local, cut)
        return
    found = assert_is_part_of(model, whole)
    SplitModel(model, stages, local)
    assert assert_is_part_of(model, whole) == found


@pytest.mark.parametrize(("family", "size"), EACH)
def test_every_stage_and_the_generator_are_as_after_initialising_the_whole_model(family: str, size: int) -> None:
    """And every slice of it, with tensor parallelism."""
    model_class, config = configuration(family, size)
    torch.manual_seed(7)
    whole = model_class._from_config(copy.deepcopy(config))
    state = torch.get_rng_state()
    names: set[str] = set()
    for stages, local, tensor_parallel in parts(model_class, config, 3 if size == 1 else 2, size):
        model = init_stage(model_class, config, stages, local, 7, tensor_parallel)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(model) is model_class
        for stage, units in enumerate(stages):
            assert all(is_ghost(model.get_submodule(unit)) == (stage not in local) for unit in units)
        assert_right(model, whole, stages, local, tensor_parallel)
        names |= set(dict(model.named_parameters(remove_duplicate=False)))
    assert names >= set(dict(whole.named_parameters(remove_duplicate=False)))


def test_without_a_seed_the_generator_goes_on() -> None:
    model_class, config = configuration("gpt2")
    stages = cut(list_units(meta_model(model_class, config)), 2)
    made = []
    for make in (lambda: model_class(copy.deepcopy(config)), lambda: init_stage(model_class, config, stages, [1])):
        torch.manual_seed(3)
        torch.rand(5)
        made.append(make())
    assert_is_part_of(made[1], made[0])


def test_another_dtype_is_initialised_as_from_config_does_and_all_else_is_left_as_it_was() -> None:
    model_class, config = configuration("vit")
    functions = (nn.Module.register_parameter, torch.nn.init.normal_, torch.nn.init.trunc_normal_)
    before = config.to_dict(), functions, dict(initialization.TORCH_INIT_FUNCTIONS)
    stages = cut(list_units(meta_model(model_class, config)), 2)
    torch.manual_seed(5)
    whole = model_class._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    model = init_stage(model_class, config, stages, [1], seed=5, dtype=torch.bfloat16)
    assert_is_part_of(model, whole)
    assert next(model.parameters()).dtype is torch.bfloat16
    functions = (nn.Module.register_parameter, torch.nn.init.normal_, torch.nn.init.trunc_normal_)
    assert before == (config.to_dict(), functions, initialization.TORCH_INIT_FUNCTIONS)


class ToyConfig(transformers.PretrainedConfig):
    model_type = "penstock-toy"


class Toy(transformers.PreTrainedModel):
    """Draws numbers in every unusual way that modules do."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.first = nn.Linear(3, 4)
        self.second = nn.Module()
        self.second.drawn = nn.Parameter(torch.randn(5))
        self.second.noise = nn.Parameter(torch.zeros(6))
        self.second.noise.data.add_(torch.rand_like(self.second.noise))
        shared = nn.Parameter(torch.rand(7))
        self.second.one, self.third = shared, nn.Module()
        self.third.two = shared
        self.third.norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.third.heads = nn.MultiheadAttention(4, 2)
        self.third.register_buffer("buffer", torch.randn(3))
        self.fourth = nn.ParameterList([torch.rand(2), torch.rand(3)])
        self.fourth.turned = nn.Parameter(torch.rand(20, 30).t())
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.ParameterList):
            module.turned.data.normal_()
            torch.nn.init.trunc_normal_(module.turned, std=3.0, a=-0.1)
            module.turned.data[3:7].exponential_()
            torch.nn.init.orthogonal_(module.turned)
            torch.randperm(5, device=module.turned.device)
            module.turned.data.mul_(torch.bernoulli(torch.full_like(module.turned, 0.5)))
        elif isinstance(module, nn.Linear):
            super()._init_weights(module)


def test_every_way_to_draw_numbers_is_followed() -> None:
    stages = [["first"], ["second"], ["third"], ["fourth"]]
    torch.manual_seed(1)
    whole = Toy(ToyConfig())
    state = torch.get_rng_state()
    for stage in range(4):
        model = init_stage(Toy, ToyConfig(), stages, [stage], seed=1)
        assert torch.equal(torch.get_rng_state(), state)
        assert any(name.startswith(stages[stage][0]) for name in assert_is_part_of(model, whole))


class Copying(transformers.PreTrainedModel):
    """The second layer starts as a copy of the first."""

    config_class = ToyConfig

    def __init__(self, config: ToyConfig) -> None:
        super().__init__(config)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.second:
            module.weight.data.copy_(self.first.weight.data)


def test_a_weight_computed_from_another_stages_weight_is_refused_not_wrong() -> None:
    stages = [["first"], ["second"]]
    init_stage(Copying, ToyConfig(), stages, [0], seed=1)
    with pytest.raises(NotImplementedError, match=r"only a part of Copying.*that are not here.*penstock\.initialize"):
        init_stage(Copying, ToyConfig(), stages, [1], seed=1)


def test_the_class_is_found_from_the_configuration_or_an_auto_class() -> None:
    config = transformers.GPT2Config()
    assert resolve_model_class(config, transformers.AutoModelForCausalLM) is transformers.GPT2LMHeadModel
    assert resolve_model_class(config, transformers.GPT2Model) is transformers.GPT2Model
    with pytest.raises(ValueError, match=r"architectures=\[\].*model_class="):
        resolve_model_class(config)
    config.architectures = ["GPT2ForSequenceClassification"]
    assert resolve_model_class(config) is transformers.GPT2ForSequenceClassification
    config.architectures = ["NotAModel"]
    with pytest.raises(ValueError, match="NotAModel"):
        resolve_model_class(config)
    with pytest.raises(ValueError, match="has no model for a GPT2Config; pass another model_class="):
        resolve_model_class(config, transformers.AutoModelForImageClassification)
    with pytest.raises(ValueError, match="Linear"):
        resolve_model_class(config, nn.Linear)
