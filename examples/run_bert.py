"""Train BERT to classify pairs of texts (as GLUE's tasks do) over pipelines that may differ in depth.

torchrun --standalone --nproc-per-node 4 run_bert.py --pipelines 1x2,3x6
"""

import torch
from transformers import BertConfig, BertForSequenceClassification

from common import VOCABULARY_SIZE, finish, make_plugin, pair_collator, parse_options, text_pairs, train
from penstock import Booster


def main() -> None:
    options = parse_options("Train BERT to classify pairs of texts over pipelines that may differ in depth.")
    dataset, tokenizer = text_pairs(options)
    num_labels = len({pair["label"] for pair in dataset})
    if options.model:
        model = BertForSequenceClassification.from_pretrained(options.model, num_labels=num_labels)
    else:
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY_SIZE,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_labels=num_labels,
            )
        )

    plugin = make_plugin(model, options)
    dataloader = plugin.prepare_dataloader(dataset, shuffle=True, drop_last=True, collate_fn=pair_collator(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)

    booster = Booster(plugin=plugin)
    model, optimizer, _, dataloader, lr_scheduler = booster.boost(model, optimizer, None, dataloader, lr_scheduler)
    plugin.describe(plot=options.plot)
    losses = train(booster, model, optimizer, dataloader, lr_scheduler, options, options.output / "bert")
    finish(booster, model, losses, options.output / "bert", tokenizer)


if __name__ == "__main__":
    main()
