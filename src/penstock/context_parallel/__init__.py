"""Sequences that several pipelines share: each computes a part of every one."""
