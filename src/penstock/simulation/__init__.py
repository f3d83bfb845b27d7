"""What a run or a schedule looks like: simulation, timelines, drawings, tables. Above the core."""
