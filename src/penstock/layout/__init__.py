"""Which units each rank holds: templates, partitions, pipelines placed on ranks. Pure Python, no torch."""
