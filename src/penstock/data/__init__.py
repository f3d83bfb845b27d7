"""Splitting batches into microbatches, and loading each pipeline's share of a data set."""
