"""A stage that is initialised alone has, bit for bit, what the whole model's initialisation gives it."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import initialization

from families import FAMILIES
from launch import run_python
from penstock.modeling.graph.units import list_units
from penstock.modeling.placeholders.ghosts import is_ghost
from penstock.modeling.stage.split import SplitModel
from penstock.modeling.weights.initialise import init_stage, meta_model, resolve_model_class
from stage_driver import cut


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


def configuration(family: str):
    row = FAMILIES[family]
    model_class = getattr(transformers, row.model_class)
    return model_class, getattr(transformers, row.config_class)(**row.settings)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_stage_and_the_generator_are_as_after_initialising_the_whole_model(family: str) -> None:
    model_class, config = configuration(family)
    torch.manual_seed(7)
    whole = model_class._from_config(copy.deepcopy(config))
    state = torch.get_rng_state()
    stages = cut(list_units(meta_model(model_class, config)), 3)
    names = set()
    for local in ([0], [1], [2], [0, 2]):
        model = init_stage(model_class, config, stages, local, seed=7)
        assert torch.equal(torch.get_rng_state(), state)
        assert type(model) is model_class
        names |= assert_is_part_of(model, whole)
        for stage, units in enumerate(stages):
            assert all(is_ghost(model.get_submodule(unit)) == (stage not in local) for unit in units)
        SplitModel(model, stages, local)
        assert assert_is_part_of(model, whole)
    assert names >= set(dict(whole.named_parameters(remove_duplicate=False)))


def test_without_a_seed_the_generator_goes_on() -> None:
    model_class, config = configuration("gpt2")
    stages = cut(list_units(meta_model(model_class, config)), 2)
    torch.manual_seed(3)
    torch.rand(5)
    whole = model_class(copy.deepcopy(config))
    torch.manual_seed(3)
    torch.rand(5)
    assert_is_part_of(init_stage(model_class, config, stages, [1]), whole)


def test_another_dtype_is_initialised_as_from_config_does() -> None:
    model_class, config = configuration("vit")
    stages = cut(list_units(meta_model(model_class, config)), 2)
    torch.manual_seed(5)
    whole = model_class._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    model = init_stage(model_class, config, stages, [1], seed=5, dtype=torch.bfloat16)
    assert_is_part_of(model, whole)
    assert next(model.parameters()).dtype is torch.bfloat16


def test_the_configuration_is_left_alone() -> None:
    model_class, config = configuration("gpt2")
    before = config.to_dict()
    stages = cut(list_units(meta_model(model_class, config)), 2)
    init_stage(model_class, config, stages, [0], dtype=torch.bfloat16)
    assert config.to_dict() == before


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


def test_torch_is_left_as_it_was() -> None:
    model_class, config = configuration("vit")
    stages = cut(list_units(meta_model(model_class, config)), 2)
    before = (nn.Module.register_parameter, torch.nn.init.normal_, torch.nn.init.trunc_normal_)
    table = dict(initialization.TORCH_INIT_FUNCTIONS)
    model = init_stage(model_class, config, stages, [0])
    assert (nn.Module.register_parameter, torch.nn.init.normal_, torch.nn.init.trunc_normal_) == before
    assert table == initialization.TORCH_INIT_FUNCTIONS
    assert not any(hasattr(parameter, "_number") for parameter in model.parameters())


def test_a_stage_that_does_not_exist_is_named() -> None:
    model_class, config = configuration("gpt2")
    with pytest.raises(ValueError, match=r"local_stages has \[2\], but there are 2 stages"):
        init_stage(model_class, config, cut(list_units(meta_model(model_class, config)), 2), [2])


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
    with pytest.raises(ValueError, match="AutoModelForImageClassification has no model for a GPT2Config"):
        resolve_model_class(config, transformers.AutoModelForImageClassification)
    with pytest.raises(ValueError, match="Linear"):
        resolve_model_class(config, nn.Linear)


def peak_growth(work) -> int:
    """By how many bytes `work` raises this process's resident memory at its highest."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure_growth() -> None:
    config = transformers.GPT2Config(vocab_size=512, n_embd=512, n_layer=12, n_head=8, n_positions=64)
    stages = cut(list_units(meta_model(transformers.GPT2LMHeadModel, config)), 6)
    layer = 12 * 512 * 512 * 4
    grown = peak_growth(lambda: init_stage(transformers.GPT2LMHeadModel, config, stages, [2], seed=0))
    # Three layers are the stage's own, of twelve; one foreign weight at a time comes and goes.
    assert 3 * layer < grown < 6 * layer, grown / layer


def test_memory_holds_the_stage_and_not_the_model() -> None:
    """In a process of its own: what earlier tests freed would be used again, and not be counted."""
    result = run_python("-m", "test_materialize_init")
    assert result.returncode == 0, result.stderr


if __name__ == "__main__":
    measure_growth()
