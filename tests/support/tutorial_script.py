"""The code of the pipeline tutorial that this library promises to run, from its first line to its last.

It is as published there but for three things: ``import penstock as oslo``, DEVICE for the tutorial's "cuda" and
NUM_YOUR_GPUS, which the reader fills in. tests/docs/test_tutorial.py runs it where ``gpt2`` and ``squad`` are local
folders.
"""
# ruff: noqa: B007, E402, I001  # the tutorial's own order

import os
import torch

NUM_YOUR_GPUS = int(os.environ["WORLD_SIZE"])
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# 1.1. Create model and tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("gpt2")
tokenizer = AutoTokenizer.from_pretrained("gpt2")

# 1.2. Parallelize the model
import penstock as oslo

model = oslo.initialize(model, config={"model_parallelism": {"enable": True, "pipeline_parallel_size": NUM_YOUR_GPUS}})

# You can also use json file
model = oslo.initialize(model, config="oslo-config.json")

# 1.3. Do inference
text = "I don't want a lot for Christmas. There is just one thing"
tokens = tokenizer(text, return_tensors="pt").to(DEVICE)
print(tokenizer.decode(model.generate(**tokens, num_beams=3)[0]))

# 2.1. Initialize some variables
BATCH_SIZE = 4
SEQ_LEN = 64
SAVE_INTERVAL = 50
TRAIN_STEP = 100

# 2.2. Create model, optimizer and tokenizer
from torch.optim import Adam
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = Adam(model.parameters(), lr=3e-5)
tokenizer = AutoTokenizer.from_pretrained("gpt2")

# Add pad token for batch training
# GPT2 tokenizer doesn't have pad token.
tokenizer.pad_token = tokenizer.eos_token

# 2.3. Parallelize the model
import penstock as oslo

model = oslo.initialize(model, config={"model_parallelism": {"pipeline_parallel_size": NUM_YOUR_GPUS}})

# 2.4. Load dataset and create dataloader
from datasets import load_dataset
from torch.utils.data import DataLoader

datasets = load_dataset("squad").data["train"]["context"]
datasets = [str(_) for _ in datasets[: TRAIN_STEP * BATCH_SIZE]]
dataloader = DataLoader(datasets, batch_size=BATCH_SIZE, shuffle=True)

# 2.5. Do training
for step, batch in enumerate(dataloader):
    optimizer.zero_grad()

    # Make batch
    input_batch = tokenizer(
        batch,
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=SEQ_LEN,
    ).to(DEVICE)

    # Forward-Backward Steps
    for out in model(**input_batch, labels=input_batch["input_ids"]):
        loss = out.loss
        loss.backward()

    optimizer.step()

# 2.6. Save the parallelized model
for step, batch in enumerate(dataloader):
    optimizer.zero_grad()

    # Make batch
    input_batch = tokenizer(
        batch,
        return_tensors="pt",
        padding=True,
        truncation=True,
        max_length=SEQ_LEN,
    ).to(DEVICE)

    # Forward-Backward Steps
    for out in model(**input_batch, labels=input_batch["input_ids"]):
        loss = out.loss
        loss.backward()

    # Save the parallelized model using `save_parallelized`
    if step % SAVE_INTERVAL == 0:
        model.save_parallelized(save_directory="./parallel_ckpt")

    if step > TRAIN_STEP:
        break

# 3.1. Create model
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("gpt2")

from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config.from_pretrained("gpt2")
model = GPT2LMHeadModel(config)

# 3.2. Parallelize the model
import penstock as oslo

model = oslo.initialize(model, config={"model_parallelism": {"enable": True, "pipeline_parallel_size": NUM_YOUR_GPUS}})

# 3.3 Load parallelized checkpoints
model = model.from_parallelized("./parallel_ckpt")

# 3.4. Merge parallelized checkpoints
model.save_parallelized("./merged_ckpt", merge_checkpoints=True)
