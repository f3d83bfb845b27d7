"""What crosses between neighbouring stages of a pipeline, and how."""
