"""The part of a model that one rank holds, and how it is run."""
