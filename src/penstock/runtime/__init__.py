"""Running a model that is spread over ranks: forming the engine, steps, messages, gradients, failures."""
