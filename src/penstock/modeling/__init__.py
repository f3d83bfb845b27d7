"""A Hugging Face model, and the part of it that one rank holds. Knows no communication."""
