"""What each trainer of TRL needs beside transformers' Trainer."""
