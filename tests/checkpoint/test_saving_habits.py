"""What users save by habit: a state dict, which is a part of the model here, and by methods of their model's own."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import GPT2LMHeadModel

from tests.support.families import FAMILIES
from tests.support.own_models import GPT, VOCABULARY, WIDTH
from tests.support.pool import Pool
from tests.support.training import parallelize

WRITE = {
    "torch.save": lambda model, folder: torch.save(model.state_dict(), f"{folder}/torch"),
    "torch.save of more": lambda model, folder: torch.save({"step": 1, "model": model.state_dict()}, f"{folder}/more"),
    "a part": lambda model, folder: torch.save(model.transformer.state_dict(), io.BytesIO()),
    "a module around it": lambda model, folder: torch.save(nn.ModuleList([model]).state_dict(), io.BytesIO()),
    "a shallow copy": lambda model, folder: save_file(model.state_dict().copy(), f"{folder}/shallow"),
    "a copy": lambda model, folder: torch.save(copy.deepcopy(model.state_dict()), io.BytesIO()),
    "an average": lambda model, folder: torch.save(AveragedModel(model).state_dict(), io.BytesIO()),
    "save_file": lambda model, folder: save_file(model.state_dict(), f"{folder}/file"),
    "save": lambda model, folder: safetensors.torch.save(model.state_dict()),
    "save_model": lambda model, folder: safetensors.torch.save_model(model, f"{folder}/model"),
    "hub": lambda model, folder: huggingface_hub.save_torch_state_dict(model.state_dict(), folder),
    "save_pretrained of a part": lambda model, folder: model.transformer.save_pretrained(folder),
}


def save_by_habit(folder: str) -> dict[str, str]:
    model = parallelize(FAMILIES["gpt2"].build(), 2)
    found = {}
    for name, write in WRITE.items():
        try:
            write(model, folder)
        except TypeError as error:
            found[name] = str(error)
    return found


def test_a_state_dict_of_one_stage_says_so_when_it_is_saved(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, save_by_habit, str(tmp_path))
    for held, errors in zip((26, 27), found, strict=True):
        assert errors.keys() == WRITE.keys()
        assert f"one rank's part of GPT2LMHeadModel: {held} of its 53 tensors" in errors["torch.save"]
        for error in errors.values():
            assert "model.save_pretrained(folder) on every rank" in error and "dict(model.state_dict())" in error
    assert not list(tmp_path.rglob("*.safetensors"))


def read_by_habit(folder: str) -> set[str]:
    model = parallelize(FAMILIES["gpt2"].build(), 2)
    state = model.state_dict()
    model.load_state_dict({name: tensor.clone() for name, tensor in copy.deepcopy(state).items()})
    safetensors.torch.load_model(model, f"{folder}/whole", strict=False)
    dcp.save(state, checkpoint_id=f"{folder}/distributed")
    torch.save(dict(state), f"{folder}/part{dist.get_rank()}")
    model.save_parallelized(f"{folder}/ours", state_dict=state)
    return set(state)


def test_a_state_dict_of_one_stage_can_be_read_and_saved_as_a_part(pool: Pool, tmp_path: Path) -> None:
    whole = FAMILIES["gpt2"].build()
    safetensors.torch.save_model(whole, str(tmp_path / "whole"))
    parts = pool.run(2, read_by_habit, str(tmp_path))
    assert parts[0] | parts[1] == set(whole.state_dict())
    for rank, part in enumerate(parts):
        assert torch.load(tmp_path / f"part{rank}").keys() == part
    assert (
        dcp.FileSystemReader(tmp_path / "distributed").read_metadata().state_dict_metadata.keys() == parts[0] | parts[1]
    )


def save_whole(folder: str) -> None:
    model = parallelize(FAMILIES["gpt2"].build(), 1)
    torch.save(model.state_dict(), f"{folder}/torch{dist.get_rank()}")
    save_file(dict(model.state_dict(), **{"lm_head.weight": model.lm_head.weight.clone()}), f"{folder}/safe")
    safetensors.torch.save_model(model, f"{folder}/model")


def test_the_state_dict_of_a_pipeline_of_one_stage_is_saved_as_any_other(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, save_whole, str(tmp_path))
    assert torch.load(tmp_path / "torch0").keys() == FAMILIES["gpt2"].build().state_dict().keys()


class Published(nn.Module, huggingface_hub.PyTorchModelHubMixin):  # type: ignore[misc]  # it has no types
    """Has saving methods of its own, some of them a library's; embedding and head are tied."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.body, self.head = GPT(), nn.Linear(VOCABULARY, width)
        self.register_buffer("shift", torch.arange(float(width)))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(idx)[0]) + self.shift

    def save_layers(self, path: str, *names: str) -> int:
        layers = {name: self.get_parameter(name) for name in names}
        torch.save({"state": self.state_dict(), "body": self.body.state_dict(), "layers": layers}, path)
        return len(list(self.parameters()))

    def save_badly(self, path: str) -> None:
        raise OSError(f"no room for {path}")

    def save_together(self, path: str) -> None:
        if dist.get_rank() == 0:
            torch.save(self.state_dict(), path)
        dist.barrier()

    def save_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + 1


def build_published() -> Published:
    torch.manual_seed(0)
    return Published(WIDTH)


def save_published(folder: str) -> tuple[Any, float, str]:
    model = parallelize(build_published(), 2)
    before = [(name, parameter.shape, parameter.device) for name, parameter in model.named_parameters()]
    model.save_pretrained(f"{folder}/published")
    counted = model.save_layers(f"{folder}/layers", "body.transformer.h.0.mlp.0.weight", "head.weight")
    hidden = model.save_hidden(torch.ones(1)).item()  # saves nothing: is called where it is called
    with pytest.raises(RuntimeError, match="rank 0: OSError: no room for here") as failure:
        model.save_badly("here")
    with pytest.raises(RuntimeError, match=r"save_together\(\) calls torch.distributed \(barrier"):
        model.save_together(f"{folder}/together")  # the others are not in it
    assert [(name, parameter.shape, parameter.device) for name, parameter in model.named_parameters()] == before
    with torch.no_grad():
        model(idx=torch.zeros(4, 8, dtype=torch.long))
    return counted, hidden, str(failure.value)


def test_the_own_saving_methods_of_a_class_write_the_whole_model(pool: Pool, tmp_path: Path) -> None:
    expected = build_published()
    first, second = pool.run(2, save_published, str(tmp_path))
    assert first[:2] == (len(list(expected.parameters())), 2.0) and second[:2] == (None, 2.0)
    assert "Published.save_badly()" in second[2]
    loaded = Published.from_pretrained(tmp_path / "published")  # by the config.json that it wrote itself
    content = torch.load(tmp_path / "layers")
    for state in (loaded.state_dict(), content["state"]):
        torch.testing.assert_close(dict(state), dict(expected.state_dict()), rtol=0, atol=0)
    torch.testing.assert_close(dict(content["body"]), dict(expected.body.state_dict()), rtol=0, atol=0)
    for name, weight in content["layers"].items():
        assert torch.equal(weight, expected.get_parameter(name))
    assert loaded.body.lm_head.weight is loaded.body.transformer.wte.weight


class Tagged(GPT2LMHeadModel):
    """Adds a file to what transformers writes."""

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:  # type: ignore[override]
        super().save_pretrained(save_directory, **options)
        Path(save_directory, "tag").write_text("mine")


def build_tagged() -> Tagged:
    torch.manual_seed(0)
    return Tagged(FAMILIES["gpt2"].build(vocab_size=98).config)


def save_tagged(folder: str, stages: int, size: int) -> None:
    model = parallelize(build_tagged(), stages, tensor_parallel_size=size)
    model.save_pretrained(folder)
    with pytest.raises(TypeError, match="one rank's part of Tagged"):
        torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(("stages", "size"), [(2, 1), (1, 2)])
def test_a_save_pretrained_that_extends_transformers_own_is_called(
    pool: Pool, tmp_path: Path, stages: int, size: int
) -> None:
    pool.run(2, save_tagged, str(tmp_path / "split"), stages, size)
    model = build_tagged()
    model.save_pretrained(tmp_path / "plain")
    saved, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("split", "plain"))
    torch.testing.assert_close(saved, expected, rtol=0, atol=0)
    for path in (tmp_path / "plain").iterdir():
        assert path.suffix == ".safetensors" or (tmp_path / "split" / path.name).read_bytes() == path.read_bytes()
