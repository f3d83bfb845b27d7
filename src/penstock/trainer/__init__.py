"""transformers' Trainer, and those of TRL, over pipeline stages."""
