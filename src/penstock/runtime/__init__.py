"""Doing what a schedule says: layout, channels, executor, gradient reduction."""
