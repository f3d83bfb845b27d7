"""Units: found in forward order, on whole and meta models, leaving them untouched; refusals name their reason."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from penstock.modeling.graph.units import list_units
from tests.support.families import FAMILIES

EXPECTED = {
    "gpt2": ["transformer.wte", "transformer.wpe", *[f"transformer.h.{i}" for i in range(4)], "transformer.ln_f",
             "lm_head"],
    "llama": ["model.embed_tokens", *[f"model.layers.{i}" for i in range(4)], "model.norm", "lm_head"],
    "bert_mlm": ["bert.embeddings", *[f"bert.encoder.layer.{i}" for i in range(4)], "cls"],
    "vit": ["vit.embeddings", *[f"vit.layers.{i}" for i in range(4)], "vit.layernorm", "classifier"],
    "t5": ["shared", "encoder.embed_tokens", *[f"encoder.block.{i}" for i in range(3)], "encoder.final_layer_norm",
           "decoder.embed_tokens", *[f"decoder.block.{i}" for i in range(3)], "decoder.final_layer_norm", "lm_head"],
}  # fmt: skip


@pytest.mark.parametrize("family", EXPECTED)
def test_units_are_the_blocks_and_what_stands_beside_them(family: str) -> None:
    assert list_units(FAMILIES[family].build()) == EXPECTED[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_units_hold_every_parameter_once_and_are_those_of_a_meta_model(family: str) -> None:
    model = FAMILIES[family].build()
    units = list_units(model)
    with torch.device("meta"):
        on_meta = FAMILIES[family].build(dtype=torch.float32)
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert list_units(on_meta) == units
    for name, _ in model.named_parameters(remove_duplicate=False):
        assert sum(name.startswith(f"{unit}.") for unit in units) == 1, name


def test_listing_leaves_the_model_and_the_random_generator_as_they_were() -> None:
    model = FAMILIES["mixtral"].build(dropout=0.1)
    before = copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    state = torch.get_rng_state()
    list_units(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == classes
    assert sum(len(module._forward_pre_hooks) for module in model.modules()) == hooks
    assert model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_nothing_is_computed() -> None:
    """A model of a trillion parameters lists its units, as no weight exists."""
    config = transformers.GPT2Config(n_embd=25600, n_layer=4, n_head=160)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 3e10
    assert len(list_units(model)) == 8


class Looking(transformers.GPT2PreTrainedModel):
    """Its code reads a tensor of a unit without calling it."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.embedding = nn.ModuleDict({"words": nn.Embedding(50, 8), "unused": nn.Linear(2, 2)})
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(input_ids, self.embedding["words"].weight)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_a_tensor_that_the_models_code_reads_is_on_every_stage() -> None:
    units = list_units(Looking(transformers.GPT2Config(vocab_size=50, eos_token_id=2)))
    assert "embedding.words" not in units
    assert [unit for unit in units if unit.startswith("blocks")] == ["blocks.0", "blocks.1", "blocks.2"]


class Container(transformers.GPT2PreTrainedModel):
    """Its code calls the children of a module, never the module itself."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.body = nn.Module()
        self.body.embed = nn.Embedding(50, 8)
        self.body.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50)
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body.first(self.body.embed(input_ids)))


def test_a_module_that_is_never_called_is_opened() -> None:
    assert list_units(Container(transformers.GPT2Config(vocab_size=50, eos_token_id=2))) == [
        "body.embed",
        "body.first",
        "head",
    ]


def test_a_model_of_one_piece_is_refused_by_name() -> None:
    class Single(transformers.GPT2PreTrainedModel):
        def __init__(self, config: transformers.GPT2Config) -> None:
            super().__init__(config)
            self.only = nn.Parameter(torch.ones(4))
            self.post_init()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.only * input_ids

    with pytest.raises(NotImplementedError, match=r"Auto policy for Single is not implemented\.\.\. .*one another"):
        list_units(Single(transformers.GPT2Config()))


def test_a_forward_that_fails_is_refused_with_its_error() -> None:
    class Broken(Container):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.body.embed(input_ids)
            raise ValueError(f"no cheese for {tuple(hidden.shape)}")

    with pytest.raises(NotImplementedError, match=r"Auto policy for Broken is not implemented\.\.\. .*no cheese"):
        list_units(Broken(transformers.GPT2Config(vocab_size=50, eos_token_id=2)))


class Recomputed(torch.autograd.Function):
    """Runs blocks without a graph; a backward of its own would run them again."""

    @staticmethod
    def forward(ctx: object, hidden: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        for block in blocks:
            hidden = block(hidden)
        return hidden


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return Recomputed.apply(hidden, self.blocks)  # type: ignore[no-any-return]


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), Blocks(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


def test_blocks_inside_an_autograd_function_are_one_unit() -> None:
    assert list_units(Reversible(), {"x": torch.zeros(2, 4)}) == ["first", "middle", "last"]


def test_a_model_that_is_one_autograd_function_is_refused() -> None:
    model = Blocks()
    with pytest.raises(NotImplementedError, match=r"blocks\.0 inside Recomputed, a torch\.autograd\.Function"):
        list_units(model, {"hidden": torch.zeros(2, 4)})


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, hidden: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
        return hidden @ embedding.weight.T + self.bias


class GivenAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), TiedHead()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden, self.embedding)  # type: ignore[no-any-return]


def test_a_module_whose_weights_another_one_is_given_is_on_every_stage() -> None:
    ids = torch.zeros(2, 3, dtype=torch.long)
    assert list_units(GivenAModule(), {"ids": ids}) == ["blocks.0", "blocks.1", "head"]


def test_given_inputs_replace_dummy_ones() -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, picture: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(picture))

    assert list_units(Images(), {"picture": torch.zeros(4, 3)}) == ["first", "second"]


class KeptInBuffers(nn.Module):
    """A block that is not trained, whose weight a checkpoint has as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_blocks_that_have_buffers_alone_are_units() -> None:
    blocks = nn.ModuleList(KeptInBuffers() for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = blocks, nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    assert list_units(Model(), {"x": torch.zeros(2, 4)}) == ["blocks.0", "blocks.1", "blocks.2", "head"]
