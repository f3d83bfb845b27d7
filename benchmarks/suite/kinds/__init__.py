"""The benchmark: the same GPT or ResNet trained data-parallel, fully sharded and in pipelines, in one table."""
