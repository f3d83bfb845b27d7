"""A device in host memory that torch treats as an accelerator, and a process group with NCCL's rules."""
