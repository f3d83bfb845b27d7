"""Train OPT over pipelines that may differ in depth, save it, and reload it with plain transformers.

torchrun --standalone --nproc-per-node 4 run_opt.py --pipelines 1x2,3x6
"""

import torch
from transformers import OPTConfig, OPTForCausalLM

from common import VOCABULARY_SIZE, finish, make_plugin, parse_options, text_rows, train
from penstock import Booster


def main() -> None:
    options = parse_options("Train OPT over pipelines that may differ in depth.")
    dataset, tokenizer = text_rows(options)
    if options.model:
        model = OPTForCausalLM.from_pretrained(options.model)
    else:
        model = OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=64,
                word_embed_proj_dim=64,
                ffn_dim=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                max_position_embeddings=128,
                pad_token_id=0,
                bos_token_id=0,
                eos_token_id=0,
            )
        )

    plugin = make_plugin(model, options)
    dataloader = plugin.prepare_dataloader(dataset, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)

    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(model, optimizer, None, dataloader, lr_scheduler)
    plugin.describe(plot=options.plot)
    losses = train(booster, model, optimizer, dataloader, lr_scheduler, options, options.output / "opt")
    finish(booster, model, losses, options.output / "opt", tokenizer)


if __name__ == "__main__":
    main()
