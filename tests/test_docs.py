"""The documentation does what it says: its code runs, its commands parse, its links lead somewhere.

Every Python block of README.md and docs/*.md is run. Blocks below one heading, or below several headings of one story,
run one after the other in one namespace, on as many ranks as the text says, beside a local folder called "gpt2". What a
fragment takes for granted is given in RUNS, as code: `before` it, and what is to hold `after` it.
"""

import contextlib
import dataclasses
import importlib
import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mkdocs_pages
import pytest
import typer
from kinds.options import build_parser
from torch.distributed.run import get_args_parser

import penstock
from launch import ROOT
from local_hub import local_hub
from penstock.cli import app
from penstock.config import Configuration
from penstock.schedule import schedule_names
from pool import Pool

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks/results").glob("*.md"))]


# ---------------------------------------------------------------- reading a page


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: the line its text begins at, counted from 1, and the heading it stands below."""

    page: Path
    line: int
    heading: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    heading, fence, begin, lines = "", None, 0, page.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            if fence is None:
                fence, begin = line[3:].strip(), number
            else:
                yield Block(page, begin + 1, heading, fence, "\n".join(lines[begin : number - 1]) + "\n")
                fence = None
        elif fence is None and line.startswith("#"):
            heading = line.lstrip("# ")
    assert fence is None, f"{page}:{begin}: the block does not end"


def prose_of(page: Path) -> list[tuple[int, str]]:
    """The numbered lines outside fenced blocks."""
    inside, found = False, []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.startswith("```"):
            inside = not inside
        elif not inside:
            found.append((number, line))
    return found


def spans_of(page: Path) -> list[tuple[int, str]]:
    """Inline code, with the line each begins in; a span may go on in the next line."""
    lines = prose_of(page)
    text, found = "\n".join(line for _, line in lines), []
    for match in re.finditer(r"`([^`]+)`", text):
        number = lines[text.count("\n", 0, match.start())][0]
        found.append((number, match[1].replace("\n", " ")))
    return found


def table_column(page: Path, header: str) -> list[str]:
    """The first cells of the table whose first header is `header`, without quotes and remarks."""
    lines = [line for _, line in prose_of(page)]
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {header} |")) + 2
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells += re.findall(r"`([^`]+)`", line.split("|")[1])
    return cells


# ---------------------------------------------------------------- Python


@dataclass(frozen=True)
class Run:
    """The Python blocks below some headings of a page, in order, in one namespace, on `ranks` ranks.

    Attributes:
        before, after: code around the blocks: what their reader has by then, and what the page says is true then.
        num_layers: of the model that is called "gpt2".
    """

    page: str
    headings: tuple[str, ...]
    ranks: int
    before: str = ""
    after: str = ""
    num_layers: int = 4

    def __str__(self) -> str:
        return f"{self.page}: {', '.join(self.headings)}"

    @property
    def blocks(self) -> list[Block]:
        blocks = blocks_of(ROOT / self.page)
        return [block for block in blocks if block.language == "python" and block.heading in self.headings]


IMPORTS = """
import os, torch, penstock
from penstock import Booster, HeterogeneousParallelPlugin, PipelineTemplate
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
def whole():
    return AutoModelForCausalLM.from_pretrained("gpt2")
def split(stages):
    return penstock.initialize(whole(), {"model_parallelism": {"pipeline_parallel_size": stages}})
def samples(number):
    tokens = torch.arange(number * 8).reshape(number, 8) % 400
    return [{"input_ids": row, "labels": row} for row in tokens]
def batch_of(number):
    return {name: torch.stack([row[name] for row in samples(number)]) for name in ("input_ids", "labels")}
"""
TRAINED = """
import torch
from transformers import AutoModelForCausalLM
def assert_trained(folder):
    trained, start = (AutoModelForCausalLM.from_pretrained(name) for name in (folder, "gpt2"))
    for name, parameter in trained.named_parameters():
        assert torch.isfinite(parameter).all() and not torch.equal(parameter, start.get_parameter(name)), name
"""
EQUAL = """
def assert_equal(folder, model):
    plain = AutoModelForCausalLM.from_pretrained(folder)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(name)), name
"""

RUNS = [
    Run(
        "docs/resume.md",
        ("Never lose a run",),
        2,
        before=IMPORTS
        + """
model = penstock.initialize(whole(), {"model_parallelism": {"pipeline_parallel_size": 2}})
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
rows = samples(16)
loader = model.prepare_dataloader(rows, 8)
""",
        after="""
assert sorted(os.listdir("run")) == [f"step-{number:08d}" for number in (2, 4, 6, 7)]
assert (checkpoint.step, loader.epoch, model.pipeline.step_number) == (7, 3, 6)
""",
    ),
    Run(
        "docs/tracking.md",
        ("Tracking experiments",),
        2,
        before="import sys, types\n"
        + IMPORTS
        + """
model, batches = split(2), [batch_of(8)]
said = []
class SummaryWriter:
    def __init__(self, folder):
        self.add_scalar = lambda *values: said.append(values)
sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=SummaryWriter)
""",
        after="""
del sys.modules["torch.utils.tensorboard"]
assert len(said) == (2 if os.environ["RANK"] == "0" else 0)
""",
    ),
    Run("README.md", ("In your script",), 2, after=TRAINED + "assert_trained('trained')"),
    Run(
        "docs/tutorial.md",
        ("Inference", "Training", "Never lose a run", "Saving, loading, merging"),
        2,
        before="NUM_STAGES = 2",
        after=TRAINED + "import os\nassert sorted(os.listdir('run')) == ['step-00000002', 'step-00000004']\n"
        "assert output.logits.shape[:2] == tokens['input_ids'].shape\nassert_trained('./merged_ckpt')",
    ),
    Run(
        "docs/generation.md",
        ("All stages at work",),
        2,
        before=IMPORTS + "model, prompts = split(2), batch_of(16)['input_ids']",
        after="expected = whole().generate(prompts, max_new_tokens=8, do_sample=False)\n"
        "assert torch.equal(tokens, expected) and torch.equal(same, expected)",
    ),
    Run(
        "docs/tutorial.md",
        ("Ctrl-C",),
        2,
        before=IMPORTS
        + """
import signal
model = penstock.initialize(whole(), {"model_parallelism": {"pipeline_parallel_size": 2}})
inputs = batch_of(8)
inputs.pop("labels", None)

class Interrupted(torch.optim.SGD):
    num_steps = 0

    def step(self):
        super().step()
        self.num_steps += 1
        if self.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

optimizer = Interrupted(model.parameters(), lr=1e-2)
handler = signal.signal(signal.SIGINT, signal.default_int_handler)
""",
        after="""
signal.signal(signal.SIGINT, handler)
assert optimizer.num_steps == 3 and os.path.exists("interrupted/config.json")
""",
    ),
    Run(
        "docs/your_own_loss.md",
        ("Distillation", "Weights of tokens"),
        2,
        before=IMPORTS
        + """
model, batch = whole(), batch_of(8)
reference = whole()
logits = reference(**batch).logits.detach()
teacher_logits, token_weights = logits.roll(1, 0), torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
""",
        after="""
for out in model(**batch, teacher_logits=teacher_logits):
    out.loss.backward()
expected = reference(**batch)
expected = distil(expected, {**batch, "teacher_logits": teacher_logits}).item()
assert abs(model.pipeline.last_step.loss - expected) < 1e-4, (model.pipeline.last_step.loss, expected)
with torch.no_grad():
    inputs = {**batch, "token_weights": token_weights}
    loss = model(**inputs, criterion=WeightedTokens()).loss.item()
    expected = WeightedTokens()(reference(**batch), inputs).item()
assert abs(loss - expected) < 1e-4 * expected, (loss, expected)
""",
    ),
    Run(
        "docs/your_own_loss.md",
        ("With loaded weights, and with the plugin",),
        2,
        before=IMPORTS
        + """
batch, F, config = batch_of(8), torch.nn.functional, {"model_parallelism": {"pipeline_parallel_size": 2}}
def distil(outputs, inputs):
    student = F.log_softmax(outputs.logits, -1)
    return outputs.loss + F.kl_div(student, inputs["teacher_logits"].softmax(-1), reduction="batchmean")
reference = AutoModelForCausalLM.from_pretrained("gpt2")
inputs = {**batch, "teacher_logits": reference(**batch).logits.detach().roll(1, 0)}
expected = distil(reference(**batch), inputs).item()
""",
        after="""
for parallel in (model, boosted):
    for out in parallel(**inputs):
        out.loss.backward()
    assert abs(parallel.pipeline.last_step.global_loss - expected) < 1e-4
""",
    ),
    Run(
        "docs/torch_compile.md",
        ("torch.compile",),
        2,
        before=IMPORTS
        + """
model, batch = whole(), batch_of(8)
for block in model.transformer.h:  # without the time that inductor takes
    block.compile = lambda block=block, **_: type(block).compile(block, backend="eager")
""",
        after="""
assert all(block._compiled_call_impl is not None for block in model.transformer.h)
assert abs(model.pipeline.last_step.loss - whole()(**batch).loss.item()) < 1e-5
""",
    ),
    Run(
        "docs/your_own_model.md",
        ("A forward that returns the loss", "A criterion", "How a batch is split", "Where it is split", "Saving"),
        2,
        before=IMPORTS
        + """
import safetensors.torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
tokens, targets = torch.randint(0, 400, (2, 8, 6))
images, classes = torch.randn(8, 3, 9, 9), torch.randint(0, 10, (8,))
""",
        after="""
assert len(gpt.pipeline.split.stages) == 2 and gpt.pipeline.split.stages[0] == ("embed", "blocks.0")
fresh = GPT()
fresh.load_state_dict(safetensors.torch.load_file("safe/model.safetensors"))
gpt.eval(), fresh.eval()
with torch.no_grad():
    found, expected = gpt(tokens, targets), fresh(tokens, targets)
assert torch.allclose(found[0], expected[0], atol=1e-5) and torch.allclose(found[1], expected[1])
assert logits.shape == (8, 10) and torch.equal(logits, out.output) and logits.isfinite().all()
assert torch.allclose(out.loss, F.cross_entropy(logits, classes))
rows = {"src": torch.randn(7, 8, 16), "places": torch.randn(7, 16), "target": torch.randint(0, 5, (7, 8))}
for out in tagger(**rows):
    out.loss.backward()
with torch.no_grad():
    assert tagger(**rows).output.shape == (7, 8, 5)
""",
    ),
    Run(
        "docs/verify.md",
        ("From Python, and with a configuration",),
        1,
        before="import torch, penstock\nfrom torch import nn\n"
        "make_model = lambda: nn.Sequential(*map(nn.Linear, [4] * 3, [4] * 3))\n"
        "make_batch = lambda: {'input': torch.randn(8, 4), 'target': torch.randn(8, 4)}\n"
        "loss = lambda output, inputs: nn.functional.mse_loss(output, inputs['target'])",
        after="assert [row.result for row in found.rows] == ['exact'] * 5",
    ),
    Run(
        "docs/launching.md",
        ("More ranks than stages",),
        2,
        before=IMPORTS + "model, dataset = split(1), samples(64)",
        after="assert len(loader) == 2 and model.data_parallel_size == 2",
    ),
    Run(
        "docs/heterogeneous.md",
        ("Pipelines of different depth",),
        4,
        before=IMPORTS
        + """
model, dataset, collate, criterion = whole(), samples(64), torch.utils.data.default_collate, None
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
        after=TRAINED + "assert loss.shape == () and loss.isfinite()\nassert_trained('checkpoint')",
        num_layers=9,  # its second stage ends after the eleventh module
    ),
    Run(
        "docs/heterogeneous.md",
        ("Templates and pipelines",),
        3,
        before=IMPORTS + "model = whole()",
        after="assert plugin.global_batch_size == 32 and plugin.pipeline_index == min(int(os.environ['RANK']), 1)",
    ),
    Run(
        "docs/heterogeneous.md",
        ("Steps",),
        2,
        before=IMPORTS
        + """
plugin = HeterogeneousParallelPlugin(microbatch_size=2)
plugin.set_pipelines([PipelineTemplate.balanced(whole(), 2)], [3])
loader = plugin.prepare_dataloader(samples(6))
model, *_ = plugin.configure(whole())
batch = next(iter(loader))
""",
        after="expected = whole()(**batch_of(6)).loss.item()\n"
        "assert abs(model.pipeline.last_step.global_loss - expected) < 1e-5",
    ),
    Run(
        "docs/schedules.md",
        ("Schedules",),
        2,
        before=IMPORTS + "model = whole()",
        after="""
for out in model(**batch_of(8)):
    out.loss.backward()
assert abs(model.pipeline.last_step.global_loss - whole()(**batch_of(8)).loss.item()) < 1e-5
""",
    ),
    Run(
        "docs/schedules.md",
        ("Your own",),
        2,
        before=IMPORTS + "model = whole()",
        after="""
for out in model(**batch_of(4)):
    out.loss.backward()
assert abs(model.pipeline.last_step.global_loss - whole()(**batch_of(4)).loss.item()) < 1e-5
""",
    ),
    Run(
        "docs/tensor_parallel.md",
        ("Tensor parallelism inside a stage",),
        4,
        before=IMPORTS + "model = whole()",
        after="assert plugin.tp_size == 2\nassert torch.equal(model.generate(batch_of(1)['input_ids']), "
        "whole().generate(batch_of(1)['input_ids']))",
    ),
    Run(
        "docs/tensor_parallel.md",
        ("Which models",),
        2,
        after=IMPORTS
        + """
from transformers import GPTJConfig, GPTJForCausalLM
def gptj():
    torch.manual_seed(0)
    return GPTJForCausalLM(GPTJConfig(vocab_size=400, n_positions=32, n_embd=32, n_layer=2, n_head=2, rotary_dim=8))
model = penstock.initialize(gptj(), {"model_parallelism": {"pipeline_parallel_size": 1, "tensor_parallel_size": 2}})
assert model.get_parameter("transformer.h.0.attn.q_proj.weight").shape == (16, 32)
with torch.no_grad():
    assert torch.allclose(model(**batch_of(4)).loss, gptj().eval()(**batch_of(4)).loss, atol=1e-5)
""",
    ),
    Run(
        "docs/checkpoints.md",
        ("Saving", "Loading", "Merging"),
        2,
        before=IMPORTS + "model, config = split(1), AutoConfig.from_pretrained('gpt2')",
        after=EQUAL
        + """
from pathlib import Path
names = {path.name for path in Path("ckpt").iterdir()}
assert {"pytorch_model_tp_0_pp_0.safetensors", "parallel_checkpoint.json", "config.json"} <= names, names
assert_equal("gpt2", model)
assert_equal("merged", model)
""",
    ),
    Run(
        "docs/checkpoints.md",
        ("Never holding the whole model",),
        2,
        before=IMPORTS,
        after="""
torch.manual_seed(0)
expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("gpt2"))
for name, parameter in model.named_parameters():
    assert torch.equal(parameter, expected.get_parameter(name)), name
""",
    ),
    Run(
        "docs/planning.md",
        ("Let the run choose",),
        2,
        before=IMPORTS + "model = whole()",
        after="assert plugin.num_microbatches == (4, 4)\nassert len(model.pipeline.layout.pipelines) == 2",
    ),
    Run(
        "docs/elastic.md",
        ("In your script", "If every copy is lost"),
        2,
        before=IMPORTS
        + """
from penstock import CheckpointManager, Elastic
os.environ["STORE"] = "file://" + os.path.abspath("store")
os.environ.pop("LOCAL_RANK", None)
model, dataset, num_steps = whole(), samples(128), 3
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
""",
        after="assert loss.isfinite() and booster.step == 3 and loader.epoch == 1 and not booster.changes; "
        "assert manager.newest() is None and not manager.save(3)",
    ),
    Run(
        "docs/elastic.md",
        ("With the Trainer",),
        2,
        before=IMPORTS
        + """
import functools
from accelerate.state import AcceleratorState
from penstock import Elastic
Elastic = functools.partial(Elastic, start=2)  # the run above waits whether more come
from penstock.integrations.transformers import PipelineTrainer
from transformers import TrainingArguments
os.environ["STORE"] = "file://" + os.path.abspath("store")
AcceleratorState._reset_state(True)  # of the last run's world
model, dataset = whole(), samples(128)
arguments = TrainingArguments("run", per_device_train_batch_size=4, max_steps=3, report_to="none", use_cpu=True)
""",
        after=TRAINED
        + """
assert trainer.state.global_step == 3 and os.path.exists("run/checkpoint-3/scheduler.pt")
assert_trained("run/checkpoint-3")
AcceleratorState._reset_state(True)
""",
    ),
    Run(
        "docs/trainer.md",
        ("Unlike pipelines, and elastic runs",),
        2,
        before=IMPORTS
        + """
from penstock.integrations.transformers import PipelineTrainer
from transformers import TrainingArguments
model, dataset = whole(), samples(64)
""",
        after=TRAINED + "assert trainer.state.global_step == 3\nassert_trained('run/checkpoint-3')",
    ),
    Run(
        "docs/trainer.md",
        ("One import, one argument", "Checkpoints"),
        2,
        before=IMPORTS + "dataset = samples(32)",
        after=TRAINED
        + """
assert trainer.state.global_step == 16 and os.path.exists("run/checkpoint-8/scheduler.pt")
assert_trained("trained")
""",
    ),
    Run(
        "docs/trainer.md",
        ("Other trainers",),
        2,
        before=IMPORTS
        + """
from transformers import Seq2SeqTrainingArguments
model, dataset = split(2), samples(16)
arguments = Seq2SeqTrainingArguments(output_dir="run", max_steps=1, report_to="none", use_cpu=True, save_strategy="no")
""",
        after="assert trainer.state.global_step == 1",
    ),
    Run(
        "docs/logging.md",
        ("What a step took", "torch's profiler"),
        2,
        before=IMPORTS + "model, batch = split(2), batch_of(8)",
        after="""
assert model.pipeline.last_step.num_tokens == 64
name = f"penstock: F stage {os.environ['RANK']} microbatch 3"
assert any(event.name == name for event in profiler.events())
""",
    ),
    Run(
        "docs/logging.md",
        ("A timeline of steps",),
        2,
        before=IMPORTS + "model, batches = whole(), [batch_of(8)] * 4",
        after="""
import json
torch.distributed.barrier()
events = json.load(open("steps.json"))["traceEvents"]
assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {1, 2}
""",
    ),
    Run(
        "docs/every_rank.md",
        ("What must be the same",),
        2,
        before=IMPORTS
        + "model, batches = split(2), [batch_of(8)]\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        after=TRAINED + "assert_trained('best')",
    ),
    Run(
        "docs/trainer.md",
        ("TRL",),
        2,
        before=IMPORTS
        + """
from datasets import Dataset
from transformers import AutoTokenizer
model, tokenizer = whole(), AutoTokenizer.from_pretrained("gpt2")
texts = Dataset.from_list([{"text": f"{number} " * 9} for number in range(64)])
""",
        after="""
from peft import PeftModel
adapted = PeftModel.from_pretrained(whole(), "adapter")
assert trainer.state.global_step == 2
assert any(bool(value.any()) for name, value in adapted.named_parameters() if "lora_B" in name)
""",
    ),
    Run(
        "docs/lora.md",
        ("LoRA", "Several adapters", "Merging", "Freezing"),
        2,
        before=IMPORTS + "batch = batch_of(8)",
        after="""
from peft import PeftModel
PeftModel.from_pretrained(whole(), "adapter")
assert abs(loss_without_adapters.item() - whole()(**batch).loss.item()) < 1e-5
assert abs(AutoModelForCausalLM.from_pretrained("merged")(**batch).loss.item() - whole()(**batch).loss.item()) < 1e-4
assert all(parameter.requires_grad == ("ln_" in name) for name, parameter in model.named_parameters())
""",
    ),
    Run(
        "docs/qlora.md",
        ("A whole model", "Each rank its own stage"),
        2,
        before=IMPORTS + "batch = batch_of(8)",
        after="""
from peft import PeftModel
model.save_pretrained("again")
PeftModel.from_pretrained(whole(), "adapter")
assert any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
""",
    ),
    Run(
        "docs/diffusion.md",
        ("Diffusion models",),
        2,
        before="""
import os, sys, time
from pathlib import Path
sys.path.insert(0, ROOT_OF_EXAMPLES)
import torch
import torch.nn.functional as F
from diffusers import FluxTransformer2DModel
from peft import LoraConfig
import penstock
import run_diffusion_lora as example
if os.environ["RANK"] == "0":
    example.make_model(Path("base"))
    os.makedirs("black-forest-labs")
    os.rename("base", "black-forest-labs/FLUX.1-dev")
while not os.path.exists("black-forest-labs/FLUX.1-dev"):
    time.sleep(0.1)
torch.manual_seed(0)
sample = {"latents": torch.randn(4, 8, 8), "prompt_embeds": torch.randn(8, 32), "pooled_prompt_embeds": torch.ones(32)}
example_inputs, batch = (example.flow_matching([sample] * size, 0, torch.bfloat16, False) for size in (2, 8))
example_inputs.pop("velocity")
velocity = batch.pop("velocity")
""".replace("ROOT_OF_EXAMPLES", repr(str(ROOT / "examples"))),
        after="""
model = FluxTransformer2DModel.from_pretrained("black-forest-labs/FLUX.1-dev", subfolder="transformer")
model.load_lora_adapter("adapter", prefix="transformer", use_safetensors=True)
assert sum("lora_A" in name for name in model.state_dict()) == 2 * 4 + 4 * 3
""",
    ),
    Run(
        "docs/exactness.md",
        ("What you need to do",),
        2,
        before=IMPORTS + "model, batch = split(2), batch_of(10)",
        after="assert abs(loss - whole()(**batch).loss.item()) < 1e-5",
    ),
]


def test_every_python_block_is_run() -> None:
    written = {
        (str(page.relative_to(ROOT)), block.heading)
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "python"
    }
    assert written == {(run.page, heading) for run in RUNS for heading in run.headings}


def test_every_other_block_is_checked_by_its_language() -> None:
    """Commands are parsed below; a block without a language is what something printed."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        python = [block.text.splitlines() for block in blocks_of(page) if block.language == "python"]
        for block in blocks_of(page):
            match block.language:
                case "python" | "console" | "bash" | "":
                    pass
                case "json":
                    lines = [line for line in block.text.splitlines() if not line.startswith("//")]
                    Configuration.from_any(json.loads("\n".join(lines)))
                case "diff":  # what it adds stands in the page's own script, and what it takes away does not
                    for line in block.text.splitlines():
                        if line[0] in "+-" and len(line) > 1:
                            stands = any(own.strip().startswith(line[1:].strip()) for own in itertools.chain(*python))
                            assert stands == (line[0] == "+"), f"{page.name}:{block.line}: {line}"
                case language:
                    raise AssertionError(f"{page.name}:{block.line}: nobody checks {language}")


@pytest.fixture(scope="module")
def hubs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Local folders for the names "gpt2" and "squad", for each number of layers."""
    folders = {}
    for num_layers in {run.num_layers for run in RUNS}:
        folders[num_layers] = tmp_path_factory.mktemp("hub")
        local_hub(folders[num_layers], num_layers)
    return folders


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_python_blocks_run_and_do_what_the_page_says(
    run: Run, hubs: dict[int, Path], pool: Pool, tmp_path: Path
) -> None:
    hub = hubs[run.num_layers]
    for name in ("gpt2", "squad"):
        (tmp_path / name).symlink_to(hub / name)
    for block in blocks_of(ROOT / run.page):
        if block.language == "json":  # named by a comment in its first line
            (tmp_path / block.text.splitlines()[0].removeprefix("// ")).write_text(block.text)
    pieces = [(str(block.page), block.line, block.text) for block in run.blocks]
    pieces = [("before", 1, run.before), *pieces, ("after", 1, run.after)]
    environment = {"HF_HOME": str(hub / "cache"), "HF_HUB_OFFLINE": "1"}
    pool.run(run.ranks, run_code, pieces, tmp_path, init=False, timeout=120, environment=environment)


def run_code(pieces: list[tuple[str, int, str]], folder: Path) -> None:
    """On a worker: pieces of code (file, line, text) in one namespace; tracebacks name the lines of the page."""
    namespace = {"__name__": "page"}
    with contextlib.chdir(folder):
        for file, line, text in pieces:
            exec(compile("\n" * (line - 1) + text, file, "exec"), namespace)


# ---------------------------------------------------------------- commands

PLACEHOLDERS = {"YOUR_SCRIPT.py", "script.py", "train.py"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FOREIGN = {"git", "cd", "export", "sinfo", "gcloud", "deepspeed", "mpirun"}


def commands() -> list[tuple[str, list[str]]]:
    """All commands in console and bash blocks and in inline code, each with where it stands, in words."""
    found = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for block in blocks_of(page):
            if block.language in ("console", "bash"):
                text = block.text.replace("\\\n", " ")
                for line in text.splitlines():
                    for part in re.split(r" && ", line.removeprefix("$ ")):
                        found.append((f"{page.name}: {part}", shlex.split(part, comments=True)))
        for number, span in spans_of(page):
            if re.match(r"(penstock|make|torchrun|python|pip|srun|sbatch|\.venv/bin/pip) ", span):
                found.append((f"{page.name}:{number}: {span}", shlex.split(span)))
    return [(where, words) for where, words in found if words]


@pytest.mark.parametrize("words", [pytest.param(words, id=where) for where, words in commands()])
def test_commands_parse(words: list[str]) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables before a command
        words = words[1:]
    program, *arguments = words
    match program.removeprefix(".venv/bin/"):
        case "penstock":
            check_penstock(arguments)
        case "make":
            targets = [word for word in arguments if "=" not in word]
            assert set(targets) <= TARGETS, f"the Makefile has no {targets}"
            dry = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
        case "torchrun":
            check_launch(arguments)
        case "python" | "python3":
            check_python(arguments)
        case "pip":
            for word in arguments:
                assert set(re.findall(r"\w+", word.partition("[")[2])) <= EXTRAS.keys(), word
        case "bash":
            assert (ROOT / arguments[0]).is_file()
        case "srun" | "sbatch":
            check_slurm(arguments)
        case name:
            assert name in FOREIGN or name == ".", f"{name}: nobody checks this command"


def check_penstock(arguments: list[str]) -> None:
    group = typer.main.get_command(app)
    name, *rest = arguments
    if name.startswith("--"):
        assert any(name in parameter.opts for parameter in group.get_params(group.make_context("penstock", ["check"])))
        return
    command = group.commands[name]
    if not rest:
        return  # only the command's name
    context = command.make_context(name, rest)
    if name == "bench":
        build_parser().parse_args(context.args)


def check_launch(arguments: list[str]) -> None:
    options = get_args_parser().parse_args(arguments)
    check_python([options.training_script, *options.training_script_args])


def check_python(arguments: list[str]) -> None:
    script, *rest = arguments
    if script == "-m":
        if rest[0] == "torch.distributed.launch":
            check_launch(rest[1:])
        else:
            assert importlib.util.find_spec(rest[0]) is not None
    elif script == "trainer.py":
        build_parser().parse_args(rest)
    else:
        assert script in PLACEHOLDERS or (ROOT / script).is_file(), f"there is no {script}"


def check_slurm(arguments: list[str]) -> None:
    scripts = [index for index, word in enumerate(arguments) if word.endswith((".sh", ".sbatch", ".py"))]
    assert len(scripts) == 1, "a SLURM line starts one script"
    script, rest = arguments[scripts[0]].removeprefix("$PWD/"), arguments[scripts[0] + 1 :]
    if script.endswith(".sbatch"):
        assert (ROOT / "benchmark" / script).is_file()
        script = f"launch_4_node_{rest.pop(0)}.sh"
    assert script in PLACEHOLDERS or (ROOT / "benchmark" / script).is_file()
    build_parser().parse_args(rest)


# ---------------------------------------------------------------- names and links


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = [line.lstrip("# ") for _, line in prose_of(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = "\n".join(line for _, line in prose_of(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name} links to {target}"


def test_the_navigation_has_every_page_once() -> None:
    nav = re.findall(
        r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("not_in_nav")[0]
    )
    assert len(nav) == len(set(nav))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(nav)


def test_code_is_at_most_88_columns_wide() -> None:
    """As much as the site shows beside its navigation in a window of 1400 pixels."""
    wide = [
        f"{page.name}:{block.line + number}: {line}"
        for page in PAGES
        for block in blocks_of(page)
        for number, line in enumerate(block.text.splitlines())
        if len(line) > 88
    ]
    assert wide == []


def test_pictures_are_drawn_by_commands_that_parse() -> None:
    found = [command for page in PAGES for command, _ in mkdocs_pages.PICTURE.findall(page.read_text())]
    assert len(found) > 8
    for command in found:
        check_penstock(shlex.split(command))
    drawn = mkdocs_pages.drawn("draw zb-h1 -p 2 -m 2")
    assert drawn.startswith("<svg") and "zb-h1: 2 ranks" in drawn


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_the_pictures_of_the_readme_are_what_the_command_draws(name: str) -> None:
    assert (ROOT / f"docs/pictures/{name}.svg").read_text() == mkdocs_pages.drawn(f"draw {name} -p 4 -m 8")


def test_the_reference_has_a_page_for_every_public_name() -> None:
    pages = mkdocs_pages.api_pages()
    assert {f"api/penstock.{name}.md" for name in penstock.__all__} <= pages.keys()
    assert "last_step" in pages["api/penstock.Engine.md"] and "register" not in pages["api/penstock.Engine.md"]


def test_headings_of_troubleshooting_are_words_of_errors() -> None:
    source = "".join(re.sub(r'"\n\s*f?"', "", file.read_text()) for file in (ROOT / "src/penstock").rglob("*.py"))
    headings = [line[3:] for _, line in prose_of(ROOT / "docs/troubleshooting.md") if line.startswith("## ")]
    told = [heading for heading in headings if not heading.startswith(("The loss", "A device", "It is slow"))]
    assert len(told) >= 8
    for heading in told:
        parts = [part.strip() for part in heading.split("...") if part.strip()]
        assert all(part in source for part in parts), heading


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_public_names_in_inline_code_exist(page: Path) -> None:
    for number, span in spans_of(page):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|sh|md|csv|toml|sbatch)", span):
            assert any((ROOT / top / span).exists() for top in ("", "src", "src/penstock", "benchmark")), (
                f"{page}:{number}: {span}"
            )
        for name in re.findall(r"\bpenstock((?:\.\w+)+)", span):
            if not name.endswith((".json", ".py")):
                assert resolve("penstock" + name) is not None, f"{page}:{number}: {span}"


def test_the_picture_of_the_house_is_true() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    picture = next(block for block in text.split("```") if "your script:" in block)
    names = set(re.findall(r"[\w./]+\.py|\w+/", picture))
    assert {"runtime/", "engine.py", "rooms.py", "schedule/"} <= names
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "src/penstock").rglob("*")}
    assert names <= there


def test_the_site_says_how_many_lines_each_room_has() -> None:
    table = mkdocs_pages.lines_of_rooms()
    rooms = {path.parent.name for path in (ROOT / "src/penstock").glob("*/__init__.py")}
    assert {name.rstrip("/") for name in re.findall(r"`(.*?)`", table)} == rooms
    *parts, total = (int(cells.split("|")[3].replace(",", "")) for cells in table.splitlines()[2:])
    assert sum(parts) == total
    assert mkdocs_pages.ROOMS in (ROOT / "docs/architecture.md").read_text().splitlines()


def resolve(name: str) -> object:
    """What a dotted name stands for: an attribute, or a module to import."""
    found: object = importlib.import_module("penstock")
    path = "penstock"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(found, part):
            importlib.import_module(path)
        found = getattr(found, part)
    return found


def test_the_tutorials_table_has_every_configuration_key_once() -> None:
    keys = table_column(ROOT / "docs/tutorial.md", "key")
    assert sorted(keys) == sorted(field.name for field in dataclasses.fields(Configuration))


def test_the_schedules_table_has_every_schedule_once() -> None:
    assert sorted(table_column(ROOT / "docs/schedules.md", "name")) == sorted(schedule_names())
