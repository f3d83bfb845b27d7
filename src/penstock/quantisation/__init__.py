"""Experts packed in 4 bits, which transformers leaves as they are. Packed layers: `modeling/packed_layers.py`."""
