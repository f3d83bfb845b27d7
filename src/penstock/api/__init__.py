"""What a user calls: `initialize`, `from_pretrained`, the plugin and the Booster."""
